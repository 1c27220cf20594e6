"""Answers on their way from an orchestrator to an ingress, beside Serve.

A Serve stream makes an object of every delta, which takes both sides milliseconds of processors
that models may be computing on. Here the deltas of all requests that are there at one time are one
frame of a channel. Serve carries the call that asks for an answer, and the error that ends it.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from itertools import count

import msgspec

from adaptivespec.errors import TargetLost
from adaptivespec.request import Delta
from transport.channel import Address, Channel, ChannelClosed, Listener, ProtocolError, connect

log = logging.getLogger(__name__)

VERSION = 1
"""Of the frames; raise it whenever `Delta` changes."""

_CONNECT_S = 5.0


class Recipient(msgspec.Struct, frozen=True):
    """Where the deltas of an answer go."""

    address: Address
    answer: int


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """A frame: what became of answers, in order."""

    of: list[tuple[int, Delta]]


class _Nothing(msgspec.Struct, frozen=True, tag="nothing"):
    """What an ingress says."""


class Sender:
    """An orchestrator's end: a channel to each ingress that it answers to. On the event loop."""

    def __init__(self) -> None:
        self._lines: dict[Address, asyncio.Task[_Line]] = {}

    async def send(self, deltas: AsyncGenerator[Delta, None], to: Recipient) -> None:
        """Send all of an answer, and close `deltas` however it ends. Raises what they raise, and
        TargetLost when the recipient is not to be reached."""
        async with aclosing(deltas):
            try:
                line = await self._line(to.address)
                async for delta in deltas:
                    line.put(to.answer, delta)
            except (ConnectionError, TimeoutError, ProtocolError) as error:
                self._lines.pop(to.address, None)
                raise TargetLost(f"the ingress takes no answers: {error}") from error

    async def _line(self, address: Address) -> "_Line":
        if address not in self._lines:
            self._lines[address] = asyncio.create_task(_Line.to(address))
        return await asyncio.shield(self._lines[address])


class _Line:
    """A channel on which deltas leave together that were put within one turn of the event loop."""

    def __init__(self, channel: Channel[Deltas, _Nothing]) -> None:
        self._channel = channel
        self._events = asyncio.get_running_loop()
        self._waiting: list[tuple[int, Delta]] = []
        self._lost: ChannelClosed | None = None

    @classmethod
    async def to(cls, address: Address) -> "_Line":
        arguments = address, VERSION, _Nothing, _CONNECT_S
        return cls(await asyncio.to_thread(connect, *arguments))

    def put(self, answer: int, delta: Delta) -> None:
        """Raises ChannelClosed if earlier ones were not taken."""
        if self._lost is not None:
            raise self._lost
        if not self._waiting:
            self._events.call_soon(self._flush)
        self._waiting.append((answer, delta))

    def _flush(self) -> None:
        deltas, self._waiting = self._waiting, []
        try:
            self._channel.send(Deltas(deltas))
        except ChannelClosed as error:
            self._lost = error
            self._channel.close()


Event = Delta | Exception | None


class Receiver:
    """An ingress's end: hands deltas to whoever waits for them. On the event loop, but for threads
    that read, one per orchestrator."""

    def __init__(self, host: str) -> None:
        self._events = asyncio.get_running_loop()
        self._listener = Listener(host, VERSION)
        self._queues: dict[int, asyncio.Queue[Event]] = {}
        self._answers = count()
        threading.Thread(target=self._accept, name="orchestrators", daemon=True).start()

    @contextmanager
    def answer(self) -> Iterator[tuple[Recipient, asyncio.Queue[Event]]]:
        """A new recipient, and the queue of its deltas."""
        answer = next(self._answers)
        queue = self._queues[answer] = asyncio.Queue()
        try:
            yield Recipient(self._listener.address, answer), queue
        finally:
            del self._queues[answer]

    def _accept(self) -> None:
        while True:
            try:
                channel = self._listener.accept(Deltas)
            except ProtocolError as error:
                log.error("an orchestrator of another version: %s", error)
            else:
                threading.Thread(target=self._read, args=(channel,), daemon=True).start()

    def _read(self, channel: Channel[_Nothing, Deltas]) -> None:
        with channel:
            try:
                while True:
                    self._events.call_soon_threadsafe(self._deliver, channel.recv().of)
            except (ChannelClosed, ProtocolError) as error:
                log.info("an orchestrator has hung up: %s", error)

    def _deliver(self, deltas: list[tuple[int, Delta]]) -> None:
        for answer, delta in deltas:
            if answer in self._queues:
                self._queues[answer].put_nowait(delta)
