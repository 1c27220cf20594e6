"""The two sides of the wire: what a target and a drafter do with the controller's messages.

The same workers run inside the actors, where messages are frames from a socket, and in the
controller's own process, where they are passed as they are.
"""

import time

import torch
from torch import Tensor

from adaptivespec.drafters.base import Drafter, Extension
from adaptivespec.engine.engine import TargetEngine
from adaptivespec.errors import LinkDown
from adaptivespec.link import Link
from adaptivespec.messages import (
    Chunk,
    Confidence,
    Draft,
    DraftCommit,
    Drafted,
    DraftMessage,
    DraftReply,
    Ping,
    Pong,
    TargetCommit,
    TargetMessage,
    TargetReply,
    UseLink,
    Verified,
    Verify,
)
from adaptivespec.sampling import SamplingParams
from adaptivespec.shape import Shape
from adaptivespec.tracing import record_span
from adaptivespec.tree import DraftTrees, pad, roots, trim

_NOBODY = -1  # the request of a warm-up


class _Linked:
    """A worker with one link in use, and links that the set-up thread offers by generation."""

    def __init__(self) -> None:
        self.link: Link | None = None
        self._offered: dict[int, Link] = {}

    def offer_link(self, generation: int, link: Link) -> None:
        """Make a finished link available to a later `UseLink`, in the place of any that none came
        for; called from another thread."""
        abandoned = list(self._offered)
        self._offered[generation] = link
        for earlier in abandoned:
            if (unused := self._offered.pop(earlier, None)) is not None:
                unused.close()

    def _use_link(self, generation: int) -> None:
        """Raises LinkDown."""
        self.close()
        self.link = self._offered.pop(generation, None)
        if self.link is None:
            raise LinkDown(f"no link of generation {generation} is up on this side")

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

    def warm_up(self) -> None:
        """Run one pass, so that no request pays for what a device does at first use."""
        self._engine.open(_NOBODY, 1, SamplingParams())
        self._engine.forward([Chunk(_NOBODY, [0], True)], [], roots([]))
        self._engine.close(_NOBODY)

    def _commit(self, message: TargetCommit) -> None:
        for request in message.closed:
            self._engine.close(request)
        for opened in message.opened:
            self._engine.open(opened.request, opened.capacity, opened.sampling)
        for path in message.paths:
            self._engine.commit(path.request, path.nodes)
        if message.states and self.link is not None:
            try:
                self.link.send_states(self._engine.states(message.states))
            except LinkDown as error:
                self._drop_link(error)

    def _drop_link(self, error: LinkDown) -> None:
        self._link_error = str(error)
        self.close()

    def _verify(self, message: Verify) -> Verified:
        started, started_at = time.perf_counter(), time.time()
        trees = self._receive(message)
        down = self._link_error if message.drafted and self.link is None else None
        waited = time.perf_counter()
        result = self._engine.forward(message.chunks, message.requests, trees)
        done = time.perf_counter()
        if message.traces:
            attributes = {
                "adaptivespec.verify.wait_s": waited - started,
                "adaptivespec.verify.forward_s": done - waited,
                "adaptivespec.batch.requests": len(message.requests),
                "adaptivespec.batch.nodes": int(trees.sizes.sum()),
                "adaptivespec.batch.prompt_tokens": sum(len(c.tokens) for c in message.chunks),
            }
            ended_at = started_at + done - started
            for trace in message.traces:
                record_span(trace, "adaptivespec.verify", started_at, ended_at, attributes)
        return Verified(
            nodes=trees.tokens.shape[1],
            tokens=_bytes(trees.tokens),
            parents=_bytes(trees.parents),
            logprobs=_bytes(trees.logprobs),
            target=_bytes(result.target),
            gap=_bytes(result.gap),
            first_tokens=result.first_tokens,
            wait_s=waited - started,
            forward_s=done - waited,
            link_down=down,
        )

    def _receive(self, message: Verify) -> DraftTrees:
        """The trees of the step, on the CPU; the roots alone where no drafted ones come."""
        if message.drafted and self.link is not None:
            try:
                drafted = trim(self.link.recv_trees(message.drafted, message.nodes).cpu())
                others = message.roots[message.drafted :]
                return pad(drafted, roots(others)) if others else drafted
            except LinkDown as error:
                self._drop_link(error)
        return roots(message.roots)


class DraftWorker(_Linked):
    """Runs the drafter. What goes wrong is raised to whoever hands it messages: after LinkDown it
    can go on with the next `UseLink`, after anything else it must be rebuilt."""

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
        trees = self._drafter.draft(message.requests, message.shapes, message.prices)
        seconds = time.perf_counter() - started
        self._connected().send_trees(trees)
        for trace in message.traces:
            record_span(
                trace,
                "adaptivespec.draft",
                started_at,
                started_at + seconds,
                {"adaptivespec.batch.requests": len(message.requests)},
            )
        return Drafted(seconds, self._drafter.growth)

    def warm_up(self) -> None:
        """Commit and draft once, so that no request pays for what a device does at first use."""
        size = self._drafter.state_size
        self._drafter.open(_NOBODY, 0, 16)
        self._drafter.commit([Extension(_NOBODY, [0])], torch.zeros(1, size) if size else None)
        self._drafter.draft([_NOBODY], [Shape(2, 1, 3)])
        self._drafter.close(_NOBODY)

    def _connected(self) -> Link:
        if self.link is None:
            raise LinkDown("no target is connected")
        return self.link


def _bytes(tensor: Tensor) -> bytearray:
    return bytearray(tensor.cpu().numpy().tobytes())
