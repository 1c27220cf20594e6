"""Work for a client that may leave."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

log = logging.getLogger(__name__)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`, and cancel it when the client disconnects; return when it has ended, cleaned up
    after itself included. Returns whether the client stayed; raises what `work` raises. ASGI
    servers do not cancel a request whose client has left: they tell those who listen, also while
    there is nothing to send."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
        await asyncio.wait((working, watching))
    if working.cancelled():
        if error := watching.exception():  # as when Serve's proxy, which spoke for it, is gone
            log.warning("the client is out of reach: %s", type(error).__name__)
        return False
    working.result()
    return True


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
