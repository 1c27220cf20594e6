"""What steps cost on this machine, learned from what they take.

What verifying takes is a curve over the rows of the pass: flat while memory is the limit, a
staircase where rows are multiplied in blocks, then a line. What is learned is how this machine
differs from a middling one's curve: at every size, which stays, and altogether, which is how fast
it is at present: so a load, or a longer context, found out at one size holds for the others. The
other parts of a step are linear, by least squares over recent steps: drafting by passes and
expanded nodes, feeding the drafter by tokens, what remains by whether there was a draft. Nothing
has to be measured before the first request; a profile (see `profile.py`) makes the first steps as
good as later ones.
"""

import math
import operator
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
"""Observations that a measurement of drafting beforehand is worth."""

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 192, 256, 512)
"""Rows of a pass at which its cost is known; it is linear between."""

STEADY = 0.1
"""Part of a plain pass by which the cost of more rows has to rise, for another slope than expected
to be half believed."""

DOUBT = 0.2
"""How much more or less than expected a size may differ from this machine than the next smaller one
does: a standard deviation, like all that follow, of the logarithm of seconds."""

MEASURED_DOUBT = 0.05
"""The same where both were measured."""

REQUESTS_DOUBT = 0.05
"""The same of twice as many requests with the same rows: attention is by request."""

NOISE, LEAST_NOISE = 0.05, 0.02
"""Of one pass: at first, and at least; it is taken from how passes surprise."""

SURPRISES = 0.95
"""What a surprise still weighs when the next one has come."""

DRIFT, JUMP = 0.01, 0.15
"""Of what changes altogether from one pass to the next, and the part of the last surprise that it
may do so besides: several in a row are another speed, one alone is a stall."""

AGING = 1e-4
"""Part of its first variance by which a size is less certain after each pass."""

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
    """seconds of a pass by its rows: `expected` at every ROWS, times how this machine differs.

    The logarithm of that factor is a sum: of what holds for all passes at present, of the size, and
    of the requests, by the logarithm of their number. A Kalman filter tells them apart. The first
    does a random walk; sizes are what a random walk over ROWS may be, so that one differs like its
    neighbours until it is known. Without that, a run of large trees would be taken for a slow
    machine, and plain decoding, which it has not seen for long, for as slow.
    """

    def __init__(self, expected: Floats, doubt: float | Floats = DOUBT) -> None:
        """`doubt`: DOUBT at each of ROWS."""
        self._expected = expected
        self._curve = expected
        self._seconds = _all_rows(expected)
        self._first, self._last = len(ROWS) - 1, 0  # of ROWS that were seen
        self._scale, self._by_request = 1.0, 0.0
        variances = np.full(len(ROWS), np.square(doubt))
        variances[0] = 0.0  # it differs as the whole does
        walk = np.cumsum(variances)
        sizes = np.minimum(walk[:, None], walk)
        self._prior = np.zeros((len(ROWS) + 2, len(ROWS) + 2))  # the whole, requests, sizes
        self._prior[1, 1] = REQUESTS_DOUBT**2
        self._prior[2:, 2:] = sizes
        self._variance = self._prior.copy()
        self._variance[0, 0] = 1.0
        self._noise, self._jump = NOISE**2, 0.0
        self._mean = np.zeros(len(self._prior))

    @classmethod
    def measured(cls, costs: VerifyCosts) -> "Staircase":
        """What begins with what was measured; sizes beyond grow as the last ones did."""
        rows, seconds = np.array(costs.rows), np.array(costs.seconds)
        slope = (seconds[-1] - seconds[0]) / max(rows[-1] - rows[0], 1)
        beyond = np.maximum(np.array(ROWS) - rows[-1], 0) * max(slope, 0.0)
        doubt = np.where(np.array(ROWS) <= rows[-1], MEASURED_DOUBT, DOUBT)
        return cls(np.interp(ROWS, rows, seconds) + beyond, doubt)

    def seconds(self, rows: int, requests: int) -> float:
        """What a pass of so many rows takes: no less than one of fewer."""
        scale = self._scale * math.exp(self._by_request * math.log2(requests))
        return scale * self._seconds[min(rows, ROWS[-1])]

    def beyond(self, requests: int, counts: Sequence[int]) -> list[float]:
        """What passes take longer with so many rows beside one for every request."""
        seconds = self.seconds(requests, requests)
        return [self.seconds(requests + count, requests) - seconds for count in counts]

    def observe(self, seconds: float, rows: int, requests: int) -> None:
        """Take note of one pass, for `solve`."""
        above = min(int(np.searchsorted(ROWS, rows)), len(ROWS) - 1)
        below = max(above - 1, 0)
        reach = ROWS[above] - ROWS[below]
        share = min((rows - ROWS[below]) / reach, 1.0) if reach else 1.0
        seen = above if share == 1 else below
        self._first, self._last = min(self._first, seen), max(self._last, seen)
        parts = np.zeros(len(self._mean))
        parts[0], parts[1] = 1.0, math.log2(requests)
        parts[2 + below] += 1 - share
        parts[2 + above] += share

        self._variance += AGING * self._prior
        self._variance[0, 0] += DRIFT**2 + self._jump**2
        covariance = self._variance @ parts
        gain = covariance / (parts @ covariance + self._noise)
        surprise = math.log(seconds / float(np.interp(rows, ROWS, self._expected)))
        surprise -= float(parts @ self._mean)
        bound = math.log(OUTLIER)
        surprise = min(max(surprise, -bound), bound)
        self._mean += gain * surprise
        self._variance -= gain[:, None] * covariance
        noise = SURPRISES * self._noise + (1 - SURPRISES) * surprise**2
        self._noise = max(noise, LEAST_NOISE**2)
        self._jump = JUMP * surprise

    def solve(self) -> None:
        """Learn from what was observed. Beyond all that was seen, the slope differs as it did up to
        there."""
        mean = self._rising()
        self._scale, self._by_request = math.exp(mean[0]), float(mean[1])
        self._curve = np.maximum.accumulate(self._expected * np.exp(mean[2:]))
        first, last = self._first, self._last
        doubt = STEADY * self._expected[0]
        rise = max(self._curve[last] - self._curve[first], 0.0) + doubt
        steepness = rise / (self._expected[last] - self._expected[first] + doubt)
        beyond = self._expected[last:] - self._expected[last]
        self._curve[last:] = self._curve[last] + steepness * beyond
        self._seconds = _all_rows(self._curve)

    def _rising(self) -> Floats:
        """The mean, if no pass takes longer than one of more rows: where the curve falls, that it
        does not is one more observation, of the steepest fall first. What is known well, as passes
        of the present size are, then gives way least."""
        mean, variance = self._mean.copy(), self._variance.copy()
        for _ in range(2 * len(ROWS)):
            falls = -np.diff(np.log(self._expected) + mean[2:])
            at = int(falls.argmax())
            between = variance[2 + at] - variance[3 + at]
            doubt = between[2 + at] - between[3 + at]
            if falls[at] <= 0 or doubt <= 0:
                break
            mean -= between * (falls[at] / doubt)
            variance -= between[:, None] * (between / doubt)
        return mean


def _all_rows(curve: Floats) -> list[float]:
    """A curve over ROWS at 0, 1, 2, ... rows."""
    return np.interp(np.arange(ROWS[-1] + 1), ROWS, curve).tolist()


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
            self._begin(step.verify_s / self._verify.seconds(step.nodes, step.requests))
        self._verify.observe(step.verify_s, step.nodes, step.requests)
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
        seconds = self._verify.seconds(step.nodes, step.requests)
        seconds += self._rest.seconds(1, step.growth is not None)
        if step.growth is not None:
            seconds += self._draft.seconds(1, step.growth.passes, step.growth.expanded)
        return seconds + self.feeding(step.fed)

    def plain(self, requests: int) -> float:
        """Seconds of a step that drafts nothing and feeds nobody."""
        return self._verify.seconds(requests, requests) + self._rest.seconds(1, 0)

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
