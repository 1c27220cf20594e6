"""Threads share the chunks of a kernel's phases, whoever is late."""

from typing import Any

import numpy as np
import pytest
from numba import njit

from adaptivespec.kernels.team import Counters, Team, claim, finish


@njit(nogil=True)
def prefix_sums(counters: Counters, x: Any, steps: Any, rank: int) -> None:
    """Step after step, every element becomes the sum of itself and its left neighbour."""
    size = x.shape[1]
    phase = 0
    for step in range(steps):
        done = 0
        i = claim(counters, phase, size, rank)
        while i < size:
            x[step + 1, i] = x[step, i] + (x[step, i - 1] if i else 0)
            done += 1
            i = claim(counters, phase, size, rank)
        phase = finish(counters, phase, done, size)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_phase_sees_all_of_the_one_before(threads: int, size: int) -> None:
    team = Team(threads)
    steps = 50
    counters = team.counters(steps)
    for _ in range(20):
        x = np.zeros((steps + 1, size), np.int64)
        x[0] = np.arange(size) + 1
        team.run(prefix_sums, counters, x, steps)
        expected = x[0].copy()
        for _ in range(steps):
            expected[1:] += expected[:-1].copy()
        np.testing.assert_array_equal(x[-1], expected)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 10, 64])
def test_every_chunk_is_claimed_once_even_by_one_thread(threads: int, chunks: int) -> None:
    counters = Team(1).counters(1)
    counters = np.zeros((1, 1 + threads, counters.shape[2]), np.int64)
    claimed = []
    while (chunk := claim(counters, 0, chunks, threads - 1)) < chunks:
        claimed.append(chunk)
    assert sorted(claimed) == list(range(chunks))


def test_an_error_reaches_the_caller_and_the_team_goes_on() -> None:
    team = Team(2)

    def wrong(counters: Counters, rank: int) -> None:
        raise ValueError("as a compiler would")

    with pytest.raises(ValueError, match="compiler"):
        team.run(wrong, team.counters(1))
    x = np.ones((2, 3), np.int64)
    team.run(prefix_sums, team.counters(1), x, 1)
    assert x[1].tolist() == [1, 2, 2]
