"""What steps cost on this machine, learned from what they take.

Seconds are linear in what is done, per part of a step, by least squares over recent steps:
verifying without trees by requests, what trees add to that by nodes, drafting by passes and
expanded nodes, feeding the drafter by tokens, and what remains by whether there was a draft. Steps
without trees say nothing about nodes, so these are kept apart: a long rest of the drafter forgets
nothing about them. Each part is as good near the sizes in use as a profile made beforehand, and
follows the batch, the context and whoever else uses the machine. Nothing has to be measured before
the first request: until there is enough to see, the ratios of a middling machine stand in, in units
of this one's first step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adaptivespec.pricing import Growth

MEMORY = 0.99
"""What an observation still weighs when the next one of its part has come."""

PLAIN_MEMORY = 0.95
"""That of steps without trees, which may be few and follow the context and the machine's load."""

WORTH = 2.0
"""Steps that the ratios of a middling machine are worth, each."""

OUTLIER = 3.0
"""No step counts for more than this times what was expected: others may use the machine."""


class StepWork(NamedTuple):
    """What a step of decoding did, and the seconds that it took. `growth` is None without a draft;
    `nodes` are all that were verified, roots included."""

    requests: int
    nodes: int
    tokens: int
    fed: int
    feed_s: float
    growth: Growth | None
    draft_s: float
    verify_s: float
    total_s: float


class Line:
    """seconds = sum of coefficient * quantity, from a prior and recent observations."""

    def __init__(
        self,
        ratios: Sequence[float],
        typical: Sequence[float],
        unit: float,
        memory: float = MEMORY,
    ) -> None:
        """The prior: coefficients of `ratios` * `unit` seconds, worth WORTH observations at the
        `typical` quantities."""
        self._memory = memory
        self.coefficients = np.array(ratios) * unit
        self._weights = np.diag(WORTH * np.square(typical))
        self._squares = np.zeros_like(self._weights)
        self._products = np.zeros_like(self.coefficients)

    def seconds(self, *quantities: float) -> float:
        return float(self.coefficients @ quantities)

    def observe(self, seconds: float, *quantities: float) -> None:
        """Learn from one observation of `quantities`."""
        x = np.array(quantities)
        self._squares = self._memory * self._squares + np.outer(x, x)
        self._products = self._memory * self._products + x * seconds
        anchor = self._weights @ self.coefficients  # what recent steps do not tell stays as it is
        found = np.linalg.solve(self._weights + self._squares, anchor + self._products)
        self.coefficients = np.maximum(found, 0.0)


class CostModel:
    """The costs of the parts of a step. Before the first, one plain step takes one second: only
    ratios matter."""

    def __init__(self) -> None:
        self._begin(1.0)
        self._begun = False

    def _begin(self, unit: float) -> None:
        self._begun = True
        self._plain = Line((0.97, 0.03), (1, 2), unit, PLAIN_MEMORY)
        self._trees = Line((0.0, 0.03), (3, 4), unit)
        self._draft = Line((0.04, 0.10, 0.003), (1, 2, 4), unit)
        self._feed = Line((0.08, 0.003), (1, 4), unit)
        self._rest = Line((0.02, 0.02), (1, 1), unit)

    def observe(self, step: StepWork) -> None:
        """Learn from a step."""
        if not self._begun:
            self._begin(step.verify_s / self._verifying(step))
        self._learn_verifying(step)
        if step.growth is not None:
            work = 1, step.growth.passes, step.growth.expanded
            self._draft.observe(_believed(step.draft_s, self._draft.seconds(*work)), *work)
        if step.fed:
            self._feed.observe(_believed(step.feed_s, self.feeding(step.fed)), 1, step.fed)
        rest = max(step.total_s - step.verify_s - step.draft_s - step.feed_s, 0.0)
        parts = 1, step.growth is not None
        self._rest.observe(_believed(rest, self._rest.seconds(*parts)), *parts)

    def _learn_verifying(self, step: StepWork) -> None:
        seconds = _believed(step.verify_s, self._verifying(step))
        if step.nodes == step.requests:
            self._plain.observe(seconds, 1, step.requests)
        else:
            added = seconds - self._plain.seconds(1, step.requests)
            self._trees.observe(added, 1, step.nodes - step.requests)

    def seconds(self, step: StepWork) -> float:
        """What such a step is expected to take."""
        seconds = self._verifying(step)
        seconds += self._rest.seconds(1, step.growth is not None)
        if step.growth is not None:
            seconds += self._draft.seconds(1, step.growth.passes, step.growth.expanded)
        return seconds + self.feeding(step.fed)

    def _verifying(self, step: StepWork) -> float:
        seconds = self._plain.seconds(1, step.requests)
        if step.nodes > step.requests:
            seconds += self._trees.seconds(1, step.nodes - step.requests)
        return seconds

    def plain(self, requests: int) -> float:
        """Seconds of a step that drafts nothing and feeds nobody."""
        return self._plain.seconds(1, requests) + self._rest.seconds(1, 0)

    def feeding(self, tokens: int) -> float:
        """Seconds to tell the drafter so many tokens."""
        return self._feed.seconds(1, tokens) if tokens else 0.0

    @property
    def node(self) -> float:
        """Seconds to verify one node more."""
        return float(self._trees.coefficients[1])

    @property
    def drafting(self) -> float:
        """Seconds that any draft takes, beside its passes and nodes."""
        once = (self._draft.coefficients[0], self._trees.coefficients[0])
        return float(sum(once) + self._rest.coefficients[1])

    @property
    def level(self) -> float:
        """Seconds of one pass of the drafter."""
        return float(self._draft.coefficients[1])

    @property
    def expansion(self) -> float:
        """Seconds of one node more in a pass."""
        return float(self._draft.coefficients[2])


def _believed(seconds: float, expected: float) -> float:
    """What is learned from: others may use the machine."""
    return min(seconds, OUTLIER * expected)
