"""What a draft's nodes are worth and what they cost, in tokens: how a policy speaks to a drafter.

A drafted node is worth the probability that it is accepted. The drafter knows its own conditional
probabilities q; a *curve* turns each into the share of such nodes that the target has accepted
below an accepted parent. A path's worth is the product over it. Everything here is batched and free
of loops over nodes.
"""

import msgspec
import torch
from torch import Tensor

from adaptivespec.tree import DraftTrees, build, fold_paths

LOWEST, SPACING, KNOTS = -8.0, 1.0, 17
"""Curves are given at KNOTS values of ln(q / (1 - q)), SPACING apart, and linear between."""

LIKELIHOODS = 5
"""What expanding a node brings is given at so many values of its own worth, from 0 to 1, and is
linear between: the continuations of a likely path are likely."""

UNPRICED = -1
"""In `Prices.of`: the tree is drafted in full."""


class Curve(msgspec.Struct, frozen=True):
    """Probability of acceptance at every knot, for a node's best child and for its others: a greedy
    target takes the best child more often than q says, and the others less."""

    first: list[float]
    other: list[float]


class Prices(msgspec.Struct, frozen=True):
    """What one step's drafting costs, in accepted tokens that the same time would bring, and what
    it brings. `of`: each request's curve in `curves`, or UNPRICED.

    level      one more pass of the drafter, which all trees share
    expansion  each node in that pass
    node       each node that the target verifies
    onward     what expanding a node brings, net of the nodes' prices, per unit of its own worth,
               at LIKELIHOODS values of that worth
    """

    level: float
    expansion: float
    node: float
    onward: list[float]
    curves: list[Curve]
    of: list[int]


class Growth(msgspec.Struct, frozen=True):
    """What a draft took: passes over levels of trees, and nodes expanded in them; the worth of
    those nodes, and what was gained below them, net of the nodes' prices, both shared out over
    LIKELIHOODS values of that worth (empty without prices)."""

    passes: int = 0
    expanded: int = 0
    worth: list[float] = []
    gained: list[float] = []


class Appraisal:
    """Prices, ready for a batch of trees on one device."""

    def __init__(self, prices: Prices, device: torch.device | str) -> None:
        self.prices = prices
        self._index = torch.tensor(prices.of, dtype=torch.int64, device=device)
        both = [[curve.first, curve.other] for curve in prices.curves] or [[[1.0] * KNOTS] * 2]
        self._curves = torch.tensor(both, dtype=torch.float32, device=device).flatten(1)
        self._onward = torch.tensor(prices.onward, dtype=torch.float32, device=device)
        self.priced = (self._index != UNPRICED)[:, None]
        """bool [B, 1]"""

    def conditionals(self, logprobs: Tensor, first: Tensor) -> Tensor:
        """ln P(accepted | parent accepted), float32 [B, M], from the drafter's log-probabilities
        [B, M]; `first` (broadcasts to [B, M]): the node is its parent's best child. -inf stays. The
        drafter's own where trees are not priced."""
        kind = torch.where(first, 0, KNOTS)
        logit = logprobs - (-logprobs.expm1()).log()
        knot = ((logit - LOWEST) / SPACING).clamp(0, KNOTS - 1)
        below = knot.long().clamp_max(KNOTS - 2)
        curve = self._curves[self._index.clamp_min(0)]
        low, high = curve.gather(1, kind + below), curve.gather(1, kind + below + 1)
        share = torch.lerp(low, high, knot - below).log()
        share = torch.where(logprobs > -torch.inf, share, -torch.inf)
        return torch.where(self.priced, share, logprobs)

    def affordable(self, conditionals: Tensor, total: Tensor) -> Tensor:
        """`conditionals`, -inf where a priced node's path, of log-worth `total`, is worth less than
        verifying it. What lies below such a node is worth less still."""
        return torch.where(self.priced & (self._net(total) < 0), -torch.inf, conditionals)

    def brought(self, score: Tensor, total: Tensor) -> Tensor:
        """Worth of the expanded nodes, of log-worth `score` [B, W], and what their children, of
        log-worth `total` [B, W * K], are worth above their price, where priced: float32 [2,
        LIKELIHOODS]."""
        worth = torch.where(self.priced, score.exp(), 0.0)
        gained = self._net(total).clamp_min(0).view(*score.shape, -1).sum(-1)
        below, share = _between(worth, LIKELIHOODS)
        both = torch.stack([worth, torch.where(worth > 0, gained, 0.0)]).flatten(1)
        found = torch.zeros(2, LIKELIHOODS, device=score.device)
        for knot, weight in ((below, 1 - share), (below + 1, share)):
            found.index_add_(1, knot.flatten(), both * weight.flatten())
        return found

    def _gain(self, score: Tensor) -> Tensor:
        """What expanding nodes of log-worth `score` brings above its price."""
        worth = score.exp()
        below, share = _between(worth, LIKELIHOODS)
        onward = torch.lerp(self._onward[below], self._onward[below + 1], share)
        return worth * onward - self.prices.expansion

    def _net(self, total: Tensor) -> Tensor:
        return total.exp() - self.prices.node

    def frontier(self, score: Tensor, wanted: Tensor) -> Tensor:
        """Of the nodes [B, W] of log-worth `score` that could be expanded, those that are: where
        priced, each that brings more than its expansion costs, and none unless they pay for the
        pass together. A pass that is made anyway, for trees without a price, is free."""
        gain = self._gain(score)
        paying = wanted & (gain > 0)
        dear = torch.where(paying & self.priced, gain, 0.0).sum() < self.prices.level
        made = (wanted & ~self.priced).any()
        return torch.where(self.priced, paying & (made | ~dear), wanted)


def _between(worth: Tensor, knots: int) -> tuple[Tensor, Tensor]:
    """The last of `knots` values from 0 to 1 that is not above `worth` and not the last, int64, and
    how far on it is to the next."""
    place = worth * (knots - 1)
    below = place.long().clamp_max(knots - 2)
    return below, place - below


def best_children(trees: DraftTrees) -> Tensor:
    """bool [B, N]: no earlier node has the same parent. Trees list children best first."""
    same = trees.parents[:, :, None] == trees.parents[:, None, :]
    return ~same.tril(-1).any(-1)


def affordable(trees: DraftTrees, prices: Prices, nodes: list[int]) -> DraftTrees:
    """The trees without the nodes that are not worth verifying, `nodes[b]` at most."""
    appraisal = Appraisal(prices, trees.tokens.device)
    real = (trees.tokens >= 0) & (trees.parents >= 0)
    logprobs = torch.where(real, trees.logprobs, -torch.inf)
    values = appraisal.conditionals(logprobs, best_children(trees))
    values[:, 0] = 0
    total = fold_paths(values, trees.parents, torch.add)
    values = appraisal.affordable(values, total)
    values[:, 0] = 0
    return build(trees, nodes, values)[0]
