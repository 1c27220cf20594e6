"""What is most likely, against torch."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.drafters.growth import best_children
from adaptivespec.sampling import most_likely


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 1000, 49152])
@pytest.mark.parametrize("width", [1, 4, 7])
def test_best_children_are_the_largest_log_probabilities(size: int, width: int) -> None:
    width = min(width, size)
    logits = 5 * torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    logprobs, places = best_children(logits, width)
    expected = logits.double().log_softmax(-1).topk(width)
    assert torch.equal(places, expected.indices)
    torch.testing.assert_close(logprobs.double(), expected.values, rtol=1e-5, atol=1e-5)


def test_what_is_impossible_stays_so() -> None:
    logits = torch.full((1, 600), -torch.inf)
    logits[0, [599, 3]] = 1.0
    logprobs, places = best_children(logits, 4)
    assert places[0, :2].tolist() == [3, 599]
    np.testing.assert_allclose(logprobs[0].exp(), [0.5, 0.5, 0, 0], rtol=1e-6)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=900))
def test_of_equals_the_first_is_the_most_likely(row: list[int]) -> None:
    logits = torch.tensor([row, [0] * len(row)], dtype=torch.float32)
    assert most_likely(logits).tolist() == [row.index(max(row)), 0]
