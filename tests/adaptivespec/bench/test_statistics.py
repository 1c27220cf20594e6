"""Ratios and their intervals."""

import numpy as np
import pytest

from adaptivespec.bench.statistics import percentiles, ratio_of_rates


def rates(tokens: list[float], seconds: list[float]) -> np.ndarray:
    return np.array([tokens, seconds]).T


def test_a_ratio_is_of_all_tokens_over_all_seconds() -> None:
    ours, theirs = rates([10, 90], [1, 1]), rates([10, 10], [1, 4])
    ratio = ratio_of_rates(ours, theirs)
    assert ratio is not None
    assert ratio.value == pytest.approx((100 / 2) / (20 / 5))


def test_few_pairs_have_no_interval() -> None:
    ratio = ratio_of_rates(rates([10] * 4, [1] * 4), rates([10] * 4, [2] * 4))
    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == (2, None, None)


def test_what_is_not_defined_is_none() -> None:
    zero, some = rates([0] * 6, [1] * 6), rates([1] * 6, [1] * 6)
    assert ratio_of_rates(some, zero) is None
    assert ratio_of_rates(np.empty((0, 2)), np.empty((0, 2))) is None
    ratio = ratio_of_rates(zero, some)
    assert ratio is not None
    assert ratio.value == 0


def test_pairs_cancel_what_hits_both_alike() -> None:
    """A machine whose speed drifts by a factor of four leaves the paired ratio nearly exact, and
    the same times out of step do not."""
    drift = np.geomspace(1, 4, 40)
    rng = np.random.default_rng(7)
    noise = 1 + 0.02 * (-1) ** np.arange(40)
    ours, theirs = rates([100] * 40, list(drift * noise)), rates([100] * 40, list(2 * drift))
    paired = ratio_of_rates(ours, theirs)
    shuffled = ratio_of_rates(ours[rng.permutation(40)], theirs)
    assert paired is not None
    assert shuffled is not None
    assert paired.low is not None
    assert paired.high is not None
    assert paired.low < 2 < paired.high
    assert paired.high - paired.low < 0.05
    assert shuffled.low is not None
    assert shuffled.high is not None
    assert shuffled.high - shuffled.low > 5 * (paired.high - paired.low)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        ours = rates([100] * 30, list(rng.gamma(20, 0.05, 30)))
        theirs = rates([100] * 30, list(rng.gamma(20, 0.10, 30)))
        ratio = ratio_of_rates(ours, theirs)
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 2 <= ratio.high
    assert 0.88 <= covered / 200 <= 0.99


def test_percentiles() -> None:
    assert percentiles([]) is None
    both = percentiles([float(i) for i in range(101)])
    assert both is not None
    assert (both.p50, both.p99) == (50, 99)
