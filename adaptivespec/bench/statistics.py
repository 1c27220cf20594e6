"""Ratios with their uncertainty, and percentiles."""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

RESAMPLES = 5000
FEWEST = 5
"""Pairs below which an interval would say more than is known."""


class Ratio(msgspec.Struct, frozen=True):
    """A ratio and its 95 % interval, which is None for too few pairs."""

    value: float
    low: float | None = None
    high: float | None = None


class Percentiles(msgspec.Struct, frozen=True):
    """In the unit of the values."""

    p50: float
    p99: float


def ratio_of_rates(a: NDArray[np.float64], b: NDArray[np.float64], seed: int = 0) -> Ratio | None:
    """The rate of `a` over that of `b`, each [n, 2]: amounts in the first column over durations (or
    counts) in the second, summed over all rows. Rows belong together in pairs, so they are drawn in
    pairs: percentile bootstrap (Efron 1979). None where it is not defined."""
    sums = np.hstack([a, b]).sum(0)
    if not np.all(sums[[1, 2, 3]] > 0):
        return None
    value = float(_ratio(sums))
    if len(a) < FEWEST:
        return Ratio(value)
    often = np.random.default_rng(seed).multinomial(
        len(a), np.full(len(a), 1 / len(a)), size=RESAMPLES
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        drawn = _ratio(often.astype(float) @ np.hstack([a, b]))
    low, high = np.percentile(drawn[np.isfinite(drawn)], [2.5, 97.5])
    return Ratio(value, float(low), float(high))


def _ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """[..., 4] to [...]."""
    ratio: NDArray[np.float64] = (sums[..., 0] * sums[..., 3]) / (sums[..., 1] * sums[..., 2])
    return ratio


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """None without values."""
    if not values:
        return None
    p50, p99 = np.percentile(values, [50, 99])
    return Percentiles(float(p50), float(p99))
