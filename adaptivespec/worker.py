"""The two sides of the wire: what a target and a drafter do with the controller's messages.

The same workers run inside the actors (messages are frames from a socket) and in one process
(messages are passed as they are): see `Local` for the latter.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from adaptivespec.drafters.base import Drafter
from adaptivespec.engine.engine import TargetEngine
from adaptivespec.errors import LinkDown
from adaptivespec.link import Link
from adaptivespec.messages import (
    Confidence,
    Draft,
    DraftCommit,
    Drafted,
    DraftMessage,
    DraftReply,
    Ping,
    Pong,
    StateRows,
    TargetCommit,
    TargetMessage,
    TargetReply,
    UseLink,
    Verified,
    Verify,
)
from adaptivespec.tracing import record_span
from adaptivespec.tree import pad, roots

Message = TypeVar("Message", contravariant=True)
Reply = TypeVar("Reply", covariant=True)


class Port(Protocol[Message, Reply]):
    """The controller's end of the conversation with one side. Answers come in order."""

    def post(self, message: Message) -> None:
        """Hand over a message without waiting. Raises TargetLost or DrafterLost."""

    def reply(self) -> Reply:
        """Wait for the next answer, for a bounded time. Raises TargetLost or DrafterLost."""

    def close(self) -> None:
        """Hang up; idempotent."""


class Local(Generic[Message, Reply]):
    """A port to a worker in this very thread: a posted message is handled at once."""

    def __init__(self, handle: Callable[[Message], Reply | None]) -> None:
        self._handle = handle
        self._replies: deque[Reply] = deque()

    def post(self, message: Message) -> None:
        reply = self._handle(message)
        if reply is not None:
            self._replies.append(reply)

    def reply(self) -> Reply:
        return self._replies.popleft()

    def close(self) -> None:
        self._replies.clear()


class _Linked:
    """A worker with one link in use, and links that the set-up thread offers by generation."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self._offered: dict[int, Link] = {}

    def offer_link(self, generation: int, link: Link) -> None:
        """Make a finished link available to a later `UseLink`; called from another thread."""
        self._offered[generation] = link

    def _use_link(self, generation: int) -> None:
        self.close()
        self.link = self._offered.pop(generation)

    def close(self) -> None:
        """Close the link in use."""
        if self.link is not None:
            self.link.close()
        self.link = None


class TargetWorker(_Linked):
    """Runs the engine. Without a link, or with a broken one, every tree is its root alone."""

    def __init__(self, engine: TargetEngine) -> None:
        super().__init__()
        self._engine = engine
        self._link_error = "no drafter is connected"

    def handle(self, message: TargetMessage) -> TargetReply | None:
        """Carry out a message; only `Verify` and `Ping` have an answer."""
        match message:
            case TargetCommit():
                self._commit(message)
            case Verify():
                return self._verify(message)
            case UseLink():
                self._use_link(message.generation)
            case Ping():
                return Pong(self._engine.requests, self._engine.used)
        return None

    def _commit(self, message: TargetCommit) -> None:
        for request in message.closed:
            self._engine.close(request)
        for opened in message.opened:
            self._engine.open(opened.request, opened.capacity, opened.sampling)
        for path in message.paths:
            self._engine.commit(path.request, path.nodes)
        if message.states and self.link is not None:
            try:
                self.link.send_states(self._states(message.states))
            except LinkDown as error:
                self._drop_link(error)

    def _states(self, rows: list[StateRows]) -> Tensor:
        return torch.cat([self._engine.states(r.request, r.start, r.stop) for r in rows])

    def _drop_link(self, error: LinkDown) -> None:
        self._link_error = str(error)
        self.close()

    def _verify(self, message: Verify) -> Verified:
        started, started_at = time.perf_counter(), time.time()
        trees = roots(message.roots)
        if message.drafted:
            if self.link is not None:
                try:
                    drafted = self.link.recv_trees(message.drafted, message.nodes)
                    trees = pad(drafted, roots(message.roots[message.drafted :]))
                except LinkDown as error:
                    self._drop_link(error)
            down = self._link_error if self.link is None else None
        else:
            down = None
        waited = time.perf_counter()
        result = self._engine.forward(message.chunks, message.requests, trees)
        done = time.perf_counter()
        for trace in message.traces:
            record_span(
                trace,
                "adaptivespec.verify",
                started_at,
                started_at + done - started,
                {
                    "adaptivespec.verify.wait_s": waited - started,
                    "adaptivespec.verify.forward_s": done - waited,
                    "adaptivespec.batch.requests": len(message.requests),
                    "adaptivespec.batch.nodes": int(trees.sizes.sum()),
                    "adaptivespec.batch.prompt_tokens": sum(len(c.tokens) for c in message.chunks),
                },
            )
        return Verified(
            nodes=trees.tokens.shape[1],
            tokens=_bytes(trees.tokens),
            parents=_bytes(trees.parents),
            target=_bytes(result.target),
            gap=_bytes(result.gap),
            first_tokens=result.first_tokens,
            wait_s=waited - started,
            forward_s=done - waited,
            link_down=down,
        )


class DraftWorker(_Linked):
    """Runs the drafter. Any exception ends it: its side of the link is closed and it is rebuilt."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self._drafter = drafter
        self._open: set[int] = set()

    def handle(self, message: DraftMessage) -> DraftReply | None:
        """Carry out a message. Raises LinkDown, or whatever the drafter raises."""
        match message:
            case DraftCommit():
                return self._commit(message)
            case Draft():
                return self._draft(message)
            case UseLink():
                self._use_link(message.generation)
                for request in self._open:
                    self._drafter.close(request)
                self._open.clear()
            case Ping():
                return Pong(len(self._open))
        return None

    def _commit(self, message: DraftCommit) -> Confidence:
        for request in message.closed:
            self._drafter.close(request)
            self._open.discard(request)
        for opened in message.opened:
            self._drafter.open(opened.request, opened.token, opened.capacity)
            self._open.add(opened.request)
        if not message.extensions:
            return Confidence([], 0.0)
        states = None
        if self._drafter.state_size:
            states = self._connected().recv_states(sum(len(e.tokens) for e in message.extensions))
        started = time.perf_counter()
        values = self._drafter.commit(message.extensions, states).tolist()
        return Confidence(values, time.perf_counter() - started)

    def _draft(self, message: Draft) -> Drafted:
        started, started_at = time.perf_counter(), time.time()
        trees = self._drafter.draft(message.requests, message.shapes)
        seconds = time.perf_counter() - started
        self._connected().send_trees(trees)
        sizes = trees.sizes.tolist()
        for trace in message.traces:
            record_span(
                trace,
                "adaptivespec.draft",
                started_at,
                started_at + seconds,
                {
                    "adaptivespec.batch.requests": len(message.requests),
                    "adaptivespec.batch.nodes": sum(sizes),
                },
            )
        return Drafted(sizes, seconds)

    def _connected(self) -> Link:
        if self.link is None:
            raise LinkDown("no target is connected")
        return self.link


def _bytes(tensor: Tensor) -> bytearray:
    return bytearray(tensor.cpu().numpy().tobytes())
