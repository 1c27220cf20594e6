"""Growing draft trees, compiled: candidates, frontiers, and the nodes that are kept between calls.

Loops over nodes, one request after the other; `drafters.growth` says what for.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from adaptivespec.kernels.worth import Market, choose, conditional, gain, note, possible
from adaptivespec.pricing import UNPRICED

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


class Nodes(NamedTuple):
    """What is known of the expanded nodes of S requests, R rows each, the K best children."""

    counts: Ints  # [S], rows in use
    tokens: Ints  # [S, R]
    parents: Ints  # [S, R], rows; -1 at the root
    depths: Ints  # [S, R]
    visible: NDArray[np.bool_]  # [S, R, R], [.., i, j]: row j is row i or one of its ancestors
    children: Ints  # [S, R, K]
    logprobs: Floats  # [S, R, K], -inf where there are fewer children

    @classmethod
    def empty(cls, slots: int, rows: int, width: int) -> "Nodes":
        def zeros(*shape: int, dtype: Any = np.int64) -> NDArray[Any]:
            return np.zeros((slots, rows, *shape), dtype)

        visible, children = zeros(rows, dtype=np.bool_), zeros(width)
        logprobs = zeros(width, dtype=np.float32)
        return cls(np.ones(slots, np.int64), zeros(), zeros(), zeros(), visible, children, logprobs)


class Pool(NamedTuple):
    """The candidates of B trees in the order they are found, the roots first."""

    sizes: Ints  # [B]
    starts: Ints  # [B], the first candidate of the last level
    tokens: NDArray[np.int32]  # [B, P]
    parents: NDArray[np.int32]  # [B, P], candidates
    logprobs: Floats  # [B, P], the drafter's
    totals: Floats  # [B, P], log-worth of the path
    above: Ints  # [B, P], the parent's row

    @classmethod
    def of_roots(cls, tokens: Ints, most: int) -> "Pool":
        """Roots with the given tokens [B], and room for `most` candidates below each."""
        size = len(tokens), 1 + most
        pool = cls(
            np.ones(len(tokens), np.int64),
            np.ones(len(tokens), np.int64),
            np.empty(size, np.int32),
            np.empty(size, np.int32),
            np.empty(size, np.float32),
            np.empty(size, np.float32),
            np.empty(size, np.int64),
        )
        pool.tokens[:, 0], pool.parents[:, 0] = tokens, -1
        pool.logprobs[:, 0] = pool.totals[:, 0] = 0
        return pool


class Frontier(NamedTuple):
    """Per tree up to W nodes, best first, whose children are the next level's candidates."""

    sizes: Ints  # [B]
    candidates: Ints  # [B, W]
    rows: Ints  # [B, W]

    @classmethod
    def of_roots(cls, trees: int, width: int) -> "Frontier":
        return cls(
            np.ones(trees, np.int64),
            np.zeros((trees, width), np.int64),
            np.zeros((trees, width), np.int64),
        )


SLOT, ROW, PARENT, TOKEN, DEPTH = range(5)
"""Lines of what `advance_level` hands out of nodes to be expanded."""


@njit(nogil=True, cache=True)
def advance_level(
    nodes: Nodes, slots: Any, widths: Any, depths: Any, level: int, frontier: Frontier, pool: Pool,
    market: Market, brought: Any, news: Any, fresh: Any,
) -> tuple[int, bool]:  # fmt: skip
    """Put the children of the frontier, nodes of `level`, into the pool, and let the best of them
    be the next frontier, of which those that have no row yet get one.

    Returns the number of these, n, and whether there is a next frontier. fresh[:, :n] says what
    they are, news [B] how many each tree has. brought [2, LIKELIHOODS] has added to it the worth
    of the frontier's nodes and what their children bring above their price.
    """
    before = choose(market, pool.sizes, pool.totals)[0] if level > 1 else 0.0
    _offer(nodes, slots, widths, frontier, pool, market)
    if level > 1:
        gained = choose(market, pool.sizes, pool.totals)[0] - before
        _note(frontier, pool, market, gained, brought)
    _select(widths, depths, level, frontier, pool, market)
    return _place(nodes, slots, frontier, pool, news, fresh), bool(np.any(frontier.sizes > 0))


@njit(nogil=True, cache=True)
def _offer(
    nodes: Nodes, slots: Any, widths: Any, frontier: Frontier, pool: Pool, market: Market
) -> None:
    for b in range(len(slots)):
        pool.starts[b] = pool.sizes[b]
        for f in range(frontier.sizes[b]):
            parent, row = frontier.candidates[b, f], frontier.rows[b, f]
            for k in range(widths[b]):
                logprob = nodes.logprobs[slots[b], row, k]
                total = pool.totals[b, parent] + conditional(market, b, logprob, k == 0)
                if not possible(market, b, total):
                    continue
                at = pool.sizes[b]
                pool.tokens[b, at] = nodes.children[slots[b], row, k]
                pool.parents[b, at] = parent
                pool.logprobs[b, at] = logprob
                pool.totals[b, at] = total
                pool.above[b, at] = row
                pool.sizes[b] += 1


@njit(nogil=True, cache=True)
def _note(frontier: Frontier, pool: Pool, market: Market, gained: float, brought: Any) -> None:
    """Share out what a level brought over the nodes that were expanded for it, by their worth."""
    together = 0.0
    for collect in (True, False):
        for b in range(len(frontier.sizes)):
            if market.of[b] == UNPRICED:
                continue
            for f in range(frontier.sizes[b]):
                worth = math.exp(pool.totals[b, frontier.candidates[b, f]])
                if collect:
                    together += worth
                else:
                    note(brought, worth, gained * worth / together)


@njit(nogil=True, cache=True)
def _select(
    widths: Any, depths: Any, level: int, frontier: Frontier, pool: Pool, market: Market
) -> None:
    """The best of this level's candidates; where priced, each that brings more than its expansion
    costs, and none unless they pay for the pass together. A pass that is made anyway, for trees
    without a price, is free."""
    together, free = 0.0, False
    for b in range(len(widths)):
        best, count = frontier.candidates[b], 0
        if level < depths[b]:
            for at in range(pool.starts[b], pool.sizes[b]):
                total = pool.totals[b, at]
                if market.of[b] != UNPRICED and gain(market, total) <= 0:
                    continue
                place = count
                while place > 0 and pool.totals[b, best[place - 1]] < total:
                    if place < widths[b]:
                        best[place] = best[place - 1]
                    place -= 1
                if place < widths[b]:
                    best[place] = at
                    count = min(count + 1, widths[b])
        frontier.sizes[b] = count
        free |= count > 0 and market.of[b] == UNPRICED
        if market.of[b] != UNPRICED:
            for f in range(count):
                together += gain(market, pool.totals[b, best[f]])
    if not free and together < market.level:
        frontier.sizes[:] = 0


@njit(nogil=True, cache=True)
def _place(nodes: Nodes, slots: Any, frontier: Frontier, pool: Pool, news: Any, fresh: Any) -> int:
    """Find the rows of the frontier, or make them."""
    n = 0
    for b in range(len(slots)):
        slot, news[b] = slots[b], 0
        for f in range(frontier.sizes[b]):
            at = frontier.candidates[b, f]
            parent, token = pool.above[b, at], pool.tokens[b, at]
            row = _find(nodes, slot, parent, token)
            if row < 0:
                row = nodes.counts[slot]
                nodes.counts[slot] += 1
                nodes.tokens[slot, row], nodes.parents[slot, row] = token, parent
                nodes.depths[slot, row] = nodes.depths[slot, parent] + 1
                nodes.visible[slot, row] = nodes.visible[slot, parent]
                nodes.visible[slot, row, row] = True
                fresh[SLOT, n], fresh[ROW, n], fresh[PARENT, n] = slot, row, parent
                fresh[TOKEN, n], fresh[DEPTH, n] = token, nodes.depths[slot, row]
                news[b] += 1
                n += 1
            frontier.rows[b, f] = row
    return n


@njit(nogil=True, cache=True)
def _find(nodes: Nodes, slot: int, parent: int, token: int) -> int:
    """The row of a node's child with this token, -1 where there is none."""
    for row in range(parent + 1, nodes.counts[slot]):
        if nodes.parents[slot, row] == parent and nodes.tokens[slot, row] == token:
            return row
    return -1


@njit(nogil=True, cache=True)
def keep(
    sizes: Any, tokens: Any, parents: Any, logprobs: Any, totals: Any, budgets: Any,
    kept_tokens: Any, kept_parents: Any, kept_logprobs: Any,
) -> None:  # fmt: skip
    """Of every tree, budgets[b] - 1 nodes of the largest totals, which fall along a path, and the
    root, in their order; of equals the earlier, and none of -inf. The kept trees [B, N] have their
    padding already."""
    for b in range(len(sizes)):
        size = sizes[b]
        new = np.full(size, -1, np.int32)
        new[0] = 0
        for _ in range(min(budgets[b], size) - 1):
            best = -1
            for at in range(1, size):
                better = best < 0 or totals[b, at] > totals[b, best]
                if better and new[at] < 0 and totals[b, at] > -math.inf:
                    best = at
            if best < 0:
                break
            new[best] = 0
        count = 0
        for at in range(size):
            if new[at] == 0:
                new[at] = count
                kept_tokens[b, count] = tokens[b, at]
                kept_parents[b, count] = new[parents[b, at]] if count else -1
                kept_logprobs[b, count] = logprobs[b, at]
                count += 1


@njit(nogil=True, cache=True)
def clear(nodes: Nodes, slot: int, token: int) -> None:
    """Leave a request's root alone, with this token and whatever children it has."""
    nodes.counts[slot] = 1
    nodes.tokens[slot, 0], nodes.parents[slot, 0], nodes.depths[slot, 0] = token, -1, 0
    nodes.visible[slot, 0] = False
    nodes.visible[slot, 0, 0] = True


@njit(nogil=True, cache=True)
def descend(nodes: Nodes, slot: int, tokens: Any, path: Any) -> int:
    """The rows of `tokens` below the root, as far as they are expanded, and their number."""
    row = 0
    for i in range(len(tokens)):
        row = _find(nodes, slot, row, tokens[i])
        if row < 0:
            return i
        path[i] = row
    return len(tokens)


@njit(nogil=True, cache=True)
def reroot(nodes: Nodes, slot: int, root: int, below: Any) -> int:
    """Let row `root` be the root: what is below it stays, in its order. The old rows of that, and
    their number."""
    size, depth = 0, nodes.depths[slot, root]
    new = np.full(nodes.counts[slot], -1, np.int64)
    for row in range(root, nodes.counts[slot]):
        if nodes.visible[slot, row, root]:
            new[row] = size
            size += 1
    for row in range(root, nodes.counts[slot]):
        to = new[row]
        if to < 0:
            continue
        if to:
            below[to - 1] = row
            nodes.parents[slot, to] = new[nodes.parents[slot, row]]
        else:
            nodes.parents[slot, to] = -1
        nodes.tokens[slot, to] = nodes.tokens[slot, row]
        nodes.depths[slot, to] = nodes.depths[slot, row] - depth
        nodes.children[slot, to] = nodes.children[slot, row]
        nodes.logprobs[slot, to] = nodes.logprobs[slot, row]
        for column in range(root, nodes.counts[slot]):
            if new[column] >= 0:
                nodes.visible[slot, to, new[column]] = nodes.visible[slot, row, column]
        nodes.visible[slot, to, size:] = False
    nodes.counts[slot] = size
    return size - 1
