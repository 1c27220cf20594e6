"""Isotonic regression against its min-max formula."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.monotone import monotone


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.1, 9)), min_size=1, max_size=7))
def test_monotone_is_the_nearest_non_decreasing_sequence(pairs: list[tuple[float, float]]) -> None:
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    n = len(values)

    def mean(i: int, j: int) -> float:
        return float(np.average(values[i : j + 1], weights=weights[i : j + 1]))

    expected = [max(min(mean(i, j) for j in range(k, n)) for i in range(k + 1)) for k in range(n)]
    np.testing.assert_allclose(monotone(values, weights), expected, atol=1e-9)
