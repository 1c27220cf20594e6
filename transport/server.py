"""Serving a worker over a channel: its messages come one at a time, on a thread of its own."""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from adaptivespec.errors import LinkDown
from adaptivespec.messages import Failed
from transport.channel import Address, Channel, ChannelClosed, Listener
from transport.frames import PROTOCOL_VERSION

log = logging.getLogger(__name__)


class Worker(Protocol):
    """What can be served."""

    def handle(self, message: Any) -> Any:
        """Carry out a message; an answer, or None where none is due."""

    def close(self) -> None:
        """The peer has gone; another may come."""


def serve(worker: Worker, host: str, messages: Any, name: str) -> Address:
    """Start to answer `messages` for one peer after the other; returns where. Anything but a lost
    peer or link ends the process: the worker's state is not to be trusted any more, and whoever
    started it starts it anew."""
    listener = Listener(host, PROTOCOL_VERSION)
    threading.Thread(
        target=_run, args=(listener, worker, messages, name), name=name, daemon=True
    ).start()
    return listener.address


def converse(channel: Channel[Any, Any], handle: Callable[[Any], Any]) -> None:
    """Answer messages until the peer hangs up, which raises ChannelClosed. Of whatever else ends
    this, and is raised, it is told if it is still there."""
    try:
        while True:
            answer = handle(channel.recv())
            if answer is not None:
                channel.send(answer)
    except ChannelClosed:
        raise
    except Exception as error:
        with suppress(ChannelClosed):
            channel.send(Failed(f"{type(error).__name__}: {error}"))
        raise


def _run(listener: Listener, worker: Worker, messages: Any, name: str) -> None:
    try:
        while True:
            with listener.accept(messages) as channel:
                try:
                    converse(channel, worker.handle)
                except (ChannelClosed, LinkDown) as error:
                    worker.close()
                    log.warning("the %s waits for a new controller: %s", name, error)
    except BaseException:
        log.exception("the %s ends", name)
        os._exit(1)
