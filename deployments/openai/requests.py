"""Request bodies of the two generating endpoints. What is missing here is in neutral.py."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from adaptivespec.config import GuardSettings, Kappa
from adaptivespec.request import Mode
from adaptivespec.shape import Shape
from deployments.openai.errors import invalid

Role = Literal["system", "developer", "user", "assistant"]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Tokens = Annotated[int, Meta(ge=1, le=2**63 - 1)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
StopStrings = Annotated[list[StopString], Meta(max_length=16)]


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag="text", tag_field="type"):
    """The only kind of content part that a text model reads."""

    text: str


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat. "developer" is OpenAI's newer name of "system"."""

    role: Role
    content: str | list[TextPart]

    def for_template(self) -> dict[str, str]:
        """The message as chat templates read it: content parts joined as they are."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return {"role": role, "content": self.content}
        return {"role": role, "content": "".join(part.text for part in self.content)}


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """include_usage: send one more chunk, with the usage and no choices, before [DONE]."""

    include_usage: bool | None = None


class Speculation(GuardSettings, frozen=True, forbid_unknown_fields=True):
    """How this request speculates. `kappa` and `shape` absent: the server's own. Guards hold beside
    the server's own."""

    mode: Mode = "adaptive"
    kappa: Kappa | None = None
    shape: Shape | None = None


class GenerationBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints share. `temperature` absent or null is 1.0, OpenAI's default: the margin
    rule acts at temperature 0 only, so lossy acceptance is what a client asks for, never what it
    gets by leaving a parameter out. `top_k` (0 or -1: off) and `min_p` are vLLM's extensions.
    `seed` absent: another draw every time. `user` and `metadata` label the request and never act
    on the answer."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**63 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Int64 | None = None
    stop: StopString | StopStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    speculation: Speculation | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions. `max_tokens` is the older name of `max_completion_tokens`; with
    neither, the answer may fill the context."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt` is one text or one list of token ids, bare or as the only
    element of a list. `max_tokens` absent is 16, as OpenAI has it; null may fill the context."""

    prompt: str | list[int | str | list[int]]
    max_tokens: Tokens | None = 16

    def single_prompt(self) -> str | list[int]:
        """The text or token ids to go on from. Raises ApiError for none and for several."""
        if isinstance(self.prompt, str):
            return self.prompt
        ids = [element for element in self.prompt if isinstance(element, int)]
        if len(ids) == len(self.prompt):
            return ids
        only = self.prompt[0]
        if len(self.prompt) > 1 or isinstance(only, int):
            raise invalid(
                f"prompt: {len(self.prompt)} prompts in one request are not supported; "
                "one text or one list of token ids is allowed",
                "prompt",
            )
        return only
