"""What a target can hold."""

from typing import NamedTuple, Self

from adaptivespec.config import Settings
from adaptivespec.errors import RequestError
from adaptivespec.models.config import DecoderConfig
from adaptivespec.request import GenerationRequest


class Limits(NamedTuple):
    """What the target can hold. Counts of tokens and requests."""

    context: int  # longest sequence, prompt and output
    vocab_size: int  # token ids are below it
    kv_tokens: int
    prefill_chunk: int  # prompt tokens per step, over all requests
    max_running: int
    max_queued: int
    max_nodes: int  # per tree, root included
    max_state_rows: int  # per step, over all requests

    @classmethod
    def of(cls, settings: Settings, model: DecoderConfig) -> Self:
        """The limits that the settings give to this model."""
        return cls(
            context=model.context_length,
            vocab_size=model.vocab_size,
            kv_tokens=settings.target.kv_tokens,
            prefill_chunk=settings.target.prefill_chunk,
            max_running=settings.target.max_running,
            max_queued=settings.target.max_queued,
            max_nodes=settings.max_shape.nodes,
            max_state_rows=settings.max_state_rows,
        )

    @property
    def longest(self) -> int:
        """The largest prompt + max_tokens that can ever be served."""
        return min(self.context, self.kv_tokens - self.max_nodes)

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError, naming the field, for a request that can never be served."""
        prompt, wanted = len(request.prompt), len(request.prompt) + request.max_tokens
        if not prompt:
            raise RequestError("the prompt is empty", "prompt")
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.vocab_size:
            raise RequestError(
                f"prompt: token ids must be from 0 to {self.vocab_size - 1}", "prompt"
            )
        if wanted > self.longest:
            raise RequestError(
                f"{prompt} prompt tokens and max_tokens {request.max_tokens} make {wanted}; "
                f"at most {self.longest} fit",
                "max_tokens",
            )
