"""A drafter that dies or hangs costs speed, never an answer, and comes back by itself."""

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from tests.e2e.answers import COUNTING, Streamed, complete, reference
from tests.e2e.server import Server, eventually

KILL, FREEZE = signal.SIGKILL, signal.SIGSTOP
Note = Callable[[Streamed], None]


@pytest.fixture
def note_gap(record_property: Callable[[str, object], None]) -> Note:
    """Report the longest silence of a stream. The bound is for a machine that is busy with other
    things; the server's own share is `link_timeout_s`, one second, at most."""

    def note(stream: Streamed) -> None:
        record_property("longest_gap_s", round(stream.longest_gap, 3))
        assert stream.longest_gap < 10

    return note


def strike(server: Server, app: str, how: signal.Signals) -> int:
    """Send a signal to the drafter; returns its process id."""
    pid = server.cell(app).draft
    assert pid is not None
    os.kill(pid, how)
    return pid


def wait_for_successor(server: Server, app: str, old: int) -> None:
    """Until another drafter has taken the place of process `old`, which is gone."""
    eventually(lambda: server.cell(app).draft not in (None, old))
    eventually(lambda: server.health(app)["drafter"] == "ready")
    eventually(lambda: not psutil.pid_exists(old))


@pytest.mark.parametrize(
    ("app", "how"), [("lookup", FREEZE), ("lm", KILL), ("eagle3", KILL), ("eagle3", FREEZE)]
)
def test_an_answer_outlives_its_drafter(
    server: Server, app: str, how: signal.Signals, note_gap: Note
) -> None:
    groups, client = server.placement_groups(), server.client(app)
    stream = Streamed(client, COUNTING, 160)
    stream.wait_for(10)
    old = strike(server, app, how)
    answer = stream.answer()
    assert answer.text == reference(COUNTING, 160).text
    assert answer.completion_tokens == 160
    note_gap(stream)

    wait_for_successor(server, app, old)
    later = complete(client, COUNTING, 48)
    assert later.text == reference(COUNTING, 48).text
    assert later.accepted_tokens > 0
    assert server.placement_groups() == groups
    server.wait_until_idle(app)


def test_an_answer_outlives_two_drafters(server: Server, note_gap: Note) -> None:
    """Each dies in mid-answer, the second after it has caught up with the answer."""
    client = server.client("lookup")
    plain = Streamed(client, COUNTING, 4000, mode="off")
    stream = Streamed(client, COUNTING, 4000)
    for _ in range(2):
        stream.wait_for(10)
        eventually(lambda: server.health("lookup")["drafter_requests"] == 1)
        old = strike(server, "lookup", KILL)
        wait_for_successor(server, "lookup", old)
    stream.wait_for(10)
    stream.leave()
    eventually(lambda: len(plain.text) > len(stream.text))
    plain.leave()
    assert plain.text.startswith(stream.text)
    note_gap(stream)
    server.wait_until_idle("lookup")
