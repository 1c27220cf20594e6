"""The margin rule along a tree, compiled: docs/method.md tells its choices."""

import math
from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def follow(
    tokens: Any, parents: Any, target: Any, gap: Any, log_kappa: Any, caps: Any, path: Any,
    promoted: Any,
) -> None:  # fmt: skip
    """From the root of each tree [B, N], accept the child that is the target's own token, or, where
    none is, the one of the largest gap >= log_kappa[b], of equals the one of lower index, and of
    these no more than caps[b]; until there is neither. A log_kappa of 0 is strict: not even a tie
    with the top-1 is promoted.

    path int64 [B, N]: the accepted nodes, the root first, padded with -1. promoted bool [B, N],
    aligned with it: those that are not the target's own token.
    """
    for b in range(len(tokens)):
        path[b], promoted[b] = -1, False
        node = count = spent = 0
        while node >= 0:
            path[b, count] = node
            count += 1
            exact, best = _children(tokens[b], parents[b], target[b, node], gap[b], node)
            lax = exact < 0 <= best and spent < caps[b]
            lax = lax and log_kappa[b] < 0 and gap[b, best] >= log_kappa[b]
            node = best if lax else exact
            if lax:
                promoted[b, count] = True
                spent += 1


@njit(nogil=True)
def _children(tokens: Any, parents: Any, target: int, gap: Any, node: int) -> tuple[int, int]:
    """A node's child that is `target`, and the one of the largest gap; -1 for none."""
    exact, best, largest = -1, -1, -math.inf
    for child in range(node + 1, len(tokens)):
        if parents[child] == node and tokens[child] >= 0:
            if tokens[child] == target:
                exact = child
            if gap[child] > largest:
                best, largest = child, gap[child]
    return exact, best


@njit(nogil=True, cache=True)
def measure(tokens: Any, parents: Any, sizes: Any, levels: Any) -> None:
    """sizes, levels int64 [B]: nodes and levels below the root of trees [B, N]."""
    depths = np.zeros(tokens.shape[1], np.int64)
    for b in range(len(tokens)):
        sizes[b] = levels[b] = 0
        for n in range(1, tokens.shape[1]):
            if tokens[b, n] >= 0:
                depths[n] = depths[parents[b, n]] + 1
                sizes[b] += 1
                levels[b] = max(levels[b], depths[n])
