"""What is measured is what the running system counts."""

from pathlib import Path

import pytest

from adaptivespec.config import load_settings
from adaptivespec.local import LocalSystem
from adaptivespec.shape import Shape
from adaptivespec.training.evaluate import NOTHING_MEASURED, Measurement, measure
from tests.factories import write_hf_folder

PROMPTS = [[1, 40, 50, 60], [1, 70], [1, 80, 90, 100, 110, 120, 130]]
TOKENS = 21


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_folder(tmp_path_factory.mktemp("target"), num_hidden_layers=4))


def system(target: str, drafter: str) -> LocalSystem:
    one = {"compute": {"threads": 1}}
    model = {"path": target, "dtype": "float32"}
    lm = {"kind": "lm", "path": drafter, "dtype": "float32"}
    return LocalSystem.load(load_settings({"model": model, "target": one, "drafter": lm | one}))


def assert_consistent(measured: Measurement) -> None:
    """What was reached adds up to what the system itself reports."""
    steps, *accepted = measured.reached
    assert steps == measured.usage.steps
    assert sum(accepted) == measured.usage.accepted_tokens
    assert measured.reached == sorted(measured.reached, reverse=True)


def test_the_target_as_its_own_drafter_is_always_right(target: str) -> None:
    """The first token comes with the prompt, then five of every step."""
    measured = measure(system(target, target), PROMPTS, Shape(4, 1, 5), max_tokens=TOKENS)
    assert_consistent(measured)
    assert measured.reached == [12] * 5
    assert measured.by_depth == [1.0] * 4
    assert (measured.answers, measured.ended, measured.length) == (3, 0, TOKENS)
    assert measured.usage.mean_acceptance_length == 5.0


def test_a_worse_drafter_is_right_less_often_the_deeper(target: str, tmp_path: Path) -> None:
    other = str(write_hf_folder(tmp_path, num_hidden_layers=4, seed=1))
    here = system(target, other)
    shape = Shape(3, 16, 48)
    strict = measure(here, PROMPTS, shape, max_tokens=TOKENS)
    assert_consistent(strict)
    assert 0 < strict.by_depth[0] < 1
    lax = measure(here, PROMPTS, shape, kappa=0.01, max_tokens=TOKENS)
    assert_consistent(lax)
    assert lax.usage.promoted_tokens > strict.usage.promoted_tokens == 0
    assert lax.usage.mean_acceptance_length > strict.usage.mean_acceptance_length


def test_measurements_add_up() -> None:
    usage = NOTHING_MEASURED.usage
    total = Measurement(usage, 2, 1, [10, 4, 1]) + Measurement(usage, 3, 0, [6, 2])
    assert total.reached == [16, 6, 1]
    assert (total.answers, total.ended) == (5, 1)
    assert total.by_depth == [6 / 16, 1 / 6]
    assert NOTHING_MEASURED + total == total
    assert NOTHING_MEASURED.by_depth == []
    assert Measurement(usage, 1, 0, [5, 0, 0]).by_depth == [0.0]  # nothing got as far as depth 2
