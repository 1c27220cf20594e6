"""Response bodies of the two generating endpoints, whole and in chunks."""

import time
import uuid
from abc import abstractmethod
from typing import Any, Literal, Protocol

from msgspec import UNSET, Struct, UnsetType

from adaptivespec.request import FinishReason, StepSeconds, Usage


class SpeculationUsage(Struct, frozen=True):
    """What speculation did for this request; see adaptivespec.request.Usage."""

    steps: int
    drafted_tokens: int
    accepted_tokens: int
    promoted_tokens: int
    mean_acceptance_length: float
    accepted_per_position: list[int]
    step_seconds: StepSeconds


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    speculation: SpeculationUsage

    @classmethod
    def of(cls, usage: Usage) -> "UsageBody":
        speculation = SpeculationUsage(
            steps=usage.steps,
            drafted_tokens=usage.drafted_tokens,
            accepted_tokens=usage.accepted_tokens,
            promoted_tokens=usage.promoted_tokens,
            mean_acceptance_length=usage.mean_acceptance_length,
            accepted_per_position=usage.accepted_per_position,
            step_seconds=usage.step_seconds,
        )
        prompt, completion = usage.prompt_tokens, usage.completion_tokens
        return cls(prompt, completion, prompt + completion, speculation)


class AssistantMessage(Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    message: AssistantMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    delta: ChatDelta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class TextChoice(Struct, frozen=True):
    text: str
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class Reply(Struct, frozen=True):
    """A body or a chunk of either endpoint."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    choices: list[Any]
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: None = None


class Dialect(Protocol):
    """In what the two endpoints' replies differ."""

    operation: Literal["chat", "text_completion"]  # gen_ai.operation.name
    id_prefix: str
    whole_object: str
    chunk_object: str

    @abstractmethod
    def whole(self, text: str, reason: FinishReason) -> Struct:
        """The choice of an answer in one piece."""

    @abstractmethod
    def opening(self) -> list[Struct]:
        """Choices to stream before the first text."""

    @abstractmethod
    def piece(self, text: str) -> Struct:
        """The choice of a chunk with text."""

    @abstractmethod
    def closing(self, reason: FinishReason) -> Struct:
        """The choice of the chunk that ends the text."""


class ChatDialect(Dialect):
    operation: Literal["chat"] = "chat"
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, text: str, reason: FinishReason) -> ChatChoice:
        return ChatChoice(AssistantMessage(text), reason)

    def opening(self) -> list[Struct]:
        return [ChatChunkChoice(ChatDelta(role="assistant", content=""))]

    def piece(self, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(ChatDelta(content=text))

    def closing(self, reason: FinishReason) -> ChatChunkChoice:
        return ChatChunkChoice(ChatDelta(), reason)


class TextDialect(Dialect):
    operation: Literal["text_completion"] = "text_completion"
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def whole(self, text: str, reason: FinishReason) -> TextChoice:
        return TextChoice(text, reason)

    def opening(self) -> list[Struct]:
        return []

    def piece(self, text: str) -> TextChoice:
        return TextChoice(text)

    def closing(self, reason: FinishReason) -> TextChoice:
        return TextChoice("", reason)


class Replies:
    """Every reply to one request: they share id, time and model."""

    def __init__(self, dialect: Dialect, model: str) -> None:
        self.dialect = dialect
        self.id = dialect.id_prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self.model = model

    def whole(self, text: str, reason: FinishReason, usage: Usage) -> Reply:
        choices = [self.dialect.whole(text, reason)]
        return self._reply(self.dialect.whole_object, choices, UsageBody.of(usage))

    def chunk(self, choices: list[Struct], usage: Usage | UnsetType | None) -> Reply:
        """`usage` is UNSET in a stream without usage; in one with it, it is null up to the last
        chunk."""
        body = UsageBody.of(usage) if isinstance(usage, Usage) else usage
        return self._reply(self.dialect.chunk_object, choices, body)

    def _reply(
        self, kind: str, choices: list[Struct], usage: UsageBody | UnsetType | None
    ) -> Reply:
        return Reply(self.id, kind, self._created, self.model, choices, usage)
