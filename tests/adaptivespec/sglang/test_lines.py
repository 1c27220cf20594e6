"""The owner's end of a line to the worker: an answer is that of its own message."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from adaptivespec.errors import LinkDown, TargetLost
from adaptivespec.messages import Failed
from adaptivespec.sglang.messages import (
    VERSION,
    FromWorker,
    Hello,
    Joined,
    JoinLink,
    LinkOpened,
    OpenLink,
    Refused,
    ToWorker,
)
from adaptivespec.sglang.target import _Line
from transport.channel import Address, Channel, Listener, connect
from transport.link import LinkAddress

PATIENCE_S = 10.0
NOWHERE = Address("127.0.0.1", 1, "")
OPENED = LinkOpened(LinkAddress(NOWHERE, 2))

Ends = tuple[_Line, Channel[Any, Any]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A line, and the worker's channel."""
    listener = Listener("127.0.0.1", VERSION)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(connect, listener.address, VERSION, ToWorker, PATIENCE_S)
        channel = listener.accept(FromWorker, PATIENCE_S)
        worker = connecting.result()
    listener.close()
    with worker:
        worker.send(Hello(context=1, kv_tokens=1, page_size=1, vocab_size=1, state_size=0))
        line = _Line(channel, timeout_s=0.2)
        yield line, worker
        line.close()


def test_an_answer_that_comes_too_late_is_not_taken_for_the_next_one(ends: Ends) -> None:
    line, worker = ends
    with pytest.raises(TargetLost, match="does not answer"):
        line.ask(JoinLink(1, NOWHERE), Joined, LinkDown)
    worker.send(Refused("nobody came"))
    worker.send(OPENED)
    assert line.ask(OpenLink(2), LinkOpened, LinkDown) == OPENED


def test_a_refusal_says_why(ends: Ends) -> None:
    line, worker = ends
    worker.send(Refused("nobody came"))
    with pytest.raises(LinkDown, match="nobody came"):
        line.ask(JoinLink(1, NOWHERE), Joined, LinkDown)


def test_a_worker_that_broke_says_how(ends: Ends) -> None:
    line, worker = ends
    worker.send(Failed("KeyError: 1"))
    with pytest.raises(TargetLost, match="KeyError: 1"):
        line.ask(OpenLink(2), LinkOpened, TargetLost)
