"""A target or an orchestrator that dies ends its answers at once, with an error that clients
understand; the application heals by itself and leaves nothing behind."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus

import openai
import psutil
import pytest

from tests.e2e.answers import COUNTING, Streamed, complete, reference
from tests.e2e.server import Server, eventually


def assert_serves(server: Server, app: str) -> None:
    """Requests are answered, with the drafter's help."""
    eventually(lambda: server.health(app)["http"] == HTTPStatus.OK)
    eventually(lambda: server.health(app)["drafter"] == "ready")
    answer = complete(server.client(app), COUNTING, 48)
    assert answer.text == reference(COUNTING, 48).text
    assert answer.accepted_tokens > 0
    server.wait_until_idle(app)


def test_a_killed_target(server: Server) -> None:
    app = "lm"
    client, groups, actors = server.client(app), server.placement_groups(), len(server.actors())
    old = server.cell(app)
    assert old.target is not None
    with ThreadPoolExecutor() as pool:
        stream = Streamed(client, COUNTING, 2000)
        stream.wait_for(5)
        others = [pool.submit(complete, client, COUNTING, 2000) for _ in range(2)]
        eventually(lambda: server.health(app)["queued"] == 1)  # and the other one runs
        os.kill(old.target, signal.SIGKILL)
        with pytest.raises(openai.APIError) as streamed:
            stream.answer()
        assert streamed.value.code == "service_unavailable"
        for refused in others:
            with pytest.raises(openai.InternalServerError) as caught:
                refused.result()
            assert caught.value.status_code == HTTPStatus.SERVICE_UNAVAILABLE

    assert server.health(app)["http"] == HTTPStatus.SERVICE_UNAVAILABLE
    with pytest.raises(openai.InternalServerError):
        complete(client, COUNTING, 4)
    assert server.health("lookup")["http"] == HTTPStatus.OK
    assert_serves(server, app)
    new = server.cell(app)
    assert new.orchestrator == old.orchestrator
    assert new.target != old.target
    assert server.placement_groups() == groups
    assert len(server.actors()) == actors


def test_an_idle_target_is_missed(server: Server) -> None:
    """Nobody asks for anything when it dies."""
    pid = server.cell("eagle3").target
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: server.health("eagle3")["http"] == HTTPStatus.SERVICE_UNAVAILABLE)
    eventually(lambda: server.health("eagle3")["http"] == HTTPStatus.OK)
    assert server.cell("eagle3").target not in (None, pid)


def test_a_killed_orchestrator(server: Server) -> None:
    app = "lookup"
    groups, actors = server.placement_groups(), len(server.actors())
    old = server.cell(app)
    assert old.orchestrator is not None
    stream = Streamed(server.client(app), COUNTING, 2000)
    stream.wait_for(5)
    os.kill(old.orchestrator, signal.SIGKILL)
    with pytest.raises(openai.APIError):
        stream.answer()

    eventually(lambda: server.cell(app).orchestrator not in (None, old.orchestrator))
    assert_serves(server, app)
    eventually(lambda: not any(pid and psutil.pid_exists(pid) for pid in old))
    eventually(server.placement_groups, lambda now: len(now) == len(groups))
    eventually(server.actors, lambda now: len(now) == actors)
