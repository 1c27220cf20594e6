"""What drafted nodes are worth, compiled: `pricing.Prices` as arrays, and what became of nodes."""

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from adaptivespec.pricing import UNPRICED


class Market(NamedTuple):
    """The fields of `pricing.Prices`; `lowest` and `spacing` place the curves' knots."""

    level: float
    expansion: float
    nodes: NDArray[np.float64]  # [M + 1], price of verifying 0, 1, ... nodes beside the roots
    least: float  # the smallest price that a node has on average
    onward: NDArray[np.float64]  # [LIKELIHOODS]
    curves: NDArray[np.float64]  # [C, 2, KNOTS], of best children and of others
    of: NDArray[np.int64]  # [B]
    lowest: float
    spacing: float


@njit(nogil=True, cache=True)
def conditional(market: Market, tree: int, logprob: float, first: bool) -> float:
    """ln P(accepted | parent accepted) of a node, from the drafter's log-probability; `first`: it
    is its parent's best child. -inf stays. The drafter's own where the tree has no price."""
    of = market.of[tree]
    if of == UNPRICED or logprob == -math.inf:
        return logprob
    curve = market.curves[of, 0 if first else 1]
    miss = -math.expm1(logprob)
    place = math.inf
    if miss > 0:
        place = (logprob - math.log(miss) - market.lowest) / market.spacing
    return math.log(_between(curve, place))


@njit(nogil=True, cache=True)
def _between(curve: Any, place: float) -> float:
    """The value at a place in units of the knots' distance, linear between them and constant
    beyond."""
    if place <= 0:
        return float(curve[0])
    below = int(min(place, len(curve) - 1.0))
    if below >= len(curve) - 1:
        return float(curve[len(curve) - 1])
    share = place - below
    return float(curve[below] * (1 - share) + curve[below + 1] * share)


@njit(nogil=True, cache=True)
def possible(market: Market, tree: int, total: float) -> bool:
    """Whether a node, of a path of log-worth `total`, can be worth verifying at all."""
    if total == -math.inf:
        return False
    return bool(market.of[tree] == UNPRICED or math.exp(total) >= market.least)


@njit(nogil=True, cache=True)
def choose(market: Market, sizes: Any, totals: Any) -> tuple[float, int, float]:
    """Of all nodes of the priced trees, whose log-worths are totals [B, N] of which the first
    sizes[b] count, the best few are verified: so many as bring most above their price together.
    Returns what that is, their number, and the log-worth of the last of them, inf for none."""
    losses = np.empty(totals.size)
    count = 0
    for b in range(len(sizes)):
        if market.of[b] != UNPRICED:
            for n in range(1, sizes[b]):
                if totals[b, n] > -math.inf:
                    losses[count] = -totals[b, n]
                    count += 1
    losses = np.sort(losses[:count])
    brought, most, chosen = 0.0, 0.0, 0
    for n in range(1, min(count, len(market.nodes) - 1) + 1):
        brought += math.exp(-losses[n - 1])
        if brought - market.nodes[n] > most:
            most, chosen = brought - market.nodes[n], n
    return most, chosen, -losses[chosen - 1] if chosen else math.inf


@njit(nogil=True, cache=True)
def drop(market: Market, sizes: Any, totals: Any) -> None:
    """Give the log-worth -inf to nodes of priced trees that are not worth verifying; of equals the
    later ones."""
    _, left, last = choose(market, sizes, totals)
    for b in range(len(sizes)):
        if market.of[b] != UNPRICED:
            left -= np.sum(totals[b, 1 : sizes[b]] > last)
    for b in range(len(sizes)):
        if market.of[b] != UNPRICED:
            for n in range(1, sizes[b]):
                if totals[b, n] == last and left > 0:
                    left -= 1
                elif totals[b, n] <= last:
                    totals[b, n] = -math.inf


@njit(nogil=True, cache=True)
def gain(market: Market, total: float) -> float:
    """What expanding a node of log-worth `total` brings above its price."""
    worth = math.exp(total)
    onward = _between(market.onward, worth * (len(market.onward) - 1))
    return worth * onward - market.expansion


@njit(nogil=True, cache=True)
def note(found: Any, worth: float, gained: float) -> None:
    """Share out the worth of an expanded node, and what was gained below it, over the values
    of worth that `found` [2, LIKELIHOODS] is given at."""
    knots = found.shape[1]
    place = worth * (knots - 1)
    below = min(int(place), knots - 2)
    for knot, share in ((below, 1 - (place - below)), (below + 1, place - below)):
        found[0, knot] += share * worth
        found[1, knot] += share * gained


@njit(nogil=True, cache=True)
def appraise(market: Market, tokens: Any, parents: Any, logprobs: Any, totals: Any) -> None:
    """totals [B, N]: the log-worth of every node of trees [B, N], -inf at padding."""
    trees, size = tokens.shape
    for b in range(trees):
        for n in range(size):
            parent = parents[b, n]
            if tokens[b, n] < 0:
                totals[b, n] = -math.inf
            elif parent < 0:
                totals[b, n] = 0.0
            else:
                first = is_first(parents, b, n)
                value = conditional(market, b, logprobs[b, n], first)
                totals[b, n] = totals[b, parent] + value


@njit(nogil=True, cache=True)
def is_first(parents: Any, b: int, n: int) -> bool:
    """Whether no earlier node has the same parent: trees list children best first."""
    return not np.any(parents[b, :n] == parents[b, n])


@njit(nogil=True, cache=True)
def forecast(
    worth: Any, prices: Any, onward: Any, expansion: float, level: float, deepest: int
) -> float:
    """Tokens that trees bring above their price, as far as best children tell, whose first are
    worth `worth` [R], which is changed; prices [R + 1], of so many nodes. Levels go on, as in a
    drafter, while what is below pays for the pass."""
    brought = total = 0.0
    for n, each in enumerate(np.sort(worth)[::-1]):
        brought += each
        total = max(total, brought - prices[n + 1])
    for _ in range(deepest - 1):
        net = -level
        for r in range(len(worth)):
            rate = _between(onward, worth[r] * (len(onward) - 1))
            net += max(worth[r] * rate - expansion, 0.0)
            worth[r] *= min(max(rate, 0.0), 1.0)
        if net <= 0:
            break
        total += net
    return total


@njit(nogil=True, cache=True)
def count(
    logprobs: Any, first: Any, accepted: Any, prior: Any, seen: Any, came: Any, trust: Any,
    lowest: float, spacing: float, memory: float, lately: float,
) -> None:  # fmt: skip
    """Add outcomes [n] to a calibration's tallies [2, KNOTS], each to the two knots that it lies
    between, and to its trust [2]; all forget what is beyond their memory."""
    knots = seen.shape[1]
    for i in range(len(logprobs)):
        logprob = min(logprobs[i], -1e-9)
        odds = logprob - math.log(-math.expm1(logprob))
        place = min(max((odds - lowest) / spacing, 0.0), knots - 1.0)
        below, kind = min(int(place), knots - 2), 0 if first[i] else 1
        trust[0] += accepted[i]
        for knot, share in ((below, 1 - (place - below)), (below + 1, place - below)):
            trust[1] += share * prior[kind, knot]
            seen[kind, knot] += share
            came[kind, knot] += share * accepted[i]
    trust *= min(1.0, lately / np.max(trust))
    for kind in range(2):
        for knot in range(knots):
            if seen[kind, knot] > memory:
                came[kind, knot] *= memory / seen[kind, knot]
                seen[kind, knot] = memory


@njit(nogil=True, cache=True)
def accepted_nodes(path: Any, accepted: Any) -> None:
    """bool [B, N]: the nodes on Walk.path [B, N], the root too."""
    accepted[:] = False
    for b in range(len(path)):
        for node in path[b]:
            if node >= 0:
                accepted[b, node] = True


@njit(nogil=True, cache=True)
def outcomes(tokens: Any, parents: Any, logprobs: Any, accepted: Any) -> tuple[Any, Any, Any, Any]:
    """Of the drafted nodes of trees [B, N] whose parents were accepted, of which it is known what
    became: their log-probabilities float64 [n], whether they are their parent's best child, whether
    they were accepted, and their tree int64 [n]."""
    size, n = tokens.size, 0
    found, rows = np.empty(size), np.empty(size, np.int64)
    first, came = np.empty(size, np.bool_), np.empty(size, np.bool_)
    for b in range(len(tokens)):
        for at in range(tokens.shape[1]):
            if tokens[b, at] < 0 or parents[b, at] < 0 or not accepted[b, parents[b, at]]:
                continue
            found[n], rows[n] = logprobs[b, at], b
            first[n], came[n] = is_first(parents, b, at), accepted[b, at]
            n += 1
    return found[:n], first[:n], came[:n], rows[:n]
