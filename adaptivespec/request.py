"""What a generation asks for and what comes back, between the API, the controller and the CLI."""

from enum import IntEnum
from typing import Literal

import msgspec

from adaptivespec.config import UNGUARDED, GuardSettings
from adaptivespec.sampling import SamplingParams
from adaptivespec.shape import Shape

Mode = Literal["adaptive", "static", "off"]
FinishReason = Literal["stop", "length"]


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted request, already validated and tokenised.

    mode: "adaptive" follows the server's policy, "static" drafts `shape` (the policy's start shape
    when None) at every step, "off" is plain decoding. `kappa` acts at temperature 0 only; `guards`
    hold beside those of the engine.
    `ignore_eos` goes on past the end of the turn, for measurements of equal length.
    `traceparent` is the W3C context of the caller's span, None when not sampled.
    """

    prompt: list[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    mode: Mode = "adaptive"
    kappa: float = 1.0
    shape: Shape | None = None
    guards: GuardSettings = UNGUARDED
    traceparent: str | None = None


class Origin(IntEnum):
    """Where an emitted token came from."""

    TARGET = 0  # the target's own: plain decoding, or a step's bonus token
    DRAFTED = 1  # drafted and equal to the target's own
    PROMOTED = 2  # drafted, accepted by the margin rule


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a finished request. drafted/accepted/promoted count tokens below the roots of the
    trees; promoted tokens are accepted tokens too. Only tokens delivered to the client count."""

    prompt_tokens: int
    completion_tokens: int
    steps: int
    drafted_tokens: int
    accepted_tokens: int
    promoted_tokens: int

    def __add__(self, other: "Usage") -> "Usage":
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        names = self.__struct_fields__
        return Usage(**{n: a + b for n, a, b in zip(names, mine, theirs, strict=True)})

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification step, its bonus token counted: 1 + accepted / steps (vLLM's
        definition); 0 before the first step. The first token comes from the prefill."""
        return 1.0 + self.accepted_tokens / self.steps if self.steps else 0.0


NOTHING_USED = Usage(
    prompt_tokens=0,
    completion_tokens=0,
    steps=0,
    drafted_tokens=0,
    accepted_tokens=0,
    promoted_tokens=0,
)


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one step adds to a request: its tokens, their origins (same length), and the text that
    became certain, split as `pieces` so that pieces[i] is the text released by tokens[i] ("" while
    it is held back). The last delta has `finish_reason` and `usage`."""

    tokens: list[int]
    origins: list[Origin]
    pieces: list[str]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)
