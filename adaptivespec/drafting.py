"""The conversation with one drafter: who is fed what, and who drafts in which shape.

Whoever drives a target holds one of these per connected drafter: the controller, and the worker
inside SGLang's scheduler. Every call may raise DrafterLost; then the object is of no further use,
and the requests go on as plain decoding until another drafter is there.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from adaptivespec.config import LONGEST_WINDOW, UNGUARDED, GuardSettings
from adaptivespec.drafters.base import Extension
from adaptivespec.errors import DrafterLost
from adaptivespec.messages import (
    Confidence,
    Draft,
    DraftCommit,
    Drafted,
    DraftOpen,
    Failed,
    Ping,
    Pong,
    StateRows,
)
from adaptivespec.policy import Policy
from adaptivespec.port import DraftPort
from adaptivespec.pricing import Growth, Prices
from adaptivespec.request import Mode
from adaptivespec.shape import NO_DRAFT, Shape
from adaptivespec.signals import Signals

Answer = TypeVar("Answer")


def expect(kind: type[Answer], answer: object, lost: type[Exception]) -> Answer:
    """The answer, if it is of the kind that is due; a `Failed` and any other raise `lost`."""
    if isinstance(answer, kind):
        return answer
    raise lost(answer.reason if isinstance(answer, Failed) else f"{answer!r} is out of turn")


class DraftedSequence:
    """A request's tokens, and how far the target and the drafter have come with them.

    tokens   prompt and committed output; the last one is the root of the next tree
    cached   positions in the target's cache: prompt rows done, then always len(tokens) - 1
    fed      tokens that the drafter holds; 0 when it does not know the request
    capacity most tokens that it will have, those of the tree under verification included
    promotions  places in `tokens` of the latest promoted ones
    """

    def __init__(
        self,
        id: int,
        tokens: list[int],
        max_tokens: int,
        capacity: int,
        signals: Signals,
        mode: Mode = "adaptive",
        shape: Shape | None = None,
        guards: GuardSettings = UNGUARDED,
        traceparent: str | None = None,
    ) -> None:
        self.id = id
        self.tokens = tokens
        self.tokens_left = max_tokens
        self.capacity = capacity
        self.signals = signals
        self.mode = mode
        self.shape = shape
        self.guards = guards
        self.traceparent = traceparent
        self.cached = 0
        self.fed = 0
        self.promotions: deque[int] = deque(maxlen=LONGEST_WINDOW)

    def note_promotions(self, promoted: Sequence[bool]) -> None:
        """Account for the accepted nodes of a step, whose tokens are yet to be appended."""
        self.promotions += [len(self.tokens) + i for i, jump in enumerate(promoted) if jump]

    @property
    def drafts(self) -> bool:
        """Whether this request wants a drafter at all."""
        return self.mode != "off"

    @property
    def behind(self) -> int:
        """Tokens that the drafter lacks."""
        return len(self.tokens) - self.fed

    @property
    def ready(self) -> bool:
        """Whether the drafter holds every token and has something to propose."""
        return self.fed == len(self.tokens) and self.signals.confidence > 0

    def unfed(self, limit: int) -> StateRows:
        """State rows that the drafter lacks, at most `limit`: row i goes with token i + 1, and the
        first token alone opens the request."""
        start = max(self.fed, 1) - 1
        return StateRows(self.id, start, min(self.cached, len(self.tokens) - 1, start + limit))

    def fit(self, shape: Shape) -> Shape:
        """`shape`, no deeper than tokens are left: each step also emits a bonus token."""
        depth = min(shape.depth, self.tokens_left - 1)
        if depth < 1:
            return NO_DRAFT
        nodes = min(shape.nodes, depth + 1) if shape.width == 1 else shape.nodes
        return Shape(depth, shape.width, nodes)


Drafts = TypeVar("Drafts", bound=DraftedSequence)


class Feed(NamedTuple, Generic[Drafts]):
    """What the drafter is to be given of a sequence: the target's states of `rows`, and the token
    after each."""

    sequence: Drafts
    rows: StateRows


def choose_shapes(policy: Policy, sequences: Sequence[DraftedSequence]) -> list[Shape]:
    """The shape of each sequence's next tree, of all that decode: the policy's, or the one that its
    request asks for; NO_DRAFT where the drafter is not ready."""
    adaptive = [s for s in sequences if s.ready and s.mode == "adaptive"]
    chosen = dict(
        zip(
            (s.id for s in adaptive),
            policy.shapes([s.signals for s in adaptive], len(sequences)),
            strict=True,
        )
    )

    def shape_of(sequence: DraftedSequence) -> Shape:
        if not sequence.ready:
            return NO_DRAFT
        return chosen.get(sequence.id) or sequence.shape or policy.start

    return [sequence.fit(shape_of(sequence)) for sequence in sequences]


def choose_prices(
    policy: Policy, drafting: Sequence[DraftedSequence], running: int
) -> Prices | None:
    """What is worth drafting for these, of `running` requests that decode."""
    adaptive = [s.signals if s.mode == "adaptive" else None for s in drafting]
    return policy.prices(adaptive, running)


class Fed(NamedTuple):
    """What giving the drafter tokens took: seconds that it computed, and that they and their states
    travelled."""

    tokens: int = 0
    seconds: float = 0.0
    transfer_s: float = 0.0


class Grown(NamedTuple):
    """What asking the drafter for trees took: seconds that it computed, and that they travelled.
    `growth` is None without any."""

    seconds: float = 0.0
    transfer_s: float = 0.0
    growth: Growth | None = None


class Drafting:
    """One connected drafter: `extend` it with what was committed, then let it `draft`, and take its
    `drafted` once the trees have come over the link."""

    def __init__(self, port: DraftPort, needs_states: bool, max_rows: int) -> None:
        """`max_rows`: tokens, and state rows, that it may be given in one step."""
        self.needs_states = needs_states
        self._port = port
        self._max_rows = max_rows

    def feeds(self, sequences: Iterable[Drafts], followed: int | None = None) -> list[Feed[Drafts]]:
        """What the drafter lacks of these, within what a step may carry; of those that leave their
        shapes to the policy, only of so many as it has `followed`."""
        feeds, budget = [], self._max_rows
        # Those that lack least go first: running answers keep their speculation while a prompt, or
        # all that a new drafter has to catch up with, streams in.
        wanting = [sequence for sequence in sequences if sequence.drafts and sequence.cached]
        for sequence in sorted(wanting, key=lambda s: s.cached - s.fed):
            if sequence.mode == "adaptive" and followed is not None:
                if followed == 0:
                    continue
                followed -= 1
            rows = sequence.unfed(budget)
            if rows.stop > rows.start:
                feeds.append(Feed(sequence, rows))
                budget -= rows.stop - rows.start
        return feeds

    def extend(self, feeds: Sequence[Feed[Drafts]], closed: list[int]) -> Fed:
        """Have the drafter forget `closed` and take the feeds, whose states, if it needs any, are
        on the link."""
        if not feeds and not closed:
            return Fed()
        started = time.perf_counter()
        extensions = [Extension(s.id, s.tokens[r.start + 1 : r.stop + 1]) for s, r in feeds]
        opened = [DraftOpen(s.id, s.tokens[0], s.capacity) for s, r in feeds if r.start == 0]
        self._port.post(DraftCommit(closed, opened, extensions))
        confidence = expect(Confidence, self._port.reply(), DrafterLost)
        for (sequence, rows), value in zip(feeds, confidence.values, strict=True):
            sequence.fed = rows.stop + 1
            sequence.signals.confidence = value
        took = time.perf_counter() - started
        tokens = sum(rows.stop - rows.start for _, rows in feeds)
        return Fed(tokens, confidence.seconds, self._travelled(took, confidence.seconds))

    def draft(
        self,
        requests: list[int],
        shapes: list[Shape],
        traces: list[str],
        prices: Prices | None = None,
    ) -> None:
        """Ask for one tree per request, which come over the link as one batch."""
        self._port.post(Draft(requests, shapes, traces, prices))

    def drafted(self, took: float) -> Grown:
        """What the drafter says of its trees, which were there `took` seconds after they were asked
        for."""
        drafted = expect(Drafted, self._port.reply(), DrafterLost)
        return Grown(drafted.seconds, self._travelled(took, drafted.seconds), drafted.growth)

    def _travelled(self, took: float, computed: float) -> float:
        """What of `took` was not the drafter's computing. A target that waits for trees measures
        from its own message on, which may come to it later than the drafter's: hence the bound."""
        return max(0.0, took - computed) if self._port.remote else 0.0

    def ping(self) -> Pong:
        """What the drafter holds."""
        self._port.post(Ping())
        return expect(Pong, self._port.reply(), DrafterLost)

    def close(self) -> None:
        """Hang up; idempotent."""
        self._port.close()
