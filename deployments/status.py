"""What an orchestrator says of itself: for health checks, and for the API's checks of requests."""

from typing import Literal

import msgspec

from adaptivespec.config import GuardSettings
from adaptivespec.shape import Shape

TargetState = Literal["ready", "starting", "lost"]
DrafterState = Literal["ready", "starting", "lost", "none"]


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals over all requests since the orchestrator started; `accepted_tokens` includes the
    promoted ones. Never above each other: promoted <= accepted <= drafted."""

    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    promoted_tokens: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        mine, theirs = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        return Counters(**{name: count + theirs[name] for name, count in mine.items()})


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is going on, and what both sides say that they hold: all zero when nothing runs."""

    running: int = 0
    queued: int = 0
    kv_tokens_used: int = 0  # reserved by running requests
    target_requests: int = 0
    target_kv_tokens: int = 0
    drafter_requests: int = 0
    counters: Counters = Counters()
    step_overhead_ms: float | None = None  # median of recent steps: all but the models' own time


class Status(Load, frozen=True, kw_only=True):
    """State of one orchestrator. Everything down to `max_shape` is fixed once the target is ready;
    while it is starting, `context_length`, `vocab_size` and `kv_tokens` are 0."""

    model: str  # the id that clients use
    context_length: int  # tokens of prompt and output together that one request may have
    vocab_size: int  # token ids are below it
    max_running: int  # requests decoding at once
    kv_tokens: int  # tokens whose keys and values fit, over all running requests
    drafter_kind: str  # "lookup", "eagle3", "lm" or "none"
    policy: str  # "static" or "dcs"
    kappa: float  # of requests that name none
    guards: GuardSettings  # of every request
    max_shape: Shape  # largest tree that a request may ask for

    target: TargetState
    drafter: DrafterState
