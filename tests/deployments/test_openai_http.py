"""The application on the wire: paths, bodies, headers, bytes of a stream, clients that leave."""

import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from adaptivespec.errors import TargetLost
from adaptivespec.tokenizer import Tokenizer
from deployments.openai.api import create_app
from tests.deployments.echo import Echo, with_status
from tests.deployments.server import Server, serving

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": "Say it again."}],
    "max_tokens": 8,
}


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def body(**parameters: Any) -> bytes:
    return msgspec.json.encode(BODY | parameters)


def receive(connection: socket.socket, until: bytes = b"") -> bytes:
    """Bytes up to and with `until`, or to the end."""
    received = b""
    while not (until and until in received) and (part := connection.recv(4096)):
        received += part
    return received


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/models", "/v1/chat/completions/x"])
def test_an_unknown_path(http: httpx.Client, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 404
    assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path"), [("GET", CHAT), ("PUT", "/v1/completions"), ("POST", "/v1/models")]
)
def test_a_wrong_method(http: httpx.Client, method: str, path: str) -> None:
    response = http.request(method, path)
    assert response.status_code == 405
    assert response.json()["error"]["message"] == "Method Not Allowed"
    assert response.headers["allow"]


def test_malformed_json(http: httpx.Client) -> None:
    response = http.post(CHAT, content=b'{"model": ')
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_a_body_over_the_limit(http: httpx.Client, echo: Echo) -> None:
    def parts() -> Iterator[bytes]:
        yield from [b" " * 60_000] * 2

    for content in (b" " * 100_001, parts()):
        response = http.post(CHAT, content=content)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"
    assert http.post(CHAT, content=body().ljust(100_000)).status_code == 200


@pytest.mark.parametrize(("target", "status"), [("ready", 200), ("starting", 503), ("lost", 503)])
def test_health_is_the_targets(http: httpx.Client, echo: Echo, target: str, status: int) -> None:
    echo.current = with_status(target=target)
    response = http.get("/health")
    assert response.status_code == status
    assert response.json()["target"] == target
    assert response.json()["max_shape"] == [8, 16, 64]


def test_health_without_an_orchestrator(http: httpx.Client, echo: Echo) -> None:
    echo.unreachable = TargetLost("the orchestrator is gone")
    response = http.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "the orchestrator is gone"


def test_requests_while_the_target_is_starting(http: httpx.Client, echo: Echo) -> None:
    echo.current = with_status(target="starting", context_length=0, vocab_size=0)
    assert http.post(CHAT, content=body()).status_code == 503
    assert http.get("/v1/models").status_code == 503
    echo.current = with_status()
    assert http.post(CHAT, content=body()).status_code == 200


def test_the_documentation_shows_every_parameter(http: httpx.Client) -> None:
    schema = http.get("/openapi.json").json()
    operation = schema["paths"][CHAT]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    properties = schema["components"]["schemas"][reference.rsplit("/")[-1]]["properties"]
    assert {"messages", "temperature", "speculation", "n"} <= properties.keys()
    assert properties["n"]["enum"] == [None, 1]
    assert http.get("/docs").status_code == 200


def test_a_whole_answer_has_openais_shape(http: httpx.Client) -> None:
    answer = http.post(CHAT, content=body()).json()
    assert answer.keys() == {
        *("id", "object", "created", "model", "choices", "usage", "system_fingerprint"),
    }
    [choice] = answer["choices"]
    assert choice.keys() == {"index", "message", "logprobs", "finish_reason"}
    assert choice["message"].keys() == {"role", "content", "refusal"}
    assert answer["system_fingerprint"] is None


def test_the_bytes_of_a_stream(http: httpx.Client) -> None:
    response = http.post(CHAT, content=body(stream=True, max_tokens=2))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    *events, end = response.text.split("\n\n")
    assert end == ""
    assert all(event.startswith("data: ") for event in events)
    *chunks, done = [event.removeprefix("data: ") for event in events]
    assert done == "[DONE]"
    opening, piece, closing = [msgspec.json.decode(chunk) for chunk in chunks]
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert piece["choices"][0]["delta"].keys() == {"content"}
    assert closing["choices"][0]["delta"] == {}
    assert "usage" not in closing


def test_usage_is_null_until_the_last_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "include_obfuscation": False}
    response = http.post(CHAT, content=body(stream=True, stream_options=options))
    chunks = [msgspec.json.decode(chunk) for chunk in re.findall("data: ({.*})", response.text)]
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_an_error_amid_a_stream_ends_it_without_done(http: httpx.Client, echo: Echo) -> None:
    echo.failures[1] = TargetLost("the target died")
    response = http.post(CHAT, content=body(stream=True))
    assert response.status_code == 200
    *_, last, end = response.text.split("\n\n")
    assert end == ""
    assert msgspec.json.decode(last.removeprefix("data: "))["error"]["message"] == "the target died"


def test_a_delta_without_text_sends_nothing(server: Server, echo: Echo) -> None:
    echo.silent = True
    with server.post(CHAT, body(stream=True)) as connection:
        response = receive(connection, until=b"[DONE]")
    assert response.count(b'"delta":{"role"') == 1
    assert response.count(b"data: ") == 3


def test_every_delta_is_sent_before_the_next_exists(server: Server, echo: Echo) -> None:
    echo.held = 2
    with server.post(CHAT, body(stream=True)) as connection:
        server.wait(echo.waiting)
        received = b""
        while received.count(b'"content":') < 3:
            received += connection.recv(4096)
        assert b"[DONE]" not in received
        server.set(echo.release)
        assert b"[DONE]" in receive(connection, until=b"[DONE]")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("held", [0, 2])
def test_a_client_that_leaves_ends_its_generation(
    server: Server, echo: Echo, held: int, stream: bool
) -> None:
    echo.held = held
    with server.post(CHAT, body(stream=stream)):
        server.wait(echo.waiting)
    server.wait(echo.closed)
    assert not echo.release.is_set()


def test_a_client_that_leaves_without_reading(server: Server, echo: Echo) -> None:
    """The server is then blocked on a full socket, not on the backend."""
    echo.current = with_status(context_length=10**9)
    with server.post(CHAT, body(stream=True, max_tokens=10**6)) as connection:
        receive(connection, until=b"data: ")
    server.wait(echo.closed)


def test_a_client_that_leaves_before_its_body_is_complete(server: Server, echo: Echo) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(
        b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
    )
    connection.close()
    assert httpx.post(server.url + CHAT, content=body()).status_code == 200
    assert len(echo.requests) == 1


class GatedTokenizer(Tokenizer):
    """The real one, which waits for `gate` before it renders a chat."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        vars(self).update(vars(tokenizer))
        self.entered = threading.Event()
        self.gate = threading.Event()

    def apply_chat_template(self, *args: Any, **variables: Any) -> list[int]:
        self.entered.set()
        self.gate.wait(timeout=30)
        return super().apply_chat_template(*args, **variables)


def test_other_requests_go_on_while_a_long_prompt_is_tokenised(tokenizer: Tokenizer) -> None:
    gated = GatedTokenizer(tokenizer)
    with serving(create_app(Echo(tokenizer), gated)) as server, server.post(CHAT, body()) as slow:
        assert gated.entered.wait(timeout=30)
        text = msgspec.json.encode({"model": "echo", "prompt": "one two"})
        assert httpx.post(server.url + "/v1/completions", content=text).status_code == 200
        gated.gate.set()
        assert b"200 OK" in receive(slow, until=b"\r\n")
