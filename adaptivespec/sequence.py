"""One running request, as the controller sees it."""

from collections.abc import Callable

from adaptivespec.acceptance import Acceptance
from adaptivespec.drafting import DraftedSequence
from adaptivespec.output import OutputStream
from adaptivespec.request import Delta, GenerationRequest, Origin, StepSeconds, Tally, Usage
from adaptivespec.signals import Rule, Signals

Sink = Callable[[Delta | Exception], None]
"""Receives a request's deltas, the last with a finish reason, or one exception that ends it."""


class Sequence(DraftedSequence):
    """One running request: its tokens, its answer so far, and its counts.

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
        super().__init__(
            id,
            list(request.prompt),
            request.max_tokens,
            capacity,
            signals,
            request.mode,
            request.shape,
            request.guards,
            request.traceparent,
        )
        self.request = request
        self.output = output
        self.sink = sink
        self.unsettled: list[int] = []
        self.tally = Tally()

    @property
    def decoding(self) -> bool:
        """The prompt is cached and the first token drawn."""
        return len(self.tokens) > len(self.request.prompt)

    @property
    def kappa(self) -> float:
        """The margin rule's threshold."""
        return Rule.of(self.request.kappa, self.request.sampling).kappa

    def advance(self, outcome: Acceptance, seconds: StepSeconds) -> bool:
        """Account for a verified tree and the step's time so far, deliver its tokens, and say
        whether the answer ended."""
        self.tally.step(outcome.drafted, seconds)
        self.cached += len(outcome.path)
        self.unsettled = outcome.path
        self.signals.update(outcome.depth, len(outcome.tokens))
        self.note_promotions(outcome.promoted)
        origins = [Origin.PROMOTED if jump else Origin.DRAFTED for jump in outcome.promoted]
        return self.emit([*outcome.tokens, outcome.bonus], [*origins, Origin.TARGET])

    def emit(self, run: list[int], origins: list[Origin]) -> bool:
        """Append a run of committed tokens, deliver what counts, and say whether it ended."""
        counted, pieces, reason = self.output.push(run)
        self.tokens += run[:counted]
        self.tokens_left -= counted
        self.tally.delivered(origins[:counted])
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
        return self.tally.usage(len(self.request.prompt), self.output.count)
