"""The link between target and drafter, on the devices that they would have."""

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from machine import CheckFailed, Machine, require

from adaptivespec.errors import LinkDown
from adaptivespec.tree import DraftTrees
from transport.link import LinkAddress, LinkLayout, TorchLink, connect_link, open_link

LAYOUT = LinkLayout(max_rows=8, max_nodes=16, max_state_rows=64, state_size=64, dtype="bfloat16")
MESSAGES = 256
PATIENT_S, SHORT_S = 30.0, 1.0


def link(machine: Machine) -> str:
    """Trees and states of every size arrive as they were; a peer that is killed or frozen is
    LinkDown, in time and without harm to this process; the next link works."""
    device = torch.device(machine.device)
    with linked(machine, PATIENT_S) as (here, peer):
        for step in range(MESSAGES):
            rows, nodes, states = sizes(step)
            got, sent = here.recv_trees(rows, nodes).cpu(), some_trees(step, rows, nodes)
            same = got.tokens.equal(sent.tokens) and got.parents.equal(sent.parents)
            require(same and got.logprobs.equal(sent.logprobs), f"message {step} is another")
            here.send_states(some_states(step, states).to(device))
        peer.join(PATIENT_S)
        require(peer.exitcode == 0, "the peer received other states than were sent")
        name = here._backend
    for end, number in (("killed", signal.SIGKILL), ("frozen", signal.SIGSTOP)):
        with linked(machine, SHORT_S) as (here, peer):
            here.recv_trees(1, 1)
            os.kill(peer.pid or 0, number)
            started = time.monotonic()
            try:
                here.recv_trees(*sizes(1)[:2])
            except LinkDown:
                waited = time.monotonic() - started
                require(waited < 10 * SHORT_S, f"a {end} peer was noticed after {waited:.1f} s")
            else:
                raise CheckFailed(f"trees came from a {end} peer")
    with linked(machine, PATIENT_S) as (here, _):
        here.recv_trees(1, 1)
    alone = " (NCCL was not tried: it needs two GPUs)" if len(machine.gpus) == 1 else ""
    return f"{name}{alone}: {MESSAGES} messages each way; killed and frozen peers are LinkDown"


@contextmanager
def linked(machine: Machine, timeout_s: float) -> Iterator[tuple[TorchLink, Any]]:
    """This end of a link, and the process at the other, on a GPU of its own if there are two."""
    endpoint = open_link("127.0.0.1", 1, LAYOUT, torch.device(machine.device))
    saved = os.environ.get("CUDA_VISIBLE_DEVICES")
    if machine.drafter_gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = machine.drafter_gpu  # for the process, at its start
    peer = mp.get_context("spawn").Process(
        target=_peer, args=(endpoint.address, machine.device), daemon=True
    )
    peer.start()
    if saved is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = saved
    elif machine.drafter_gpu is not None:
        del os.environ["CUDA_VISIBLE_DEVICES"]
    try:
        here = endpoint.accept(timeout_s, PATIENT_S)
        yield here, peer
        here.close()
    finally:
        peer.kill()  # works on a stopped process, too
        peer.join()


def _peer(address: LinkAddress, device: str) -> None:
    """The drafter's end: send trees, receive states. Exit code 1 when these are not as they
    were."""
    there = connect_link(address, LAYOUT, torch.device(device), PATIENT_S, PATIENT_S)
    for step in range(MESSAGES):
        rows, nodes, states = sizes(step)
        try:
            there.send_trees(some_trees(step, rows, nodes).to(device))
            received = there.recv_states(states).cpu()
        except LinkDown:  # the other end may close early
            raise SystemExit(1) from None
        if not received.equal(some_states(step, states)):
            raise SystemExit(1)


def sizes(step: int) -> tuple[int, int, int]:
    """Rows, nodes and state rows of a step; the first are the smallest, and all sizes come."""
    return 1 + step % 8, 1 + step // 8 % 16, 1 + step * 7 % 64


def some_trees(seed: int, rows: int, nodes: int) -> DraftTrees:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, 2**31 - 1, (rows, nodes), dtype=torch.int32, generator=rng)
    parents = torch.randint(-1, 16, (rows, nodes), dtype=torch.int32, generator=rng)
    return DraftTrees(tokens, parents, torch.randn(rows, nodes, generator=rng))


def some_states(seed: int, rows: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, LAYOUT.state_size, generator=rng).to(torch.bfloat16)
