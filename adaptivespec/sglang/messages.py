"""What the owner of an engine says to the worker in its scheduler, and what that answers.

The worker connects to its owner, by as many lines as `LINES`; every message has one answer:
`Refused` where what it asks for fails, and `Failed` where the worker itself does.
"""

import msgspec

from adaptivespec.messages import Failed
from transport.channel import Address
from transport.link import LinkAddress

VERSION = 1

LINES = 2
"""One for questions, and one for the drafter's link, whose set-up takes time."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The worker's first word on a line, once SGLang has allocated its cache: what it can hold."""

    context: int  # positions of a sequence, as SGLang counts them
    kv_tokens: int
    page_size: int
    vocab_size: int
    state_size: int  # width of the states that it sends to the drafter; 0: none


class OpenLink(msgspec.Struct, frozen=True, tag=True):
    """Wait for the drafter of this generation, and for no earlier one any longer; answered by
    `LinkOpened`."""

    generation: int


class LinkOpened(msgspec.Struct, frozen=True, tag=True):
    """Where the drafter is to go."""

    address: LinkAddress


class JoinLink(msgspec.Struct, frozen=True, tag=True):
    """Meet the drafter, whose messages go to `drafter`, and use it from the next step on; answered
    by `Joined`."""

    generation: int
    drafter: Address


class Joined(msgspec.Struct, frozen=True, tag=True):
    """The link is up."""


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Answered by `State`."""


class State(msgspec.Struct, frozen=True, tag=True):
    """What the worker and the drafter hold for requests that have not ended. `lost` says why the
    drafter was given up, and is None while one is in use and before the first has come."""

    requests: int
    kv_tokens_used: int  # by running requests; what the radix cache keeps for later is not
    drafter_requests: int
    steps: int
    drafted_tokens: int
    accepted_tokens: int
    promoted_tokens: int
    passes: int  # verifications, each of a whole batch
    graph_passes: int  # of these, by a captured CUDA graph
    drafter_s: float  # computed by the drafter for them, in all
    verify_s: float  # taken by them, in all
    step_overhead_s: float | None
    stalled_s: float  # since a step last began or ended, while requests are running
    lost: str | None


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The set-up failed."""

    reason: str


ToWorker = OpenLink | JoinLink | Ask
FromWorker = Hello | LinkOpened | Joined | State | Refused | Failed
