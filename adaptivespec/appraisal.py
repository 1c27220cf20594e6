"""Which drafted nodes are worth verifying: of whole trees, and of candidates for one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaptivespec.kernels import trees as kernels
from adaptivespec.kernels import worth
from adaptivespec.kernels.worth import Market
from adaptivespec.pricing import KNOTS, LIKELIHOODS, LOWEST, NODES, SPACING, UNPRICED, Prices
from adaptivespec.tree import DraftTrees

Array = NDArray[Any]

_COUNTS = np.arange(NODES[-1] + 1)


def market(prices: Prices | None, trees: int) -> Market:
    """The prices of `trees` trees as the compiled code takes them; None: they have none."""
    if prices is None:
        prices = Prices(0.0, 0.0, [0.0] * len(NODES), [0.0] * LIKELIHOODS, [], [UNPRICED] * trees)
    curves = [[curve.first, curve.other] for curve in prices.curves] or [[[1.0] * KNOTS] * 2]
    nodes = np.interp(_COUNTS, NODES, prices.nodes)
    return Market(
        float(prices.level),
        float(prices.expansion),
        nodes,
        float((nodes[1:] / _COUNTS[1:]).min()),
        np.array(prices.onward, np.float64),
        np.array(curves, np.float64),
        np.array(prices.of, np.int64),
        LOWEST,
        SPACING,
    )


def worths(trees: DraftTrees, prices: Market) -> NDArray[np.float32]:
    """ln P(accepted) of every node of trees [B, N] on the CPU, -inf for padding."""
    totals = np.empty(trees.tokens.shape, np.float32)
    arrays = (each.numpy() for each in (trees.tokens, trees.parents, trees.logprobs))
    worth.appraise(prices, *arrays, totals)
    return totals


def affordable(trees: DraftTrees, prices: Prices, nodes: Sequence[int]) -> DraftTrees:
    """The trees without the nodes that are not worth verifying, `nodes[b]` at most."""
    priced = market(prices, len(nodes))
    sizes, totals = trees.sizes.numpy(), worths(trees, priced)
    arrays = (each.numpy() for each in (trees.tokens, trees.parents, trees.logprobs))
    return keep_best(sizes, (*arrays, totals), nodes, priced)


def keep_best(
    sizes: Array, columns: Sequence[Array], nodes: Sequence[int], prices: Market
) -> DraftTrees:
    """The best nodes[b] - 1 nodes of every tree, and its root, in their order; where they are
    priced, of all together so many as bring most.

    sizes: int64 [B]. columns: tokens, parents and logprobs [B, N] as in `DraftTrees`, and float32
    totals, the score of every node, which never rises from a parent to its child, so that a kept
    node's ancestors are kept. Of equals the earlier one wins; none of -inf is kept.
    """
    worth.drop(prices, sizes, columns[-1])
    shape = len(sizes), max(nodes)
    kept = (
        np.full(shape, -1, np.int32),
        np.zeros(shape, np.int32),
        np.full(shape, -np.inf, np.float32),
    )
    kernels.keep(sizes, *columns, np.array(nodes, np.int64), *kept)
    return DraftTrees(*map(torch.from_numpy, kept))
