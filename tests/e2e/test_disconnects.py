"""A client that leaves gives its slot and its cache back, on both sides."""

import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.e2e.answers import COUNTING, complete
from tests.e2e.server import MODEL, Server, eventually

APPS = ["lookup", "lm", "eagle3"]


def post(server: Server, app: str, *, stream: bool) -> socket.socket:
    """Ask for an answer of minutes, on a connection of which the caller may do as it likes."""
    body = json.dumps(
        {"model": MODEL, "prompt": COUNTING, "max_tokens": 4000, "temperature": 0, "stream": stream}
    )
    connection = socket.create_connection(
        ("127.0.0.1", urlsplit(server.url).port or 80), timeout=60
    )
    head = (
        f"POST /{app}/v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall((head + body).encode())
    return connection


def wait_until_running(server: Server, app: str, requests: int) -> None:
    """Until they decode, and the drafter knows them."""
    eventually(lambda: server.health(app), lambda s: s["drafter_requests"] == requests)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("app", APPS)
def test_a_client_that_leaves_frees_its_place(server: Server, app: str, stream: bool) -> None:
    server.wait_until_idle(app)
    with post(server, app, stream=stream) as connection:
        if stream:
            received = b""
            while received.count(b"data:") < 5:
                received += connection.recv(4096)
        wait_until_running(server, app, 1)
        assert server.health(app)["target_requests"] == 1
    server.wait_until_idle(app)


def test_a_client_that_leaves_the_queue(server: Server) -> None:
    running = [post(server, "lm", stream=True) for _ in range(2)]
    wait_until_running(server, "lm", 2)
    with post(server, "lm", stream=True):
        eventually(lambda: server.health("lm")["queued"] == 1)
    eventually(lambda: server.health("lm")["queued"] == 0)
    assert server.health("lm")["running"] == 2
    for connection in running:
        connection.close()
    server.wait_until_idle("lm")
    assert complete(server.client("lm"), COUNTING, 4).completion_tokens == 4


def test_a_client_that_leaves_at_once(server: Server) -> None:
    for stream in (True, False):
        post(server, "lookup", stream=stream).close()
    assert complete(server.client("lookup"), COUNTING, 4).completion_tokens == 4
    server.wait_until_idle("lookup")
