"""A mistake in the settings, or in what they name, fails the deployment and says what is wrong."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.adaptivespec.drafters.heads import tiny_head
from tests.e2e.server import Server, application, eventually
from tests.factories import VOCAB_SIZE, write_hf_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("misfits")


@pytest.fixture(scope="module")
def failing(folder: Path) -> Iterator[Server]:
    """One server for all the mistakes."""
    lm, head = write_hf_folder(folder / "lm"), tiny_head().write(folder / "head")
    applications = [
        application("unknown-key", max_shapes=[1, 1, 2]),
        application("bad-kappa", kappa=1.5),
        application("no-model", model=str(folder / "nothing.gguf")),
        application("other-vocabulary", drafter={"kind": "lm", "path": str(lm)}),
        application("other-size", drafter={"kind": "eagle3", "path": str(head)}),
    ]
    with Server(applications) as server:
        yield server


@pytest.mark.parametrize(
    ("app", "words"),
    [
        ("unknown-key", ["max_shapes"]),
        ("bad-kappa", ["kappa: 1.5", "<= 1"]),
        ("no-model", ["model path", "nothing.gguf"]),
        ("other-vocabulary", ["drafter.path", "lm", str(VOCAB_SIZE), "49152"]),
        ("other-size", ["head", f"vocab_size: {VOCAB_SIZE}", "49152"]),
    ],
)
def test_a_mistake_is_named(failing: Server, app: str, words: list[str]) -> None:
    status = eventually(
        lambda: failing.statuses().get(app, {}),
        lambda s: s.get("status") in ("DEPLOY_FAILED", "RUNNING"),
    )
    assert status["status"] == "DEPLOY_FAILED"
    told = [line for line in failing.output.splitlines() if "ConfigError: " in line]
    assert any(all(word in line for word in words) for line in told), told
