"""What steps cost on this machine, learned from what they take.

What verifying takes is a curve over the rows of the pass: flat while memory is the limit, a
staircase where rows are multiplied in blocks, then a line. Every size keeps how it compares to a
middling machine's, and all follow one scale, which is how fast the machine is at present: so a
load, or a longer context, found out at one size holds for the others. The other parts of a step are
linear, by least squares over recent steps: drafting by passes and expanded nodes, feeding the
drafter by tokens, what remains by whether there was a draft. Nothing has to be measured before the
first request; a profile (see `profile.py`) makes the first steps as good as later ones.
"""

import operator
import statistics
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from adaptivespec.pricing import Growth

Floats = NDArray[np.float64]

MEMORY = 0.99
"""What an observation still weighs when the next one of its part has come."""

MEASURED = 5.0
"""Observations that a measurement beforehand is worth."""

LATELY = 9
"""Passes whose median sets the scale: a context grows, and others use the machine."""

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
"""Rows of a pass at which its cost is known; it is linear between."""

STEADY = 0.1
"""Part of a plain pass by which the cost of more rows has to rise, for another slope than expected
to be half believed."""

SURE = 50.0
"""Observations of a size after which the next ones are as good as those before."""

WORTH = 2.0
"""Steps that the ratios of a middling machine are worth, each."""

EAGER, LAZY_FROM = 32, 8
"""Steps that are learned from at once; later ones are kept until there are so many."""

OUTLIER = 2.0
"""No step counts for more than this times what was expected: others may use the machine."""


class StepWork(NamedTuple):
    """What a step of decoding did, and the seconds that it took. `growth` is None without a draft;
    `nodes` are all that were verified, roots included. `adaptive`: some request leaves its shape to
    the policy; `behind`: tokens of such requests that the drafter has yet to be fed."""

    requests: int
    nodes: int
    tokens: int
    fed: int
    feed_s: float
    growth: Growth | None
    draft_s: float
    verify_s: float
    total_s: float
    adaptive: bool = True
    behind: int = 0


class VerifyCosts(msgspec.Struct, frozen=True):
    """Seconds of passes of the target over `rows` nodes."""

    rows: list[int]
    seconds: list[float]


class DraftCosts(msgspec.Struct, frozen=True):
    """Seconds of a draft and of each of its passes and expanded nodes; of feeding the drafter and
    of each token that it is fed."""

    once: float
    level: float
    expansion: float
    feed: float
    token: float


class Line:
    """seconds = sum of coefficient * quantity, from a prior and recent observations. The prior is
    what is believed of quantities that do not vary, or rise together."""

    def __init__(
        self,
        ratios: Sequence[float],
        typical: Sequence[float],
        unit: float,
        worth: float = WORTH,
    ) -> None:
        """The prior: coefficients of `ratios` * `unit` seconds, worth so many observations at the
        `typical` quantities."""
        self.coefficients = [ratio * unit for ratio in ratios]
        """Seconds of each quantity's unit."""
        self._prior = np.array(self.coefficients)
        self._weights = np.diag(worth * np.square(typical))
        self._squares = np.zeros_like(self._weights)
        self._products = np.zeros(len(ratios))
        self._new = False

    def seconds(self, *quantities: float) -> float:
        return sum(map(operator.mul, self.coefficients, quantities))

    def observe(self, seconds: float, *quantities: float) -> None:
        """Take note of one observation of `quantities`, for `solve`."""
        x = np.array(quantities)
        self._squares = MEMORY * self._squares + x[:, None] * x
        self._products = MEMORY * self._products + x * seconds
        self._new = True

    def solve(self) -> None:
        """Learn from what was observed, if anything was."""
        if not self._new:
            return
        believed = self._weights @ self._prior
        found = np.linalg.solve(self._weights + self._squares, believed + self._products)
        self.coefficients = np.maximum(found, 0.0).tolist()
        self._new = False


class Staircase:
    """seconds of a pass by its rows: `expected` at every ROWS, times how this machine differs from
    it at that size, times the scale."""

    def __init__(self, expected: Floats) -> None:
        self._curve = expected
        self._rising = _rising(expected)
        self._seen = np.zeros_like(expected)
        self._ratios = deque([1.0], LATELY)  # to the curve
        self._scale = 1.0
        self._shape = np.ones_like(expected)
        self._expected = expected

    @classmethod
    def measured(cls, costs: VerifyCosts) -> "Staircase":
        """What begins with what was measured; sizes beyond grow as the last ones did."""
        rows, seconds = np.array(costs.rows), np.array(costs.seconds)
        slope = (seconds[-1] - seconds[0]) / max(rows[-1] - rows[0], 1)
        beyond = np.maximum(np.array(ROWS) - rows[-1], 0) * max(slope, 0.0)
        curve = cls(np.interp(ROWS, rows, seconds) + beyond)
        curve._seen[np.isin(ROWS, rows)] = MEASURED
        return curve

    def seconds(self, rows: int) -> float:
        """What a pass of so many rows takes: no less than one of fewer."""
        return self._scale * self._rising[min(rows, ROWS[-1])]

    def beyond(self, rows: int, counts: Sequence[int]) -> list[float]:
        """What passes of so many rows more take longer."""
        seconds = self.seconds(rows)
        return [self.seconds(rows + count) - seconds for count in counts]

    def observe(self, seconds: float, rows: int) -> None:
        """Take note of one pass, for `solve`."""
        above = min(int(np.searchsorted(ROWS, rows)), len(ROWS) - 1)
        below = max(above - 1, 0)
        reach = ROWS[above] - ROWS[below]
        share = min((rows - ROWS[below]) / reach, 1.0) if reach else 1.0
        ratio = seconds / float(np.interp(rows, ROWS, self._curve))
        if self._seen[above] and (share == 1 or self._seen[below]):
            self._ratios.append(ratio)
            self._scale = statistics.median(self._ratios)
            ratio = min(max(ratio, self._scale / OUTLIER), self._scale * OUTLIER)
        for knot, weight in ((below, 1 - share), (above, share)):
            if weight:
                self._seen[knot] = min(self._seen[knot] + weight, SURE)
                self._shape[knot] *= (ratio / self._scale) ** (weight / self._seen[knot])

    def solve(self) -> None:
        """Learn from what was observed. What was never seen differs from what was expected as its
        neighbours do; beyond all that was seen, the slope differs as it did up to there."""
        seen = self._seen.nonzero()[0]
        everywhere = np.arange(len(ROWS))
        self._shape = np.interp(everywhere, seen, self._shape[seen])
        self._curve = self._expected * self._shape
        first, last = seen[0], seen[-1]
        doubt = STEADY * self._expected[0]
        rise = max(self._curve[last] - self._curve[first], 0.0) + doubt
        steepness = rise / (self._expected[last] - self._expected[first] + doubt)
        beyond = self._expected[last:] - self._expected[last]
        self._curve[last:] = self._curve[last] + steepness * beyond
        self._shape[last:] = self._curve[last:] / self._expected[last:]
        self._rising = _rising(self._curve)


def _rising(curve: Floats) -> list[float]:
    """A curve over ROWS at 0, 1, 2, ... rows, which nowhere falls."""
    rows = np.arange(ROWS[-1] + 1)
    return np.interp(rows, ROWS, np.maximum.accumulate(curve)).tolist()


class CostModel:
    """The costs of the parts of a step. Before the first, one plain step takes one second: only
    ratios matter."""

    def __init__(self) -> None:
        self.learned = 0
        """Steps that the costs know."""
        self._kept: list[StepWork] = []
        self._begin(1.0)
        self._begun = False

    def _begin(self, unit: float) -> None:
        self._begun = True
        self._verify = Staircase(unit * (0.97 + 0.03 * np.array(ROWS)))
        self._draft = Line((0.04, 0.10, 0.003), (1, 2, 4), unit)
        self._feed = Line((0.08, 0.003), (1, 4), unit)
        self._rest = Line((0.02, 0.02), (1, 1), unit)

    def profiled(self, verify: VerifyCosts | None, draft: DraftCosts | None) -> None:
        """Begin with what was measured beforehand, as far as it was."""
        if verify is not None:
            self._begin(verify.seconds[0])
            self._verify = Staircase.measured(verify)
        if draft is not None and self._begun:
            drafting = draft.once, draft.level, draft.expansion
            self._draft = Line(drafting, (1, 2, 4), 1.0, MEASURED)
            self._feed = Line((draft.feed, draft.token), (1, 4), 1.0, MEASURED)

    def observe(self, step: StepWork) -> None:
        """Learn from a step, soon."""
        self._kept.append(step)
        if self.learned < EAGER or len(self._kept) == LAZY_FROM:
            for each in self._kept:
                self._learn(each)
            for part in (self._verify, self._draft, self._feed, self._rest):
                part.solve()
            self.learned += len(self._kept)
            self._kept.clear()

    def _learn(self, step: StepWork) -> None:
        if not self._begun:
            self._begin(step.verify_s / self._verify.seconds(step.nodes))
        self._verify.observe(step.verify_s, step.nodes)
        if step.growth is not None:
            work = 1, step.growth.passes, step.growth.expanded
            self._draft.observe(_believed(step.draft_s, self._draft.seconds(*work)), *work)
        if step.fed:
            self._feed.observe(_believed(step.feed_s, self.feeding(step.fed)), 1, step.fed)
        rest = max(step.total_s - step.verify_s - step.draft_s - step.feed_s, 0.0)
        parts = 1, step.growth is not None
        self._rest.observe(_believed(rest, self._rest.seconds(*parts)), *parts)

    def seconds(self, step: StepWork) -> float:
        """What such a step is expected to take."""
        seconds = self._verify.seconds(step.nodes)
        seconds += self._rest.seconds(1, step.growth is not None)
        if step.growth is not None:
            seconds += self._draft.seconds(1, step.growth.passes, step.growth.expanded)
        return seconds + self.feeding(step.fed)

    def plain(self, requests: int) -> float:
        """Seconds of a step that drafts nothing and feeds nobody."""
        return self._verify.seconds(requests) + self._rest.seconds(1, 0)

    def feeding(self, tokens: int) -> float:
        """Seconds to tell the drafter so many tokens."""
        return self._feed.seconds(1, tokens) if tokens else 0.0

    def nodes(self, requests: int, counts: Sequence[int]) -> list[float]:
        """Seconds that verifying takes longer for so many nodes beside the roots of requests."""
        return self._verify.beyond(requests, counts)

    @property
    def drafting(self) -> float:
        """Seconds that any draft takes, beside its passes and nodes."""
        return self._draft.coefficients[0] + self._rest.coefficients[1]

    @property
    def level(self) -> float:
        """Seconds of one pass of the drafter."""
        return self._draft.coefficients[1]

    @property
    def expansion(self) -> float:
        """Seconds of one node more in a pass."""
        return self._draft.coefficients[2]


def _believed(seconds: float, expected: float) -> float:
    """What is learned from: others may use the machine."""
    return min(seconds, OUTLIER * expected)
