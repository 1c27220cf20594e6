"""What a generation asks for and what comes back, between the API, the controller and the CLI."""

from collections.abc import Iterable
from enum import IntEnum
from itertools import zip_longest
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


class StepSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time of steps went. draft: the drafter computed. transfer: states and trees
    travelled between drafter and target, and what asks for them; nothing travels in one process.
    verify: the target computed. other: all else, such as policy, margin rule and bookkeeping."""

    draft: float = 0.0
    transfer: float = 0.0
    verify: float = 0.0
    other: float = 0.0

    @classmethod
    def of(cls, total: float, draft: float, transfer: float, verify: float) -> "StepSeconds":
        """The parts of `total`."""
        other = total - draft - transfer - verify
        return cls(draft=draft, transfer=transfer, verify=verify, other=other)

    @property
    def total(self) -> float:
        return sum(msgspec.structs.astuple(self))

    @property
    def overhead(self) -> float:
        """What neither model computed in."""
        return self.transfer + self.other

    def __add__(self, more: "StepSeconds") -> "StepSeconds":
        return StepSeconds(
            draft=self.draft + more.draft,
            transfer=self.transfer + more.transfer,
            verify=self.verify + more.verify,
            other=self.other + more.other,
        )


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a finished request. drafted/accepted/promoted count tokens below the roots of the
    trees; promoted tokens are accepted tokens too. accepted_per_position[d]: steps that accepted
    more than d tokens. Only tokens delivered to the client count. step_seconds: of all `steps`, of
    the last one until its tokens were delivered; a step that several requests share counts in full
    for each."""

    prompt_tokens: int
    completion_tokens: int
    steps: int
    drafted_tokens: int
    accepted_tokens: int
    promoted_tokens: int
    accepted_per_position: list[int]
    step_seconds: StepSeconds

    def __add__(self, other: "Usage") -> "Usage":
        per_position = zip_longest(
            self.accepted_per_position, other.accepted_per_position, fillvalue=0
        )
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            steps=self.steps + other.steps,
            drafted_tokens=self.drafted_tokens + other.drafted_tokens,
            accepted_tokens=self.accepted_tokens + other.accepted_tokens,
            promoted_tokens=self.promoted_tokens + other.promoted_tokens,
            accepted_per_position=[a + b for a, b in per_position],
            step_seconds=self.step_seconds + other.step_seconds,
        )

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification step, its bonus token counted: 1 + accepted / steps (vLLM's
        definition); 0 before the first step. The first token comes from the prefill."""
        return 1.0 + self.accepted_tokens / self.steps if self.steps else 0.0


class Tally:
    """What becomes a request's `Usage`, counted as its tokens are delivered."""

    def __init__(self) -> None:
        self.seconds = StepSeconds()
        self._steps = self._drafted = self._promoted = 0
        self._per_position: list[int] = []
        self._position = 0

    def step(self, drafted: int, seconds: StepSeconds) -> None:
        """A verified tree of `drafted` nodes below its root; its tokens follow."""
        self._steps += 1
        self._drafted += drafted
        self._position = 0
        self.seconds += seconds

    def delivered(self, origins: Iterable[Origin]) -> None:
        """The next tokens that the client receives."""
        for origin in origins:
            if origin is Origin.TARGET:
                continue
            if self._position == len(self._per_position):
                self._per_position.append(0)
            self._per_position[self._position] += 1
            self._position += 1
            self._promoted += origin is Origin.PROMOTED

    def usage(self, prompt_tokens: int, completion_tokens: int) -> Usage:
        """Counts so far."""
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            steps=self._steps,
            drafted_tokens=self._drafted,
            accepted_tokens=sum(self._per_position),
            promoted_tokens=self._promoted,
            accepted_per_position=list(self._per_position),
            step_seconds=self.seconds,
        )


NOTHING_USED = Tally().usage(0, 0)


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
