"""What a draft's nodes are worth and what they cost, in tokens: how a policy speaks to a drafter.

A drafted node is worth the probability that it is accepted. The drafter knows its own conditional
probabilities q; a *curve* turns each into the share of such nodes that the target has accepted
below an accepted parent. A path's worth is the product over it.
"""

import msgspec

LOWEST, SPACING, KNOTS = -8.0, 1.0, 17
"""Curves are given at KNOTS values of ln(q / (1 - q)), SPACING apart, and linear between."""

LIKELIHOODS = 5
"""What expanding a node brings is given at so many values of its own worth, from 0 to 1, and is
linear between: the continuations of a likely path are likely."""


NODES = (*range(9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 192, 256, 512)
"""Numbers of nodes at which the price of verifying them is given; it is linear between."""

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
    nodes      what the target verifies beside the roots, all trees together: NODES of them
    onward     what expanding a node brings, net of the nodes' prices, per unit of its own worth,
               at LIKELIHOODS values of that worth
    """

    level: float
    expansion: float
    nodes: list[float]
    onward: list[float]
    curves: list[Curve]
    of: list[int]


class Growth(msgspec.Struct, frozen=True):
    """What a draft took: passes over levels of trees, and nodes expanded in them; the worth of
    those nodes, and what was gained by them, net of the nodes' prices, both shared out over
    LIKELIHOODS values of that worth (empty without prices)."""

    passes: int = 0
    expanded: int = 0
    worth: list[float] = []
    gained: list[float] = []
