"""The response to a generation, in one piece or as a stream."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from adaptivespec.errors import TargetLost
from adaptivespec.request import Delta, FinishReason, GenerationRequest, Usage
from deployments.backend import Backend
from deployments.openai import stream
from deployments.openai.disconnect import until_disconnect
from deployments.openai.responses import Replies


class Answer(Response):
    """Generates while it is sent. Errors before the first delta are raised before anything is sent,
    so that they can become an HTTP status. However it ends, also by the client's leaving, the
    backend's generator is closed before the call returns."""

    def __init__(
        self,
        backend: Backend,
        request: GenerationRequest,
        replies: Replies,
        *,
        streaming: bool,
        include_usage: bool,
    ) -> None:
        self.background = None
        self._backend = backend
        self._request = request
        self._replies = replies
        self._streaming = streaming
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._generate(scope, receive, send))

    async def _generate(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._backend.generate(self._request)) as deltas:
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
    pieces: list[str] = []
    last: Delta | None = None
    async for last in deltas:
        pieces.extend(last.pieces)
    if last is None or last.finish_reason is None or last.usage is None:
        raise TargetLost(stream.CUT_SHORT)
    return "".join(pieces), last.finish_reason, last.usage
