"""What passes cost is measured once per model and machine, by whoever weighs it."""

from pathlib import Path
from typing import Any

import pytest

from adaptivespec import startup
from adaptivespec.config import Settings, load_settings
from adaptivespec.cost import DraftCosts, VerifyCosts
from adaptivespec.drafters.build import make_drafter
from adaptivespec.engine.build import make_target
from adaptivespec.goodput import Goodput
from adaptivespec.local import LocalSystem
from tests.factories import write_hf_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_folder(tmp_path_factory.mktemp("target"), "llama", seed=1))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def settings(model: str, policy: str = "goodput", **more: Any) -> Settings:
    return load_settings(
        {
            "model": {"path": model, "dtype": "float32"},
            "target": {"kv_tokens": 1024, "max_running": 2},
            "drafter": {"kind": "lm", "path": model, "dtype": "float32"},
            "policy": {"kind": policy},
            **more,
        }
    )


def test_every_size_up_to_two_of_the_largest_trees_is_measured(model: str, cache: Path) -> None:
    of = settings(model)
    engine = make_target(of)
    costs = startup.verify_costs(of, engine)
    assert costs is not None
    assert costs.rows[:8] == [1, 2, 3, 4, 5, 6, 8, 10]
    assert max(costs.rows) <= 2 * of.max_shape.nodes
    assert len(costs.seconds) == len(costs.rows)
    assert min(costs.seconds) > 0
    assert (engine.requests, engine.used) == (0, 0), "nothing is left behind"


def test_what_was_measured_is_kept(
    model: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = settings(model)
    engine, drafter = make_target(of), make_drafter(of)
    first = startup.verify_costs(of, engine), startup.draft_costs(of, drafter)
    monkeypatch.setattr(startup, "measure_target", None)
    monkeypatch.setattr(startup, "measure_drafter", None)
    assert (startup.verify_costs(of, engine), startup.draft_costs(of, drafter)) == first
    assert len(list(cache.rglob("*.json"))) == 2
    threads = settings(model, target={"kv_tokens": 1024, "compute": {"threads": 3}})
    with pytest.raises(TypeError):
        startup.verify_costs(threads, engine)


def test_a_damaged_file_is_measured_again(model: str, cache: Path) -> None:
    of = settings(model)
    engine = make_target(of)
    startup.verify_costs(of, engine)
    (file,) = cache.rglob("*.json")
    file.write_bytes(b"{")
    assert startup.verify_costs(of, engine) is not None
    assert file.stat().st_size > 1


def test_costs_that_cannot_be_kept_are_used_all_the_same(
    model: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (cache / "adaptivespec").write_text("no folder")
    of = settings(model)
    assert startup.verify_costs(of, make_target(of)) is not None
    assert "could not be kept" in caplog.text


def test_policies_that_weigh_nothing_measure_nothing(model: str, cache: Path) -> None:
    of = settings(model, "dcs")
    assert startup.verify_costs(of, make_target(of)) is None
    assert startup.draft_costs(of, make_drafter(of)) is None


def test_the_policy_begins_with_what_was_measured(
    model: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, seconds = [1, 4, 8], [1.0, 1.1, 2.0]
    draft = DraftCosts(once=0.01, level=0.2, expansion=0.05, feed=0.1, token=0.02)
    monkeypatch.setattr(startup, "measure_target", lambda *_: VerifyCosts(rows, seconds))
    monkeypatch.setattr(startup, "measure_drafter", lambda *_: draft)
    system = LocalSystem.load(settings(model))
    policy = system.policy
    assert isinstance(policy, Goodput)
    assert policy.costs.nodes(1, [3, 7])[0] == pytest.approx(0.1)
    assert policy.costs.nodes(1, [3, 7])[1] == pytest.approx(1.0)
    assert policy.costs.level == pytest.approx(0.2)
    assert policy.costs.feeding(3) == pytest.approx(0.16)
