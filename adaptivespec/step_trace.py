"""The spans of one step: one per traced request, open while the workers add theirs below it."""

from collections.abc import Iterable

from opentelemetry.trace import Span

from adaptivespec.acceptance import Acceptance
from adaptivespec.drafting import DraftedSequence
from adaptivespec.shape import Shape
from adaptivespec.tracing import start_step_span, traceparent_of


class StepTrace:
    """Costs nothing for a request that is not traced: it has no traceparent."""

    def __init__(self) -> None:
        self._spans: dict[int, tuple[Span, str]] = {}

    def begin(self, sequences: Iterable[DraftedSequence]) -> None:
        """Open a span for each sampled request."""
        for sequence in sequences:
            span = start_step_span(sequence.traceparent)
            if context := traceparent_of(span):
                self._spans[sequence.id] = span, context

    def contexts(self, sequences: Iterable[DraftedSequence]) -> list[str]:
        """What the workers need to record their own spans below these requests' steps."""
        if not self._spans:
            return []
        return [self._spans[s.id][1] for s in sequences if s.id in self._spans]

    def planned(self, sequence: DraftedSequence, shape: Shape) -> None:
        """Note what the policy saw and what it chose; before the step's outcome changes either."""
        if sequence.id in self._spans:
            signals = sequence.signals
            self._spans[sequence.id][0].set_attributes(
                {
                    "adaptivespec.shape": list(shape),
                    "adaptivespec.confidence": signals.confidence,
                    "adaptivespec.rolling_acceptance": signals.acceptance,
                    "adaptivespec.dcs": signals.dcs,
                }
            )

    def accepted(self, sequence: DraftedSequence, outcome: Acceptance) -> None:
        """Note the outcome of verification."""
        if sequence.id in self._spans:
            self._spans[sequence.id][0].set_attributes(
                {
                    "adaptivespec.nodes": outcome.drafted + 1,
                    "adaptivespec.accepted": len(outcome.tokens),
                    "adaptivespec.promoted": sum(outcome.promoted),
                    "adaptivespec.smallest_promoted_margin": outcome.margin,
                }
            )

    def prefilled(self, sequence: DraftedSequence, tokens: int) -> None:
        """Note the prompt tokens that this step computed."""
        if sequence.id in self._spans:
            self._spans[sequence.id][0].set_attribute("adaptivespec.prompt_tokens", tokens)

    def end(self) -> None:
        """Close all spans."""
        for span, _ in self._spans.values():
            span.end()
        self._spans.clear()
