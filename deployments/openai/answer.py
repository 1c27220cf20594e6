"""The response to a generation, in one piece or as a stream."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import msgspec
from opentelemetry.trace import Span
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adaptivespec import tracing
from adaptivespec.request import Delta, FinishReason, GenerationRequest, Usage
from deployments.backend import Backend
from deployments.openai import stream
from deployments.openai.disconnect import until_disconnect
from deployments.openai.observe import observed, record_error
from deployments.openai.responses import Replies

Prepare = Callable[[str | None], Awaitable[GenerationRequest]]


class Answer(Response):
    """Generates while it is sent, within one span. Errors before the first delta are raised before
    anything is sent, so that they can become an HTTP status. However it ends, also by the client's
    leaving, the backend's generator is closed and the span ended before the call returns."""

    def __init__(
        self,
        backend: Backend,
        prepare: Prepare,
        replies: Replies,
        *,
        streaming: bool,
        include_usage: bool,
    ) -> None:
        """`prepare` makes the request, given the span's traceparent if it is sampled."""
        self.background = None
        self._backend = backend
        self._prepare = prepare
        self._replies = replies
        self._streaming = streaming
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        replies = self._replies
        span = tracing.start_request_span(
            replies.dialect.operation,
            replies.model,
            Headers(scope=scope),
            {"gen_ai.response.id": replies.id},
        )
        try:
            work = self._generate(scope, receive, send, span)
            if not await until_disconnect(receive, work):
                span.set_attribute("adaptivespec.client_left", True)
        except Exception as error:
            record_error(span, error)
            raise
        finally:
            span.end()

    async def _generate(self, scope: Scope, receive: Receive, send: Send, span: Span) -> None:
        request = await self._prepare(tracing.traceparent_of(span))
        span.set_attributes(tracing.request_attributes(request))
        async with aclosing(self._backend.generate(request)) as generated:
            deltas = observed(generated, span)
            if self._streaming:
                events = stream.events(deltas, self._replies, self._include_usage)
                await _send_events(events, send)
                return
            reply = self._replies.whole(*await _collect(deltas))
        response = Response(msgspec.json.encode(reply), media_type="application/json")
        await response(scope, receive, send)


async def _send_events(events: AsyncIterator[bytes], send: Send) -> None:
    started = False
    async for data in events:
        if not started:
            headers = [(name.encode(), value.encode()) for name, value in stream.HEADERS.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            started = True
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _collect(deltas: AsyncIterator[Delta]) -> tuple[str, FinishReason, Usage]:
    """The text, finish reason and usage of `observed` deltas."""
    pieces: list[str] = []
    async for delta in deltas:
        pieces.extend(delta.pieces)
        if delta.finish_reason is not None and delta.usage is not None:
            end = delta.finish_reason, delta.usage
    return "".join(pieces), *end
