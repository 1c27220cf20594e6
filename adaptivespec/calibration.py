"""How often the target accepts what the drafter gives a probability: learned from verified trees.

At each node whose parent was accepted the outcome is known. Outcomes are counted at the knots of a
curve over ln(q / (1 - q)), each at the two it lies between, and a knot's estimate is the mean of
its own outcomes and of a prior that is worth PRIOR outcomes:

    p(knot) = (accepted + PRIOR * prior) / (outcomes + PRIOR)

(beta-binomial), made monotone in q by pooling adjacent violators. The prior itself is scaled
down by how it has fared over all knots lately: a useless drafter is found out everywhere at once.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adaptivespec.kernels import worth
from adaptivespec.monotone import monotone
from adaptivespec.pricing import KNOTS, LOWEST, SPACING, Curve
from adaptivespec.tree import DraftTrees

Floats = NDArray[np.float64]

PRIOR = 8.0
"""Outcomes that a knot's prior is worth."""

DOUBT = 2.0
"""Expected acceptances that the trust in the prior starts with."""

MEMORY, LATELY = 512.0, 64.0
"""Outcomes that a knot remembers, and expected acceptances that the trust does."""

STALE = 1 / 8
"""What outcomes weigh from before a time without any, of a drafter that was of little use."""

FEW = 64
"""Outcomes that a curve may lack; while there are not many, an eighth of them."""

BINS = 10
SMALLEST = 1e-6


class Outcomes(NamedTuple):
    """Nodes whose parent was accepted, as arrays [n]: the drafter's log-probability; whether it is
    its parent's best child; whether it was accepted; the row of its tree in the batch."""

    logprobs: Floats
    first: NDArray[np.bool_]
    accepted: NDArray[np.bool_]
    row: NDArray[np.int64]


def accepted_nodes(path: Tensor) -> NDArray[np.bool_]:
    """bool [B, N]: the nodes on Walk.path [B, N], on the CPU, the root too."""
    accepted = np.empty(path.shape, np.bool_)
    worth.accepted_nodes(path.numpy(), accepted)
    return accepted


def outcomes(trees: DraftTrees, accepted: NDArray[np.bool_]) -> Outcomes:
    """What verified trees, on the CPU, tell: `accepted` as of `accepted_nodes`."""
    columns = trees.tokens.numpy(), trees.parents.numpy(), trees.logprobs.numpy()
    return Outcomes(*worth.outcomes(*columns, accepted))


class Calibration:
    """The curve of one class of requests."""

    def __init__(self, greedy: bool) -> None:
        """A drafter that has learned the target's distribution is accepted with probability q where
        the target samples. A greedy target takes the best child more often than that: the prior for
        it is what EAGLE-3 heads have shown, ln(p / (1 - p)) = 0.5 + 1.1 ln(q / (1 - q))."""
        logits = LOWEST + SPACING * np.arange(KNOTS)
        first = 0.5 + 1.1 * logits if greedy else logits
        self._prior = 1 / (1 + np.exp(-np.stack([first, logits])))
        self._seen = np.zeros_like(self._prior)
        self._accepted = np.zeros_like(self._prior)
        self._trust = np.array([DOUBT, DOUBT])  # acceptances: those that came, and those expected
        self._curve: Curve | None = None
        self._count = self._new = 0  # outcomes, and those that the curve lacks

    @property
    def curve(self) -> Curve:
        """The present estimate, but for the last few outcomes: what a drafter is sent."""
        if self._curve is None or self._new > min(FEW, self._count // 8):
            came, expected = self._trust
            prior = self._prior * min(1.0, came / expected)
            weight = self._seen + PRIOR
            share = (self._accepted + PRIOR * prior) / weight
            first, other = (monotone(s, w) for s, w in zip(share, weight, strict=True))
            other = np.minimum(first, other)  # so that no tree prefers a worse sibling
            first, other = (np.clip(s, SMALLEST, 1.0) for s in (first, other))
            self._curve, self._new = Curve(first.tolist(), other.tolist()), 0
        return self._curve

    def doubt_less(self) -> None:
        """Give a drafter that was of little use another chance: what it did is long ago."""
        came, expected = self._trust
        if came < expected / 2:
            self._trust[:] = DOUBT
            self._seen *= STALE
            self._accepted *= STALE
            self._curve = None

    def best(self, confidence: float) -> float:
        """Probability that a best child of this probability in (0, 1] is accepted."""
        odds = math.log(confidence) - math.log1p(-min(confidence, 1 - 1e-9))
        place = min(max((odds - LOWEST) / SPACING, 0.0), KNOTS - 1.0)
        below = min(int(place), KNOTS - 2)
        low, high = self.curve.first[below : below + 2]
        return low + (place - below) * (high - low)

    def update(
        self, logprobs: Floats, first: NDArray[np.bool_], accepted: NDArray[np.bool_]
    ) -> None:
        """Count outcomes [n]."""
        tallies = self._prior, self._seen, self._accepted, self._trust
        worth.count(logprobs, first, accepted, *tallies, LOWEST, SPACING, MEMORY, LATELY)
        self._count, self._new = self._count + len(logprobs), self._new + len(logprobs)


class Bin(NamedTuple):
    """Nodes whose predicted acceptance lies between two bounds: their number, the mean prediction,
    and the share accepted."""

    low: float
    high: float
    nodes: int
    predicted: float
    accepted: float


class Reliability:
    """Predicted acceptance of drafted nodes against what became of them."""

    def __init__(self) -> None:
        self._sums = np.zeros((3, BINS))  # nodes, predictions, acceptances

    def add(self, predicted: Floats, accepted: NDArray[np.bool_]) -> None:
        """Predictions [n] made before the outcomes [n] were known."""
        place = np.minimum((predicted * BINS).astype(int), BINS - 1)
        for sums, weights in zip(self._sums, (None, predicted, accepted), strict=True):
            sums += np.bincount(place, weights, BINS)

    @property
    def bins(self) -> list[Bin]:
        """Those that have nodes, of equal width over [0, 1]."""
        return [
            Bin(i / BINS, (i + 1) / BINS, int(nodes), predicted / nodes, accepted / nodes)
            for i, (nodes, predicted, accepted) in enumerate(self._sums.T.tolist())
            if nodes
        ]

    @property
    def error(self) -> float:
        """Expected calibration error: the mean over nodes of |share accepted - mean prediction| of
        the node's bin; 0 without nodes."""
        nodes, predicted, accepted = self._sums
        return float(np.abs(predicted - accepted).sum() / max(nodes.sum(), 1))
