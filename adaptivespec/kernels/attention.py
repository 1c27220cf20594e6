"""Attention of a packed batch: LANES queries of one request and kv head at a time, over all their
keys. The queries that share a kv head lie side by side, so keys are read once for all."""

from typing import Any

import numpy as np
from numba import njit

from adaptivespec.kernels.emit import LANES
from adaptivespec.kernels.products import (
    MOST_KEYS,
    QUERIES,
    WIDE,
    narrow_product,
    narrow_weighted,
    weighted,
)
from adaptivespec.kernels.vectors import narrow, softmax

ROW, STOP, KEY, END, MASK, SEEN, UNIT = range(7)
"""Columns of a segment: its rows ROW:STOP of the batch; its request's arena positions KEY:END; its
mask's first byte (-1: a chain), and how many of the last keys that covers; its first unit of work.
A segment has one unit for every kv head and LANES queries."""
COLUMNS = 7


def units(rows: int, group: int, kv_heads: int) -> int:
    """Units of work of a segment of `rows` rows, `group` query heads per kv head."""
    return kv_heads * -(-rows * group // LANES)


@njit(nogil=True)
def attend(
    unit: int, q: Any, arena: Any, segments: Any, masks: Any, group: int, scale: float,
    scores: Any, panel: Any, zeros: Any, sums: Any, block: Any, out: Any,
) -> None:  # fmt: skip
    """One unit of work. q: float32 [T, heads * head_dim]. arena: [2 * kv_heads, positions,
    head_dim] of a layer. masks: uint8, bool [rows, SEEN] of every tree. out: [T, heads * head_dim].
    scores [keys, LANES], panel [steps, LANES, elements], zeros
    [LANES], sums [LANES], block [QUERIES, head_dim]:
    this thread's. Lanes beyond the last query hold what was there before."""
    s = 0
    while s + 1 < len(segments) and segments[s + 1, UNIT] <= unit:
        s += 1
    row, key, end = segments[s, ROW], segments[s, KEY], segments[s, END]
    kv_heads, dim = arena.shape[0] // 2, arena.shape[2]
    head = (unit - segments[s, UNIT]) % kv_heads
    first = (unit - segments[s, UNIT]) // kv_heads * LANES
    queries = min((segments[s, STOP] - row) * group - first, LANES)
    per_step = panel.shape[2]
    size, like = arena.itemsize, arena[0, 0, 0]

    for j in range(queries):
        place = (head * group + (first + j) % group) * dim
        query = q[row + (first + j) // group, place : place + dim]
        for step in range(dim // per_step):
            for i in range(per_step):
                panel[step, j, i] = narrow(query[step * per_step + i], like, like)

    keys = end - key
    if segments[s, MASK] < 0:  # the last query of a chain sees no further
        keys -= segments[s, STOP] - row - 1 - (first + queries - 1) // group
    start = arena[head].ctypes.data + key * dim * size
    for k in range(0, keys, MOST_KEYS):
        narrow_product(
            like, min(keys - k, MOST_KEYS), start + k * dim * size, dim * size,
            panel.ctypes.data, 0, zeros.ctypes.data, scores.ctypes.data + 4 * LANES * k, 4 * LANES,
            dim // per_step,
        )  # fmt: skip
    _hide(s, first, queries, keys, segments, masks, group, scores)
    softmax(scores.ctypes.data, keys, scale, sums.ctypes.data)

    start = arena[kv_heads + head].ctypes.data + key * dim * size
    for j in range(0, queries, QUERIES):
        d = 0
        while d < dim:
            wide = d + WIDE * LANES <= dim
            place = scores.ctypes.data + 4 * j, start + d * size, dim * size
            to = block.ctypes.data + 4 * d
            if wide:
                weighted(like, place[0], place[1], place[2], to, 4 * dim, keys)
            else:
                narrow_weighted(like, place[0], place[1], place[2], to, 4 * dim, keys)
            d += WIDE * LANES if wide else LANES
        for i in range(min(QUERIES, queries - j)):
            query = first + j + i
            to = (head * group + query % group) * dim
            share = np.float32(1) / sums[j + i]
            for d in range(dim):
                out[row + query // group, to + d] = narrow(block[i, d] * share, like, out[0, 0])


@njit(nogil=True)
def _hide(
    s: int, first: int, queries: int, keys: int, segments: Any, masks: Any, group: int, scores: Any
) -> None:
    """Give the score -inf to keys that a query does not see."""
    rows = segments[s, STOP] - segments[s, ROW]
    for j in range(queries):
        row = (first + j) // group
        if segments[s, MASK] < 0:
            for k in range(segments[s, END] - segments[s, KEY] - rows + row + 1, keys):
                scores[k, j] = -np.inf
        else:
            seen = segments[s, SEEN]
            for k in range(seen):
                if not masks[segments[s, MASK] + row * seen + k]:
                    scores[keys - seen + k, j] = -np.inf
