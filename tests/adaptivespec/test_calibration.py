"""Calibration against synthetic drafters whose true acceptance is known."""

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.calibration import Calibration, Reliability, accepted_nodes, outcomes
from adaptivespec.pricing import KNOTS, LOWEST, SPACING
from tests.adaptivespec.trees import Tree, batch, trees

KNOT_Q = 1 / (1 + np.exp(-(LOWEST + SPACING * np.arange(KNOTS))))


def taught(truth: Callable[[np.ndarray], np.ndarray], count: int, seed: int = 0) -> Calibration:
    """After `count` outcomes of best children whose acceptance is `truth(q)`."""
    random = np.random.default_rng(seed)
    calibration = Calibration(greedy=True)
    for _ in range(count // 8):
        q = random.uniform(0.02, 0.98, 8)
        accepted = random.random(8) < truth(q)
        calibration.update(np.log(q), np.ones(8, bool), accepted)
    return calibration


@pytest.mark.parametrize("truth", [lambda q: q, np.sqrt, np.square, lambda q: 0.3 + 0 * q], ids=str)
def test_it_finds_the_true_acceptance(truth: Callable[[np.ndarray], np.ndarray]) -> None:
    calibration = taught(truth, 4000)
    for q in (0.1, 0.3, 0.5, 0.7, 0.9):
        assert calibration.best(q) == pytest.approx(float(truth(np.array(q))), abs=0.08)


def test_the_prior_is_what_heads_have_shown_and_a_sampling_target_takes_q() -> None:
    greedy, sampling = Calibration(greedy=True), Calibration(greedy=False)
    for q in KNOT_Q:
        logit = math.log(q / (1 - q))
        assert greedy.best(q) == pytest.approx(1 / (1 + math.exp(-0.5 - 1.1 * logit)))
        assert sampling.best(q) == pytest.approx(q)


@pytest.mark.parametrize("confidence", [0.3, 0.6, 0.9, 0.99])
def test_a_useless_drafter_is_found_out_within_ten_outcomes(confidence: float) -> None:
    calibration = Calibration(greedy=True)
    for _ in range(10):
        calibration.update(np.log([confidence]), np.array([True]), np.array([False]))
    assert calibration.best(confidence) < 0.15


def test_doubt_about_one_confidence_is_doubt_about_all_that_were_never_seen() -> None:
    calibration = Calibration(greedy=True)
    before = calibration.best(0.9)
    for _ in range(10):
        calibration.update(np.log([0.4]), np.array([True]), np.array([False]))
    assert calibration.best(0.9) < before / 2


def test_it_follows_a_drafter_that_changes() -> None:
    calibration = taught(lambda q: 0 * q, 800)
    assert calibration.best(0.8) < 0.05
    for _ in range(600):
        calibration.update(np.log([0.8] * 8), np.ones(8, bool), np.ones(8, bool))
    assert calibration.best(0.8) > 0.8


@given(
    st.lists(st.tuples(st.floats(-30, 0), st.booleans(), st.booleans()), min_size=1, max_size=200)
)
def test_curves_are_probabilities_grow_with_q_and_prefer_the_best_child(
    seen: list[tuple[float, bool, bool]],
) -> None:
    calibration = Calibration(greedy=True)
    logprobs, first, accepted = map(np.array, zip(*seen, strict=True))
    calibration.update(logprobs, first, accepted)
    curve = calibration.curve
    for values in (curve.first, curve.other):
        assert all(0 < value <= 1 for value in values)
        assert all(a <= b + 1e-12 for a, b in pairwise(values))
    assert all(o <= f + 1e-12 for f, o in zip(curve.first, curve.other, strict=True))


@given(trees(), st.data())
def test_outcomes_are_known_below_accepted_parents_alone(tree: Tree, data: st.DataObject) -> None:
    size = len(tree.tokens)
    end = data.draw(st.integers(0, size - 1), label="last accepted node")
    walked = tree.path(end)
    path = torch.tensor([walked + [-1] * (size - len(walked))])
    forest = batch([tree])
    accepted = accepted_nodes(path)
    assert accepted[0].nonzero()[0].tolist() == walked
    known = outcomes(forest, accepted)
    expected = [i for i, parent in enumerate(tree.parents) if parent in walked]
    assert known.logprobs.tolist() == [tree.logprobs[i] for i in expected]
    assert known.accepted.tolist() == [i in walked for i in expected]
    assert known.first.tolist() == [i == tree.children(tree.parents[i])[0] for i in expected]
    assert known.row.tolist() == [0] * len(expected)


def test_reliability_is_the_weighted_gap_of_the_bins() -> None:
    reliability = Reliability()
    assert (reliability.error, reliability.bins) == (0.0, [])
    reliability.add(np.array([0.12, 0.14, 0.95, 1.0]), np.array([False, True, True, True]))
    low, high = reliability.bins
    assert (low.nodes, low.predicted, low.accepted) == (2, pytest.approx(0.13), 0.5)
    assert (high.nodes, high.predicted, high.accepted) == (2, pytest.approx(0.975), 1.0)
    assert reliability.error == pytest.approx((2 * 0.37 + 2 * 0.025) / 4)
