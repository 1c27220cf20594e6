"""What is most likely in rows of logits. A row is looked through in blocks, of which all but a few
have nothing larger than what was found."""

import math
from typing import Any

import numpy as np
from numba import njit

from adaptivespec.kernels.emit import LANES
from adaptivespec.kernels.vectors import largest, sum_of_exponentials

_BLOCK = 256


@njit(nogil=True, cache=True)
def argmax(logits: Any, places: Any) -> None:
    """places [R]: where each row of float32 logits [R, V] is largest, of equals the first."""
    for m in range(len(logits)):
        values = np.full(1, -math.inf, np.float32)
        _largest(logits[m], values, places[m : m + 1])


@njit(nogil=True, cache=True)
def best(logits: Any, logprobs: Any, places: Any) -> None:
    """The log-probabilities [R, K] of the K largest of each row of float32 logits [R, V], largest
    first, of equals the first first, and their places; -inf where a row has fewer."""
    for m in range(len(logits)):
        row, values = logits[m], logprobs[m]
        _largest(row, values, places[m])
        top, vectors = values[0], len(row) // LANES
        total = sum_of_exponentials(row.ctypes.data, vectors, top) if vectors else np.float32(0)
        for i in range(vectors * LANES, len(row)):
            total += math.exp(row[i] - top)
        log_total = math.log(total)
        for k in range(len(values)):
            values[k] = values[k] - top - log_total


@njit(nogil=True)
def _largest(row: Any, values: Any, places: Any) -> None:
    values[:], places[:] = -math.inf, 0
    last = len(values) - 1
    for start in range(0, len(row), _BLOCK):
        stop = min(start + _BLOCK, len(row))
        whole = stop - start == _BLOCK
        address = row.ctypes.data + 4 * start
        if whole and not largest(address, _BLOCK // LANES) > values[last]:
            continue
        for i in range(start, stop):
            if row[i] > values[last]:
                k = last
                while k > 0 and row[i] > values[k - 1]:
                    values[k], places[k] = values[k - 1], places[k - 1]
                    k -= 1
                values[k], places[k] = row[i], i


@njit(nogil=True, cache=True)
def gaps(logits: Any, tokens: Any, parents: Any, argmax: Any, gap: Any) -> None:
    """gap [T]: how far the logit of each row's token is below the largest at its parent's row,
    float32 logits [R, V]; -inf at roots and padding (token < 0)."""
    for n in range(len(tokens)):
        above = parents[n]
        if above < 0 or tokens[n] < 0:
            gap[n] = -math.inf
        else:
            gap[n] = logits[above, tokens[n]] - logits[above, argmax[above]]
