"""One running request, as the controller sees it."""

from collections.abc import Callable

from adaptivespec.acceptance import Acceptance
from adaptivespec.messages import StateRows
from adaptivespec.output import OutputStream
from adaptivespec.request import Delta, GenerationRequest, Origin, Usage
from adaptivespec.shape import NO_DRAFT, Shape
from adaptivespec.signals import Signals

Sink = Callable[[Delta | Exception], None]
"""Receives a request's deltas, the last with a finish reason, or one exception that ends it."""


class Sequence:
    """Tokens, cache positions and counts of one request.

    tokens   prompt and committed output; the last one is the root of the next tree
    cached   positions in the target's cache: prompt rows done, then always len(tokens) - 1
    fed      tokens that the drafter holds; 0 when it does not know the request
    unsettled  accepted nodes of the last tree that the target has not been told yet
    """

    def __init__(
        self,
        id: int,
        request: GenerationRequest,
        output: OutputStream,
        signals: Signals,
        capacity: int,
        sink: Sink,
    ) -> None:
        self.id = id
        self.request = request
        self.output = output
        self.signals = signals
        self.capacity = capacity
        self.sink = sink
        self.tokens = list(request.prompt)
        self.cached = 0
        self.fed = 0
        self.unsettled: list[int] = []
        self.steps = self.drafted = self.accepted = self.promoted = self.emitted = 0

    @property
    def decoding(self) -> bool:
        """The prompt is cached and the first token drawn."""
        return len(self.tokens) > len(self.request.prompt)

    @property
    def drafts(self) -> bool:
        """Whether this request wants a drafter at all."""
        return self.request.mode != "off"

    @property
    def kappa(self) -> float:
        """The margin rule's threshold: promotions only at temperature 0."""
        return self.request.kappa if self.request.sampling.greedy else 1.0

    def unfed(self, limit: int) -> StateRows:
        """State rows that the drafter lacks, at most `limit`: row i goes with token i + 1, and the
        first token alone opens the request."""
        start = max(self.fed, 1) - 1
        return StateRows(self.id, start, min(self.cached, start + limit))

    def fit(self, shape: Shape) -> Shape:
        """`shape`, no deeper than tokens are left: each step also emits a bonus token."""
        depth = min(shape.depth, self.request.max_tokens - self.emitted - 1)
        if depth < 1:
            return NO_DRAFT
        nodes = min(shape.nodes, depth + 1) if shape.width == 1 else shape.nodes
        return Shape(depth, shape.width, nodes)

    def advance(self, outcome: Acceptance) -> bool:
        """Account for a verified tree, deliver its tokens, and say whether the answer ended."""
        self.steps += 1
        self.drafted += outcome.drafted
        self.cached += len(outcome.path)
        self.unsettled = outcome.path
        self.signals.update(outcome.depth, len(outcome.tokens))
        origins = [Origin.PROMOTED if jump else Origin.DRAFTED for jump in outcome.promoted]
        return self.emit([*outcome.tokens, outcome.bonus], [*origins, Origin.TARGET])

    def emit(self, run: list[int], origins: list[Origin]) -> bool:
        """Append a run of committed tokens, deliver what counts, and say whether it ended."""
        counted, pieces, reason = self.output.push(run)
        self.tokens += run[:counted]
        self.emitted += counted
        self.accepted += sum(o is not Origin.TARGET for o in origins[:counted])
        self.promoted += sum(o is Origin.PROMOTED for o in origins[:counted])
        self.sink(
            Delta(
                tokens=run[:counted],
                origins=origins[:counted],
                pieces=pieces,
                finish_reason=reason,
                usage=self.usage() if reason else None,
            )
        )
        return reason is not None

    def usage(self) -> Usage:
        """Counts so far."""
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.emitted,
            steps=self.steps,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            promoted_tokens=self.promoted,
        )
