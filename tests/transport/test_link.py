import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import msgspec
import pytest
import torch

from adaptivespec.errors import LinkDown
from adaptivespec.tree import DraftTrees
from tests.transport.peers import freeze, open_descriptors, peer_process, threads
from transport.channel import connect as connect_channel
from transport.link import (
    LinkAddress,
    LinkEndpoint,
    LinkLayout,
    TorchLink,
    _Card,
    backend,
    connect_link,
    open_link,
)

CPU = torch.device("cpu")
LAYOUT = LinkLayout(max_rows=8, max_nodes=16, max_state_rows=64, state_size=48, dtype="bfloat16")
PATIENT = 30.0  # seconds: ends a wait only where something is broken
SHORT = 0.5
GONE = "reset by peer|closed by peer"  # noticed at once, not by a timeout


def some_trees(seed: int, rows: int, nodes: int) -> DraftTrees:
    """Arbitrary content, the extremes of each type among it."""
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randint(-1, 2**31 - 1, (rows, nodes), dtype=torch.int32, generator=rng)
    parents = torch.randint(-1, 16, (rows, nodes), dtype=torch.int32, generator=rng)
    logprobs = torch.randn(rows, nodes, generator=rng)
    logprobs[:, -1] = -torch.inf
    return DraftTrees(tokens, parents, logprobs)


def some_states(seed: int, rows: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(rows, LAYOUT.state_size, generator=rng).to(torch.bfloat16)


def sizes(step: int) -> tuple[int, int, int]:
    """Rows, nodes and state rows of a step: every combination comes, the largest included."""
    return 1 + step % 8, 1 + step // 8 % 16, 1 + step * 7 % 64


def same(a: DraftTrees, b: DraftTrees) -> bool:
    return (
        torch.equal(a.tokens, b.tokens)
        and torch.equal(a.parents, b.parents)
        and torch.equal(a.logprobs, b.logprobs)
    )


def connect(address: LinkAddress) -> TorchLink:
    return connect_link(address, LAYOUT, CPU, PATIENT, PATIENT)


# What the drafter's process does.


def run_steps(address: LinkAddress, steps: int) -> None:
    """Send trees, receive the states, `steps` times; exit code 1 when anything is not as it was."""
    link = connect(address)
    for step in range(steps):
        rows, nodes, states = sizes(step)
        link.send_trees(some_trees(step, rows, nodes))
        if not torch.equal(link.recv_states(states), some_states(step, states)):
            raise SystemExit(1)
    link.close()


def stay(address: LinkAddress) -> None:
    """Connect and do nothing."""
    link = connect(address)
    time.sleep(600)
    link.close()


def send_then_stay(address: LinkAddress, rows: int, nodes: int) -> None:
    link = connect(address)
    link.send_trees(some_trees(0, rows, nodes))
    time.sleep(600)


def show_up_only(address: LinkAddress) -> None:
    """Come to the rendezvous, and go before there is a link."""
    with connect_channel(address.rendezvous, 1, _Card, PATIENT) as channel:
        channel.send(channel.recv(PATIENT))


def rebuild(addresses: Connection) -> None:
    """Run one step over a link to each address that comes, until None does."""
    while (address := addresses.recv()) is not None:
        run_steps(address, 1)


def run_two_links(first: LinkAddress, second: LinkAddress) -> None:
    """Alternate between two links of one process."""
    links = connect(first), connect(second)
    for seed, link in enumerate(links):
        link.send_trees(some_trees(seed, 4, 8))
    for seed, link in enumerate(links):
        if not torch.equal(link.recv_states(5), some_states(seed, 5)):
            raise SystemExit(1)


def expect_link_down(address: LinkAddress, layout: LinkLayout, setup: float) -> None:
    """Exit code 0 when connecting raises LinkDown."""
    try:
        connect_link(address, layout, CPU, PATIENT, setup)
    except LinkDown:
        return
    raise SystemExit(1)


@pytest.fixture
def endpoint() -> Iterator[LinkEndpoint]:
    endpoint = open_link("127.0.0.1", 1, LAYOUT, CPU)
    yield endpoint
    endpoint.close()


@contextmanager
def linked(
    endpoint: LinkEndpoint, run: Callable[..., None], *args: int, timeout: float = PATIENT
) -> Iterator[tuple[TorchLink, BaseProcess]]:
    with peer_process(run, endpoint.address, *args) as process:
        link = endpoint.accept(timeout, PATIENT)
        yield link, process
        link.close()


def run_step(link: TorchLink, step: int) -> None:
    """The target's side of a step of `run_steps`."""
    rows, nodes, states = sizes(step)
    assert same(link.recv_trees(rows, nodes), some_trees(step, rows, nodes))
    link.send_states(some_states(step, states))


def assert_down(link: TorchLink, why: str) -> None:
    """A receive fails, and from then on everything does, at once."""
    with pytest.raises(LinkDown, match=why):
        link.recv_trees(4, 8)
    with pytest.raises(LinkDown, match="unusable"):
        link.send_states(some_states(0, 1))
    with pytest.raises(LinkDown, match="unusable"):
        link.recv_trees(4, 8)


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ("cpu", "cpu", "gloo"),
        ("cuda:GPU-1", "cpu", "gloo"),
        ("cpu", "cuda:GPU-1", "gloo"),
        ("cuda:GPU-1", "cuda:GPU-1", "gloo"),
        ("cuda:GPU-1", "cuda:GPU-2", "nccl"),
    ],
)
def test_nccl_needs_two_gpus(target: str, draft: str, expected: str) -> None:
    assert backend(target, draft) == expected


def test_thousands_of_messages_of_every_size_arrive_as_they_were(endpoint: LinkEndpoint) -> None:
    steps = 2000
    with linked(endpoint, run_steps, steps) as (link, process):
        for step in range(steps):
            run_step(link, step)
        process.join(10)
        assert process.exitcode == 0


def test_a_received_tensor_is_valid_until_the_next_of_its_kind(endpoint: LinkEndpoint) -> None:
    with linked(endpoint, run_steps, 2) as (link, _):
        first = link.recv_trees(*sizes(0)[:2])
        link.send_states(some_states(0, sizes(0)[2]))
        assert same(first, some_trees(0, *sizes(0)[:2]))
        link.recv_trees(*sizes(1)[:2])
        assert not same(first, some_trees(0, *sizes(0)[:2]))


def test_a_killed_peer_is_link_down(endpoint: LinkEndpoint) -> None:
    with linked(endpoint, stay) as (link, process):
        process.kill()
        process.join()
        assert_down(link, GONE)


def test_a_frozen_peer_is_link_down(endpoint: LinkEndpoint) -> None:
    with linked(endpoint, stay, timeout=SHORT) as (link, process):
        freeze(process)
        assert_down(link, "timeout")


@pytest.mark.parametrize("end", [freeze, lambda process: process.kill()], ids=["frozen", "killed"])
def test_a_message_that_nobody_took_does_not_hold_up_close(
    endpoint: LinkEndpoint, end: Callable[[BaseProcess], None]
) -> None:
    with linked(endpoint, stay) as (link, process):
        link.send_states(some_states(0, 64))
        end(process)
        link.close()


def test_a_silent_peer_is_link_down(endpoint: LinkEndpoint) -> None:
    with linked(endpoint, stay, timeout=SHORT) as (link, _):
        assert_down(link, "timeout")


def test_a_peer_that_closes_is_link_down(endpoint: LinkEndpoint) -> None:
    with linked(endpoint, run_steps, 0) as (link, _):
        assert_down(link, GONE)


def test_a_send_does_not_wait_for_the_peer_but_the_next_one_does(endpoint: LinkEndpoint) -> None:
    with linked(endpoint, stay, timeout=SHORT) as (link, _):
        link.send_states(some_states(0, 64))
        with pytest.raises(LinkDown, match="not taken"):
            link.send_states(some_states(1, 64))


@pytest.mark.parametrize(("rows", "nodes"), [(4, 7), (4, 9), (2, 16), (8, 4), (8, 16)])
def test_trees_of_another_size_are_link_down(endpoint: LinkEndpoint, rows: int, nodes: int) -> None:
    with linked(endpoint, send_then_stay, rows, nodes, timeout=SHORT) as (link, _):
        assert_down(link, "timeout")


def test_what_does_not_fit_is_refused_and_the_link_goes_on(endpoint: LinkEndpoint) -> None:
    with linked(endpoint, run_steps, 1) as (link, process):
        with pytest.raises(ValueError, match=r"\[max_rows, max_nodes\] \[8, 16\]"):
            link.recv_trees(9, 16)
        with pytest.raises(ValueError, match=r"\[max_rows, max_nodes\] \[8, 16\]"):
            link.send_trees(some_trees(0, 8, 17))
        with pytest.raises(ValueError, match="max_state_rows 64"):
            link.send_states(some_states(0, 65))
        with pytest.raises(ValueError, match="max_state_rows 64"):
            link.recv_states(65)
        with pytest.raises(ValueError, match=r"torch\.bfloat16 \[rows, 48\]"):
            link.send_states(some_states(0, 4).float())
        with pytest.raises(ValueError, match=r"torch\.bfloat16 \[rows, 48\]"):
            link.send_states(some_states(0, 4)[:, :40])
        run_step(link, 0)
        process.join(10)
        assert process.exitcode == 0


def test_empty_messages_need_no_peer(endpoint: LinkEndpoint) -> None:
    with linked(endpoint, stay) as (link, _):
        link.send_states(some_states(0, 0))
        assert link.recv_states(0).shape == (0, LAYOUT.state_size)
        assert link.recv_trees(0, 4).tokens.shape == (0, 4)


def test_a_closed_link_is_unusable_and_closes_twice(endpoint: LinkEndpoint) -> None:
    with linked(endpoint, stay) as (link, _):
        link.close()
        link.close()
        with pytest.raises(LinkDown, match="closed"):
            link.recv_trees(1, 1)
        with pytest.raises(LinkDown, match="closed"):
            link.send_states(some_states(0, 1))


def test_a_stale_peer_cannot_join_a_newer_link(endpoint: LinkEndpoint) -> None:
    older = open_link("127.0.0.1", 0, LAYOUT, CPU).address.rendezvous
    port = endpoint.address.rendezvous.port  # the newer link got the same port again
    stale = LinkAddress(msgspec.structs.replace(older, port=port), 0)
    with peer_process(expect_link_down, stale, LAYOUT, PATIENT) as stray:
        with linked(endpoint, run_steps, 1) as (link, _):
            run_step(link, 0)
        stray.join(10)
        assert stray.exitcode == 0


def test_another_generation_is_link_down_on_both_sides(endpoint: LinkEndpoint) -> None:
    other = msgspec.structs.replace(endpoint.address, generation=0)
    with peer_process(expect_link_down, other, LAYOUT, PATIENT) as process:
        with pytest.raises(LinkDown, match=r"generation=0.*generation=1"):
            endpoint.accept(PATIENT, PATIENT)
        process.join(20)
        assert process.exitcode == 0


def test_another_layout_is_link_down_on_both_sides(endpoint: LinkEndpoint) -> None:
    other = msgspec.structs.replace(LAYOUT, state_size=64)
    with peer_process(expect_link_down, endpoint.address, other, PATIENT) as process:
        with pytest.raises(LinkDown, match="layout"):
            endpoint.accept(PATIENT, PATIENT)
        process.join(20)
        assert process.exitcode == 0


def test_set_up_gives_up_when_nobody_comes(endpoint: LinkEndpoint) -> None:
    with pytest.raises(LinkDown, match=r"within 0\.3 s"):
        endpoint.accept(PATIENT, setup_timeout=0.3)
    with pytest.raises(LinkDown, match="closed"):
        endpoint.accept(PATIENT, setup_timeout=0.3)
    with pytest.raises(LinkDown, match="no target"):
        connect(endpoint.address)


def test_set_up_gives_up_on_a_peer_that_dies_in_it(endpoint: LinkEndpoint) -> None:
    with (
        peer_process(show_up_only, endpoint.address),
        pytest.raises(LinkDown, match="no link has come about"),
    ):
        endpoint.accept(PATIENT, PATIENT)


def test_set_up_gives_up_when_the_target_never_accepts(endpoint: LinkEndpoint) -> None:
    with peer_process(expect_link_down, endpoint.address, LAYOUT, 1.0) as process:
        process.join(60)
        assert process.exitcode == 0


def test_rebuilding_leaks_neither_descriptors_nor_threads() -> None:
    ours, theirs = Pipe()
    with peer_process(rebuild, theirs), ours, theirs:
        counts = []
        for generation in range(50):
            endpoint = open_link("127.0.0.1", generation, LAYOUT, CPU)
            ours.send(endpoint.address)
            link = endpoint.accept(PATIENT, PATIENT)
            run_step(link, 0)
            with pytest.raises(LinkDown):  # the peer closes after its step
                link.recv_trees(1, 1)
            link.close()
            counts.append((open_descriptors(), threads()))
        ours.send(None)
    assert counts[-1] == counts[1]


def test_one_process_holds_several_links() -> None:
    endpoints = [open_link("127.0.0.1", generation, LAYOUT, CPU) for generation in (1, 2)]
    with peer_process(run_two_links, *(endpoint.address for endpoint in endpoints)) as process:
        links = [endpoint.accept(PATIENT, PATIENT) for endpoint in endpoints]
        for seed, link in reversed(list(enumerate(links))):
            assert same(link.recv_trees(4, 8), some_trees(seed, 4, 8))
            link.send_states(some_states(seed, 5))
        process.join(10)
        assert process.exitcode == 0
        for link in links:
            link.close()
