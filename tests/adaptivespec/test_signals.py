"""What the signals say, step by step."""

import pytest

from adaptivespec.signals import Signals


def signals(initial_acceptance: float = 1.0) -> Signals:
    return Signals(alpha=0.3, patience=5, initial_acceptance=initial_acceptance)


def test_dcs_is_confidence_times_rolling_acceptance() -> None:
    s = signals(initial_acceptance=0.5)
    s.confidence = 0.8
    assert s.dcs == pytest.approx(0.4)


def test_acceptance_is_an_exponential_average_of_accepted_over_depth() -> None:
    s = signals()
    s.update(depth=4, accepted=1)
    assert s.acceptance == pytest.approx(0.7 * 1.0 + 0.3 * 0.25)
    s.update(depth=2, accepted=2)
    assert s.acceptance == pytest.approx(0.7 * 0.775 + 0.3 * 1.0)


def test_steps_without_a_draft_say_nothing() -> None:
    s = signals()
    for _ in range(4):
        s.update(depth=3, accepted=0)
    before = s.acceptance
    s.update(depth=0, accepted=0)
    assert s.acceptance == before
    s.confidence = 1.0
    assert s.dcs > 0  # four in a row, not five


def test_five_fruitless_drafts_in_a_row_start_over() -> None:
    s = signals()
    s.confidence = 0.9
    for _ in range(5):
        assert s.dcs > 0
        s.update(depth=3, accepted=0)
    assert s.acceptance == 1.0
    assert s.dcs == 0  # the start shape, once, whatever the confidence
    s.update(depth=0, accepted=0)
    assert s.dcs == 0  # nothing was drafted yet
    s.update(depth=3, accepted=0)
    assert s.dcs == pytest.approx(0.9 * 0.7)
    for _ in range(4):
        assert s.dcs > 0
        s.update(depth=3, accepted=0)
    assert s.dcs == 0  # and again


def test_any_acceptance_ends_a_fruitless_run() -> None:
    s = signals()
    for _ in range(3):
        for _ in range(4):
            s.update(depth=3, accepted=0)
        s.update(depth=3, accepted=1)
    s.confidence = 1.0
    assert 0 < s.dcs < 1
