"""The policies against exact arithmetic."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.config import DCSPolicy, StaticPolicy
from adaptivespec.policy import DCS, NO_DRAFT, Shape, make_policy
from adaptivespec.signals import Signals

PAPER = DCSPolicy()


def at(dcs: float) -> Signals:
    """Signals whose dcs is exactly this."""
    signals = Signals(alpha=0.3, patience=5, initial_acceptance=1.0)
    signals.confidence = dcs
    return signals


def shape_at(dcs: float, settings: DCSPolicy = PAPER) -> Shape:
    (shape,) = DCS(settings).shapes([at(dcs)], 1)
    return shape


def by_the_formula(dcs: float, settings: DCSPolicy) -> Shape:
    t = min(max(Fraction(dcs / settings.scale), Fraction(0)), Fraction(1))
    depth, width, nodes = (
        math.floor((1 - t) * low + t * high + Fraction(1, 2))
        for low, high in zip(settings.low, settings.high, strict=True)
    )
    return Shape(depth, width, nodes)


@pytest.mark.parametrize(
    ("above", "shape"),
    [
        (0.0, (3, 4, 4)),
        (0.125, (4, 4, 5)),
        (1 / 6 + 1e-9, (4, 3, 5)),
        (0.375, (5, 3, 6)),
        (0.5 + 1e-9, (5, 2, 6)),
        (0.625, (6, 2, 7)),
        (5 / 6 + 1e-9, (6, 1, 7)),
        (0.875, (7, 1, 8)),
    ],
)
def test_the_eight_shapes_of_the_paper_and_where_they_begin(
    above: float, shape: tuple[int, int, int]
) -> None:
    assert shape_at(above * PAPER.scale) == shape
    if above:
        assert shape_at((above - 1e-6) * PAPER.scale) != shape


def test_the_ends_hold_beyond_the_line() -> None:
    assert shape_at(0.5) == shape_at(1.0) == PAPER.high
    assert shape_at(0.0) == PAPER.low == DCS(PAPER).start


def test_reachable_lists_every_shape_in_order() -> None:
    assert DCS(PAPER).reachable == [
        (3, 4, 4),
        (4, 4, 5),
        (4, 3, 5),
        (5, 3, 6),
        (5, 2, 6),
        (6, 2, 7),
        (6, 1, 7),
        (7, 1, 8),
    ]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    depth = draw(st.integers(1, 10))
    return Shape(depth, draw(st.integers(1, 16)), draw(st.integers(depth + 1, 64)))


# Halves, sixths and the like, where rounding decides, and anything else.
levels = st.builds(
    lambda n, d: min(n / d, 1.0), st.integers(0, 64), st.integers(1, 64)
) | st.floats(0, 1)


@given(shapes(), shapes(), levels, st.sampled_from([0.25, 0.5, 0.7, 1.0]))
def test_shapes_are_the_formula_rounded_half_up(
    low: Shape, high: Shape, dcs: float, scale: float
) -> None:
    settings = DCSPolicy(low=low, high=high, scale=scale)
    shape = shape_at(dcs, settings)
    assert shape == by_the_formula(dcs, settings)
    assert shape in DCS(settings).reachable
    assert shape.nodes > shape.depth >= 1
    assert shape.width >= 1


@given(levels)
def test_a_line_from_no_draft_never_asks_for_a_tree_without_width(dcs: float) -> None:
    shape = shape_at(dcs, DCSPolicy(low=NO_DRAFT, high=Shape(7, 1, 8)))
    assert shape == NO_DRAFT or (shape.width >= 1 and shape.nodes > shape.depth >= 1)


def test_every_request_follows_its_own_signals() -> None:
    policy = make_policy(PAPER)
    assert policy.shapes([at(0.0), at(0.5), at(0.25)], 3) == [(3, 4, 4), (7, 1, 8), (5, 3, 6)]
    assert policy.shapes([], 0) == []


def test_static_is_one_shape_for_all() -> None:
    policy = make_policy(StaticPolicy(Shape(2, 2, 5)))
    assert policy.start == (2, 2, 5)
    assert policy.reachable == [(2, 2, 5)]
    assert policy.shapes([at(0.0), at(1.0)], 2) == [(2, 2, 5)] * 2
    assert policy.signals().acceptance == PAPER.initial_acceptance


def test_the_settings_reach_the_signals() -> None:
    signals = make_policy(DCSPolicy(alpha=1.0, patience=1, initial_acceptance=0.5)).signals()
    signals.confidence = 1.0
    assert signals.dcs == 0.5
    signals.update(depth=4, accepted=1)
    assert signals.acceptance == 0.25
    signals.update(depth=4, accepted=0)
    assert (signals.acceptance, signals.dcs) == (0.5, 0)
