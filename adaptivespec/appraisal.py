"""Which drafted nodes are worth verifying: of whole trees, and of candidates for one."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from adaptivespec.kernels import trees as kernels
from adaptivespec.kernels import worth
from adaptivespec.kernels.worth import Market
from adaptivespec.pricing import KNOTS, LIKELIHOODS, LOWEST, SPACING, UNPRICED, Prices
from adaptivespec.tree import DraftTrees

Array = NDArray[Any]


def market(prices: Prices | None, trees: int) -> Market:
    """The prices of `trees` trees as the compiled code takes them; None: they have none."""
    if prices is None:
        prices = Prices(0.0, 0.0, 0.0, [0.0] * LIKELIHOODS, [], [UNPRICED] * trees)
    curves = [[curve.first, curve.other] for curve in prices.curves] or [[[1.0] * KNOTS] * 2]
    return Market(
        float(prices.level),
        float(prices.expansion),
        float(prices.node),
        np.array(prices.onward, np.float64),
        np.array(curves, np.float64),
        np.array(prices.of, np.int64),
        LOWEST,
        SPACING,
    )


def worths(trees: DraftTrees, prices: Prices) -> NDArray[np.float32]:
    """ln P(accepted) of every node of trees [B, N] on the CPU; -inf for padding, and where it or a
    node above is not worth verifying."""
    totals = np.empty(trees.tokens.shape, np.float32)
    arrays = (each.numpy() for each in (trees.tokens, trees.parents, trees.logprobs))
    worth.appraise(market(prices, len(totals)), *arrays, totals)
    return totals


def affordable(trees: DraftTrees, prices: Prices, nodes: Sequence[int]) -> DraftTrees:
    """The trees without the nodes that are not worth verifying, `nodes[b]` at most."""
    arrays = (each.numpy() for each in (trees.tokens, trees.parents, trees.logprobs))
    return keep_best(trees.sizes.numpy(), (*arrays, worths(trees, prices)), nodes)


def keep_best(sizes: Array, columns: Sequence[Array], nodes: Sequence[int]) -> DraftTrees:
    """The best nodes[b] - 1 nodes of every tree, and its root, in their order.

    sizes: int64 [B]. columns: tokens, parents and logprobs [B, N] as in `DraftTrees`, and float32
    totals, the score of every node, which never rises from a parent to its child, so that a kept
    node's ancestors are kept. Of equals the earlier one wins; none of -inf is kept.
    """
    shape = len(sizes), max(nodes)
    kept = (
        np.full(shape, -1, np.int32),
        np.zeros(shape, np.int32),
        np.full(shape, -np.inf, np.float32),
    )
    kernels.keep(sizes, *columns, np.array(nodes, np.int64), *kept)
    return DraftTrees(*map(torch.from_numpy, kept))
