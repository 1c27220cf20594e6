"""A mistake in the settings, or in what they name, fails the deployment and says what is wrong."""

import socket
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import pytest

from tests.adaptivespec.drafters.heads import HIDDEN, tiny_head
from tests.e2e.server import Server, application, eventually
from tests.factories import VOCAB_SIZE, write_hf_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("misfits")


@pytest.fixture(scope="module")
def failing(folder: Path) -> Iterator[Server]:
    """One server for all the mistakes, with a target that loads fast."""
    target = str(write_hf_folder(folder / "target", hidden_size=64))
    lm = write_hf_folder(folder / "lm", vocab_size=2 * VOCAB_SIZE)
    head = tiny_head().write(folder / "head")
    applications = [
        application("unknown-key", max_shapes=[1, 1, 2]),
        application("bad-kappa", kappa=1.5),
        application("no-model", model=str(folder / "nothing.gguf")),
        application("other-vocabulary", model=target, drafter={"kind": "lm", "path": str(lm)}),
        application("other-size", model=target, drafter={"kind": "eagle3", "path": head}),
    ]
    with Server(applications) as server:
        yield server


@pytest.mark.parametrize(
    ("app", "words"),
    [
        ("unknown-key", ["max_shapes"]),
        ("bad-kappa", ["kappa: 1.5", "<= 1"]),
        ("no-model", ["model path", "nothing.gguf"]),
        ("other-vocabulary", ["drafter.path", "/lm'", str(VOCAB_SIZE), str(2 * VOCAB_SIZE)]),
        ("other-size", ["/head:", f"hidden size {HIDDEN}", "64"]),
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


def test_failed_deployments_hold_nothing(failing: Server) -> None:
    """Their ingresses, which need no resources, say that there is no orchestrator."""
    eventually(failing.placement_groups, lambda groups: not groups)
    kinds = {actor["class_name"].split(":")[-1] for actor in failing.actors()}
    assert kinds - {"HAProxyManager"} == {"ServeController", "ProxyActor", "Ingress"}
    assert failing.health("other-size")["http"] == HTTPStatus.SERVICE_UNAVAILABLE


def test_a_killed_server_leaves_its_port_to_the_next(failing: Server) -> None:
    failing.kill()
    eventually(lambda: not listening(failing.port))


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
