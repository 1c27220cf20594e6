"""An answer as server-sent events. Every delta is an event at once: no timer, no batching."""

from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET, Struct

from adaptivespec.errors import Overloaded, RequestError, TargetLost
from adaptivespec.request import Delta
from deployments.openai.errors import error_body
from deployments.openai.responses import Replies

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would collect events
}
DONE = b"data: [DONE]\n\n"


def event(data: Struct) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def events(
    deltas: AsyncIterator[Delta], replies: Replies, include_usage: bool
) -> AsyncIterator[bytes]:
    """Yield bytes to send: the opening with the first delta, then what each delta adds; nothing for
    a delta without text that does not finish.

    An error before the first delta is raised, for the response has no status yet. A later one
    becomes an event with the error's body, which OpenAI's client raises as APIError; the stream
    then ends without [DONE], which says to every other client that the answer is not whole.
    """
    no_usage = None if include_usage else UNSET
    started = False
    try:
        async for delta in deltas:
            choices = [] if started else replies.dialect.opening()
            started = True
            if delta.text:
                choices.append(replies.dialect.piece(delta.text))
            if delta.finish_reason is not None:
                choices.append(replies.dialect.closing(delta.finish_reason))
            out = [event(replies.chunk([choice], no_usage)) for choice in choices]
            if delta.finish_reason is not None:
                if include_usage:
                    out.append(event(replies.chunk([], delta.usage)))
                out.append(DONE)
            if out:
                yield b"".join(out)
    except (RequestError, Overloaded, TargetLost) as error:
        if not started:
            raise
        yield event(error_body(error))
    except Exception as error:
        if started:
            yield event(error_body(error))
        raise
