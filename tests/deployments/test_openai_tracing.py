"""One span a request, from its first check to the last byte of its answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest

from adaptivespec import tracing
from adaptivespec.errors import TargetLost
from adaptivespec.tokenizer import Tokenizer
from deployments.openai.api import create_app
from tests.deployments.echo import Echo
from tests.deployments.server import Server, serving
from tests.otlp import OtlpReceiver, ReceivedSpan

CHAT = "/v1/chat/completions"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_ID = "b7ad6b7169203331"


def body(**parameters: Any) -> bytes:
    messages = [{"role": "user", "content": "Say it again."}]
    fields = {"model": "echo", "messages": messages, "max_tokens": 4}
    return msgspec.json.encode(fields | parameters)


class Traced:
    """A server whose spans are there once `serving` is over."""

    def __init__(self, echo: Echo, tokenizer: Tokenizer, receiver: OtlpReceiver) -> None:
        self._app = create_app(echo, tokenizer)
        self._receiver = receiver

    @contextmanager
    def serving(self) -> Iterator[Server]:
        tracing.configure("ingress")
        try:
            with serving(self._app) as server:
                yield server
        finally:
            tracing.shutdown()

    @property
    def spans(self) -> list[ReceivedSpan]:
        return self._receiver.spans


@pytest.fixture
def traced(echo: Echo, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    with OtlpReceiver() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        yield Traced(echo, tokenizer, receiver)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_below_the_callers(traced: Traced, echo: Echo, stream: bool) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-01"}
    with traced.serving() as server:
        httpx.post(server.url + CHAT, content=body(stream=stream), headers=headers)
    [span] = traced.spans
    assert span.name == "chat echo"
    assert (span.trace_id, span.parent_id) == (TRACE_ID, CALLER_ID)
    assert span.attributes["gen_ai.request.model"] == "echo"
    assert span.attributes["gen_ai.request.max_tokens"] == 4
    assert span.attributes["gen_ai.response.id"].startswith("chatcmpl-")
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
    assert span.attributes["adaptivespec.usage.accepted_tokens"] == 2
    assert span.attributes["adaptivespec.time_to_first_token_s"] > 0
    assert "error.type" not in span.attributes
    [request] = echo.requests
    assert request.traceparent == f"00-{TRACE_ID}-{span.span_id}-01"


def test_a_completion_is_a_text_completion(traced: Traced) -> None:
    with traced.serving() as server:
        text = msgspec.json.encode({"model": "echo", "prompt": "one two"})
        httpx.post(server.url + "/v1/completions", content=text)
    [span] = traced.spans
    assert span.name == "text_completion echo"


def test_a_caller_that_does_not_sample_is_followed(traced: Traced, echo: Echo) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{CALLER_ID}-00"}
    with traced.serving() as server:
        httpx.post(server.url + CHAT, content=body(), headers=headers)
    assert traced.spans == []
    assert echo.requests[0].traceparent is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step", [0, 1])
def test_a_failure_is_noted_as_the_client_sees_it(
    traced: Traced, echo: Echo, step: int, stream: bool
) -> None:
    echo.failures[step] = TargetLost("the target died")
    with traced.serving() as server:
        httpx.post(server.url + CHAT, content=body(stream=stream))
    [span] = traced.spans
    assert span.attributes["error.type"] == "service_unavailable"


def test_a_prompt_that_does_not_fit_is_noted(traced: Traced) -> None:
    with traced.serving() as server:
        assert httpx.post(server.url + CHAT, content=body(max_tokens=4000)).status_code == 400
    [span] = traced.spans
    assert span.attributes["error.type"] == "context_length_exceeded"


def test_a_client_that_leaves_is_noted(traced: Traced, echo: Echo) -> None:
    echo.held = 1
    with traced.serving() as server:
        with server.post(CHAT, body(stream=True)):
            server.wait(echo.waiting)
        server.wait(echo.closed)
    [span] = traced.spans
    assert span.attributes["adaptivespec.client_left"] is True
    assert "error.type" not in span.attributes


def test_without_tracing_nothing_is_asked_of_the_backend(server: Server, echo: Echo) -> None:
    httpx.post(server.url + CHAT, content=body())
    assert echo.requests[0].traceparent is None
