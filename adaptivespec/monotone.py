"""Curves that are known not to fall."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def monotone(values: Floats, weights: Floats) -> Floats:
    """The non-decreasing values nearest to `values` [n] in weighted squares: adjacent violators are
    pooled."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while blocks and blocks[-1][0] >= value:
            mean, mass, size = blocks.pop()
            value = (mean * mass + value * weight) / (mass + weight)
            weight, count = mass + weight, count + size
        blocks.append((value, weight, count))
    return np.concatenate([np.full(count, value) for value, _, count in blocks])
