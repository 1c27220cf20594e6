"""Tensors between one target (rank 0) and one drafter (rank 1), over torch.distributed.

Each link is a process group of its own beside the global one, so a process may hold several and
rebuild one while others live. The target opens an endpoint and gives its address to the drafter:

    endpoint = open_link(host, generation, layout, device)                   # target
    link = connect_link(endpoint.address, layout, device, 1.0, 30.0)         # drafter
    link = endpoint.accept(1.0, 30.0)                                        # target
"""

import os
import time
from datetime import timedelta
from typing import Any, Literal, NoReturn, Self

import msgspec
import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    ProcessGroupGloo,
    Store,
    TCPStore,
    Work,
)

from adaptivespec.config import Settings
from adaptivespec.errors import LinkDown
from adaptivespec.tree import DraftTrees
from transport.channel import Address, Channel, Listener, connect

Backend = Literal["gloo", "nccl"]

_VERSION = 1  # of the rendezvous and of what travels in a tensor
_TARGET, _DRAFT = 0, 1
_TREES, _STATES, _HELLO = range(3)  # kinds of messages


class LinkLayout(msgspec.Struct, frozen=True):
    """Sizes of the fixed buffers; both ends must name the same."""

    max_rows: int  # trees in a message
    max_nodes: int  # nodes in a tree
    max_state_rows: int
    state_size: int  # width of a hidden state; 0: none are sent
    dtype: Literal["bfloat16", "float32"]  # of the states

    @classmethod
    def of(cls, settings: Settings, state_size: int) -> Self:
        """The layout that both ends derive from the application's settings."""
        return cls(
            max_rows=settings.target.max_running,
            max_nodes=settings.max_shape.nodes,
            max_state_rows=settings.max_state_rows,
            state_size=state_size,
            dtype=settings.model.dtype,
        )


class LinkAddress(msgspec.Struct, frozen=True):
    """Where the target waits for the drafter of this generation, and no other's."""

    rendezvous: Address
    generation: int


class _Card(msgspec.Struct, frozen=True, tag=True):
    """What each end tells the other first. All but the device must agree."""

    generation: int
    layout: LinkLayout
    device: str


class _Entry(msgspec.Struct, frozen=True, tag=True):
    """Something that torch.distributed puts into the store."""

    key: str
    value: bytes


class _StoreAt(msgspec.Struct, frozen=True, tag=True):
    """Where the target serves a store of torch.distributed."""

    host: str
    port: int


_Message = _Card | _Entry | _StoreAt
_Rendezvous = Channel[_Message, _Message]


def device_identity(device: torch.device) -> str:
    """A name of `device` that is unique among all processes of the cluster, however each of them
    numbers its GPUs."""
    if device.type != "cuda":
        return device.type
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def backend(target: str, draft: str) -> Backend:
    """NCCL when both ends, named by `device_identity`, are on GPUs of their own (NCCL refuses two
    ranks on one GPU), Gloo otherwise."""
    on_gpus = target.startswith("cuda") and draft.startswith("cuda")
    return "nccl" if on_gpus and target != draft else "gloo"


class LinkEndpoint:
    """The target's side before the drafter has come."""

    def __init__(
        self, host: str, generation: int, layout: LinkLayout, device: torch.device
    ) -> None:
        self._listener = Listener(host, _VERSION)
        self._card = _Card(generation, layout, device_identity(device))
        self._device = device
        self.address = LinkAddress(self._listener.address, generation)

    def accept(self, timeout: float, setup_timeout: float) -> "TorchLink":
        """Wait for the drafter; `setup_timeout` bounds each of the few waits of the set-up and
        `timeout` every wait on the link, in seconds. Raises LinkDown. An endpoint makes one link,
        whatever comes of it."""
        try:
            channel = self._listener.accept(_Message, setup_timeout)
        except (OSError, RuntimeError) as error:
            raise LinkDown(f"no drafter has come: {error}") from error
        finally:
            self._listener.close()
        return _set_up(channel, _TARGET, self._card, self._device, timeout, setup_timeout)

    def close(self) -> None:
        """Stop waiting for the drafter; idempotent."""
        self._listener.close()


def open_link(host: str, generation: int, layout: LinkLayout, device: torch.device) -> LinkEndpoint:
    """Target side: listen on a free port of `host` (a name or IP address of this machine that the
    drafter can reach) for the drafter of this generation."""
    return LinkEndpoint(host, generation, layout, device)


def connect_link(
    address: LinkAddress,
    layout: LinkLayout,
    device: torch.device,
    timeout: float,
    setup_timeout: float,
) -> "TorchLink":
    """Drafter side: meet the target; timeouts as in `LinkEndpoint.accept`. Raises LinkDown: nobody
    is there, or it is of another generation or layout."""
    card = _Card(address.generation, layout, device_identity(device))
    try:
        channel = connect(address.rendezvous, _VERSION, _Message, setup_timeout)
    except (OSError, RuntimeError) as error:
        raise LinkDown(f"no target: {error}") from error
    return _set_up(channel, _DRAFT, card, device, timeout, setup_timeout)


def _set_up(
    channel: _Rendezvous,
    rank: int,
    card: _Card,
    device: torch.device,
    timeout: float,
    setup_timeout: float,
) -> "TorchLink":
    """Exchange cards over the channel, which then is closed, and make the process group."""
    try:
        with channel:
            channel.send(card)
            peer = channel.recv(setup_timeout)
            if (
                not isinstance(peer, _Card)
                or msgspec.structs.replace(peer, device=card.device) != card
            ):
                raise LinkDown(f"the peer is {peer}, this side {card}")
            ends = (card.device, peer.device)
            chosen = backend(*(ends if rank == _TARGET else ends[::-1]))
            make = _nccl if chosen == "nccl" else _gloo
            group = make(channel, rank, setup_timeout)
            link = TorchLink(group, chosen, rank, card.layout, device, timeout)
            link._greet(setup_timeout)
            return link
    except (OSError, RuntimeError) as error:
        raise LinkDown(f"no link has come about: {error}") from error


class _PairStore(Store):
    """The store through which a group of two exchanges its addresses: what one end sets, the other
    gets. A TCPStore would do, but it looks up the name of every address it connects to, and without
    a name server that takes longer than a link may."""

    def __init__(self, channel: _Rendezvous, timeout: float) -> None:
        super().__init__()
        self._channel = channel
        self._timeout = timeout
        self._entries: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # stubs say str
        self._entries[key] = value
        self._channel.send(_Entry(key, value))

    def get(self, key: str) -> bytes:
        while key not in self._entries:
            entry = self._channel.recv(self._timeout)
            if not isinstance(entry, _Entry):
                raise LinkDown(f"the peer sent {entry} instead of a store entry")
            self._entries[entry.key] = entry.value
        return self._entries[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


def _gloo(channel: _Rendezvous, rank: int, timeout: float) -> Any:
    options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=channel.local_host)]
    options._timeout = timedelta(seconds=timeout)
    options._threads = 1  # for collectives, which a link has none of
    return ProcessGroupGloo(_PairStore(channel, timeout), rank, 2, options)


def _nccl(channel: _Rendezvous, rank: int, timeout: float) -> Any:
    from torch.distributed import ProcessGroupNCCL  # missing from builds of torch without CUDA

    limit = timedelta(seconds=timeout)
    # Its threads use the store for as long as the group lives: one without Python in it.
    if rank == _TARGET:
        store = TCPStore(channel.local_host, 0, 2, True, limit, wait_for_workers=False)
        channel.send(_StoreAt(channel.local_host, store.port))
    else:
        at = channel.recv(timeout)
        if not isinstance(at, _StoreAt):
            raise LinkDown(f"the peer sent {at} instead of its store's address")
        store = TCPStore(at.host, at.port, 2, False, limit)
    options = ProcessGroupNCCL.Options()
    options._timeout = limit
    # By default the group's watchdog ends the process when the peer is lost; a link must survive.
    saved = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    try:
        return ProcessGroupNCCL(store, rank, 2, options)
    finally:
        if saved is None:
            del os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        else:
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = saved


class TorchLink:
    """A `Link` over a process group of two ranks.

    A message is one contiguous prefix of a fixed buffer. Trees travel as int32 [3, rows, nodes]:
    tokens, parents and the bits of the log-probabilities. What a recv returns is a view of the
    buffer where the transfer ends on this side's device, valid until the next recv of that kind.
    A send returns before the peer has taken the message; the next send of that kind waits for it,
    and a close before that loses it.
    Both ends must exchange messages in the same order. One thread at a time.

    Too large a message raises ValueError; everything that goes wrong with the peer, LinkDown.
    """

    def __init__(
        self,
        group: Any,
        backend: Backend,
        rank: int,
        layout: LinkLayout,
        device: torch.device,
        timeout: float,
    ) -> None:
        self._group = group
        self._backend = backend
        self._rank = rank
        self._peer = 1 - rank
        self._layout = layout
        self._device = device
        self._timeout = timeout
        self._down: str | None = None  # why the link is unusable
        self._sending: dict[int, Work] = {}
        place: dict[str, Any] = (
            {"device": device}
            if backend == "nccl"
            else {"device": "cpu", "pin_memory": device.type == "cuda"}
        )
        trees = 3 * layout.max_rows * layout.max_nodes
        states = layout.max_state_rows * layout.state_size
        self._buffers = {
            _TREES: torch.empty(trees, dtype=torch.int32, **place),
            _STATES: torch.empty(states, dtype=getattr(torch, layout.dtype), **place),
        }

    def _greet(self, timeout: float) -> None:
        """One message each way: it is here, not in the first step, that NCCL connects."""
        hello = self._buffers[_TREES][:1]
        for sender in (_TARGET, _DRAFT):
            move = self._group.send if sender == self._rank else self._group.recv
            self._wait(move([hello], self._peer, _HELLO), "no greeting", timeout)

    def send_trees(self, trees: DraftTrees) -> None:
        rows, nodes = trees.tokens.shape
        message = self._trees(rows, nodes)
        self._settle(_TREES)
        message[0].copy_(trees.tokens)
        message[1].copy_(trees.parents)
        message[2].view(torch.float32).copy_(trees.logprobs)
        self._send(_TREES, message, rows, nodes)

    def recv_trees(self, rows: int, nodes: int) -> DraftTrees:
        message = self._trees(rows, nodes)
        self._recv(_TREES, message, rows, nodes)
        tokens, parents, logprobs = message.to(self._device)
        return DraftTrees(tokens, parents, logprobs.view(torch.float32))

    def send_states(self, states: Tensor) -> None:
        message = self._states(len(states))
        if states.shape != message.shape or states.dtype != message.dtype:
            raise ValueError(
                f"states are {states.dtype} {list(states.shape)}; "
                f"the link carries {message.dtype} [rows, {self._layout.state_size}]"
            )
        self._settle(_STATES)
        message.copy_(states)
        self._send(_STATES, message, len(states))

    def recv_states(self, rows: int) -> Tensor:
        message = self._states(rows)
        self._recv(_STATES, message, rows)
        return message.to(self._device)

    def close(self) -> None:
        self._down = self._down or "it is closed"
        self._sending.clear()
        self._group = None

    def _trees(self, rows: int, nodes: int) -> Tensor:
        """The part of the buffer for trees of [rows, nodes]: int32 [3, rows, nodes]."""
        layout = self._layout
        if rows > layout.max_rows or nodes > layout.max_nodes:
            raise ValueError(
                f"trees {[rows, nodes]} are larger than "
                f"[max_rows, max_nodes] {[layout.max_rows, layout.max_nodes]}"
            )
        return self._buffers[_TREES][: 3 * rows * nodes].view(3, rows, nodes)

    def _states(self, rows: int) -> Tensor:
        """The part of the buffer for [rows, state_size] states."""
        layout = self._layout
        if rows > layout.max_state_rows:
            raise ValueError(f"{rows} states are more than max_state_rows {layout.max_state_rows}")
        return self._buffers[_STATES][: rows * layout.state_size].view(rows, layout.state_size)

    def _tag(self, kind: int, rows: int, nodes: int) -> int:
        """Gloo matches messages by tag, and ends the process when a message's size is not what its
        receiver expects. With the size in the tag such a message is never matched."""
        return (rows * (self._layout.max_nodes + 1) + nodes) * 3 + kind

    def _send(self, kind: int, message: Tensor, rows: int, nodes: int = 0) -> None:
        self._check()
        if not message.numel():
            return
        try:
            tag = self._tag(kind, rows, nodes)
            self._sending[kind] = self._group.send([message], self._peer, tag)
        except RuntimeError as error:
            self._fail(f"cannot send: {error}", error)

    def _settle(self, kind: int) -> None:
        """Wait until the buffer's previous message has been taken."""
        self._check()
        if (work := self._sending.pop(kind, None)) is not None:
            self._wait(work, "the peer has not taken the previous message", self._timeout)

    def _recv(self, kind: int, message: Tensor, rows: int, nodes: int = 0) -> None:
        self._check()
        if not message.numel():
            return
        try:
            work = self._group.recv([message], self._peer, self._tag(kind, rows, nodes))
        except RuntimeError as error:
            self._fail(f"cannot receive: {error}", error)
        self._wait(work, f"no {message.dtype} {list(message.shape)} has come", self._timeout)

    def _wait(self, work: Work, failure: str, timeout: float) -> None:
        try:
            if self._backend == "gloo":
                work.wait(timedelta(seconds=timeout))
            else:
                self._wait_for_gpu(work, timeout)
        except RuntimeError as error:
            self._fail(f"{failure} (timeout {timeout} s): {error}", error)

    def _wait_for_gpu(self, work: Work, timeout: float) -> None:
        """NCCL's own bounded wait polls once in a millisecond and then ends the process."""
        deadline = time.monotonic() + timeout
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._group.abort()
                raise RuntimeError("timed out")
            time.sleep(20e-6)
        work.wait()  # raises what went wrong, and orders this stream behind the transfer

    def _check(self) -> None:
        if self._down is not None:
            raise LinkDown(f"the link is unusable: {self._down}")

    def _fail(self, reason: str, error: RuntimeError) -> NoReturn:
        self._down = reason
        raise LinkDown(reason) from error
