"""What the controller says to the target and the drafter at every step, and what they answer.

Plain data, tagged so that a union of them can travel as frames; in process they are passed as they
are. Request ids are the controller's own; they are never reused within its life.
"""

import msgspec

from adaptivespec.drafters.base import Extension
from adaptivespec.pricing import Growth, Prices
from adaptivespec.sampling import SamplingParams
from adaptivespec.shape import Shape


class TargetOpen(msgspec.Struct, frozen=True):
    """A new request; at most `capacity` positions will be cached, trees under verification too."""

    request: int
    capacity: int
    sampling: SamplingParams


class DraftOpen(msgspec.Struct, frozen=True):
    """A new request for the drafter, with its first token."""

    request: int
    token: int
    capacity: int


class AcceptedPath(msgspec.Struct, frozen=True):
    """Nodes of the last verified tree to keep: root first, each the child of the one before."""

    request: int
    nodes: list[int]


class StateRows(msgspec.Struct, frozen=True):
    """Projected hidden states of positions start..stop of a request, to be sent to the drafter."""

    request: int
    start: int
    stop: int


class Chunk(msgspec.Struct, frozen=True):
    """The next prompt tokens of a request; after a `final` chunk the target draws a token."""

    request: int
    tokens: list[int]
    final: bool


class TargetCommit(msgspec.Struct, frozen=True, tag=True):
    """To the target, no answer: settle the last step and send `states` over the link, in order."""

    closed: list[int] = []
    opened: list[TargetOpen] = []
    paths: list[AcceptedPath] = []
    states: list[StateRows] = []


class Verify(msgspec.Struct, frozen=True, tag=True):
    """To the target: one forward pass over prompt chunks and trees. The trees of the first
    `drafted` requests come over the link, padded to `nodes`; the others are their root alone.
    `traces` are the W3C contexts of the sampled step spans."""

    requests: list[int]
    roots: list[int]
    drafted: int
    nodes: int
    chunks: list[Chunk]
    traces: list[str] = []


class Verified(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Verify`. The arrays are row-major [len(requests), nodes] in native byte order:
    int32 tokens and parents and float32 log-probabilities of the trees (see DraftTrees), int32
    target tokens per node, float32 log-ratio of each node to its parent's top-1. `first_tokens`
    follow the final chunks. `wait_s`: until the trees were there, which `forward_s` follows.
    `link_down` says why no tree arrived; then all trees are their roots and nodes is 1."""

    nodes: int
    tokens: bytearray
    parents: bytearray
    logprobs: bytearray
    target: bytearray
    gap: bytearray
    first_tokens: list[int]
    wait_s: float
    forward_s: float
    link_down: str | None = None


class UseLink(msgspec.Struct, frozen=True, tag=True):
    """To either side, no answer: from here on use the link of this generation; for the drafter,
    also forget every request."""

    generation: int


class DraftCommit(msgspec.Struct, frozen=True, tag=True):
    """To the drafter: settle the last step. State rows, when it needs any, come over the link in
    the order of `extensions`."""

    closed: list[int] = []
    opened: list[DraftOpen] = []
    extensions: list[Extension] = []


class Confidence(msgspec.Struct, frozen=True, tag=True):
    """The answer to `DraftCommit`: the drafter's own top-1 probability per extension."""

    values: list[float]
    seconds: float


class Draft(msgspec.Struct, frozen=True, tag=True):
    """To the drafter: grow one tree per request and send them over the link as one batch, padded
    to the largest `nodes`. `prices`: what is worth drafting; without, all of `shapes` is."""

    requests: list[int]
    shapes: list[Shape]
    traces: list[str] = []
    prices: Prices | None = None


class Drafted(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Draft`: the trees are on their way."""

    seconds: float
    growth: Growth = Growth()


class Ping(msgspec.Struct, frozen=True, tag=True):
    """To either side; answered by `Pong`."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Ping`: what the side really holds, for health checks and leak tests."""

    requests: int
    cache_tokens: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Instead of any answer: the side broke and must be rebuilt."""

    reason: str


TargetMessage = TargetCommit | Verify | UseLink | Ping
TargetReply = Verified | Pong | Failed
DraftMessage = DraftCommit | Draft | UseLink | Ping
DraftReply = Confidence | Drafted | Pong | Failed
