import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.messages import VERSION, Ping, Pong, Request, Stop
from tests.transport.peers import freeze, peer_process
from transport.channel import Address, Channel, ChannelClosed, Listener, ProtocolError, connect


def echo(address: Address) -> None:
    """Answer every Ping until Stop."""
    with connect(address, VERSION, Request, timeout=20) as channel:
        while isinstance(message := channel.recv(), Ping):
            channel.send(Pong(message.number))


def hold(address: Address) -> None:
    """Connect, and never read."""
    with connect(address, VERSION, Request, timeout=20):
        threading.Event().wait()


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener("127.0.0.1", VERSION)
    yield listener
    listener.close()


@pytest.fixture
def raw() -> Iterator[tuple[Channel[Ping, Any], socket.socket]]:
    """A channel that expects Requests, and the bare socket of its peer."""
    ours, theirs = _tcp_pair()
    channel: Channel[Ping, Any] = Channel(ours, Request, max_frame=1024)
    with theirs, channel:
        yield channel, theirs


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    return ours, theirs


def flood(channel: Channel[Ping, Any]) -> None:
    """Send more than the kernel's buffers hold."""
    for number in range(100):
        channel.send(Ping(number, bytes(1_000_000)))


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def in_thread(call: Any) -> tuple[threading.Thread, list[BaseException]]:
    """Start `call` in a thread; what it raises is appended to the list."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except (ChannelClosed, ProtocolError, TimeoutError) as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_messages_go_both_ways_in_order_between_processes(listener: Listener) -> None:
    with peer_process(echo, listener.address) as process:
        channel = listener.accept(Pong, timeout=20)
        for number in range(2000):
            channel.send(Ping(number))
        assert [channel.recv(5).number for _ in range(2000)] == list(range(2000))
        channel.send(Stop())
        with pytest.raises(ChannelClosed):
            channel.recv(5)
        process.join(10)
        assert process.exitcode == 0
        channel.close()


@settings(max_examples=30, deadline=None)
@given(bodies=st.lists(st.binary(max_size=200), max_size=8), cut=st.integers(1, 50))
def test_frames_survive_any_fragmentation(bodies: list[bytes], cut: int) -> None:
    messages = [Ping(i, body) for i, body in enumerate(bodies)]
    stream = b"".join(frame(msgspec.msgpack.encode(m)) for m in messages)
    ours, theirs = _tcp_pair()
    with theirs, Channel[Pong, Any](ours, Request) as channel:
        for start in range(0, len(stream), cut):
            theirs.sendall(stream[start : start + cut])
        assert [channel.recv(5) for _ in messages] == messages


def test_frames_larger_than_every_buffer_arrive_whole() -> None:
    ours, theirs = _tcp_pair()
    with Channel[Ping, Any](ours, Request) as a, Channel[Ping, Any](theirs, Request) as b:
        big = Ping(50, bytes(range(256)) * 3906)
        thread, raised = in_thread(lambda: flood(a))
        b.send(big)
        assert a.recv(10) == big
        assert [b.recv(10).number for _ in range(100)] == list(range(100))
        thread.join(10)
        assert not raised


def test_recv_times_out_and_keeps_what_arrived_in_part(
    raw: tuple[Channel[Ping, Any], socket.socket],
) -> None:
    channel, theirs = raw
    whole = frame(msgspec.msgpack.encode(Ping(3, b"body")))
    theirs.sendall(whole[:9])
    with pytest.raises(TimeoutError):
        channel.recv(0.05)
    with pytest.raises(TimeoutError):
        channel.recv(0)
    theirs.sendall(whole[9:])
    assert channel.recv(5) == Ping(3, b"body")


def test_close_wakes_a_blocked_recv_in_another_thread(
    raw: tuple[Channel[Ping, Any], socket.socket],
) -> None:
    channel, _ = raw
    thread, raised = in_thread(channel.recv)
    time.sleep(0.1)  # most likely it is inside the kernel by now; the outcome is the same if not
    channel.close()
    thread.join(10)
    assert [type(error) for error in raised] == [ChannelClosed]
    channel.close()
    with pytest.raises(ChannelClosed):
        channel.send(Ping(1))
    with pytest.raises(ChannelClosed):
        channel.recv()


def test_what_the_peer_said_before_it_closed_is_received_before_the_end(
    raw: tuple[Channel[Ping, Any], socket.socket],
) -> None:
    channel, theirs = raw
    theirs.sendall(frame(msgspec.msgpack.encode(Ping(8))))
    theirs.close()
    assert channel.recv(5) == Ping(8)
    with pytest.raises(ChannelClosed, match="the peer"):
        channel.recv(5)


def test_a_killed_peer_closes_the_channel(listener: Listener) -> None:
    with peer_process(echo, listener.address) as process:
        channel = listener.accept(Pong, timeout=20)
        process.kill()
        with pytest.raises(ChannelClosed):
            channel.recv(10)
        with pytest.raises(ChannelClosed):
            flood(channel)
        channel.close()


def test_a_frozen_peer_that_takes_nothing_closes_the_channel(listener: Listener) -> None:
    with peer_process(hold, listener.address) as process:
        channel = listener.accept(Pong, timeout=20)
        freeze(process)
        with pytest.raises(TimeoutError):
            channel.recv(0.05)
        with pytest.raises(ChannelClosed, match="has not taken"):
            flood(channel)
        channel.close()


def test_close_wakes_a_send_to_a_frozen_peer(listener: Listener) -> None:
    with peer_process(hold, listener.address) as process:
        channel = listener.accept(Pong, timeout=20)
        freeze(process)
        thread, raised = in_thread(lambda: flood(channel))
        time.sleep(0.2)
        channel.close()
        thread.join(10)
        assert [type(error) for error in raised] == [ChannelClosed]


def test_a_successor_is_accepted_after_the_first_peer_died(listener: Listener) -> None:
    for number in range(3):
        with peer_process(echo, listener.address) as process:
            channel = listener.accept(Pong, timeout=20)
            channel.send(Ping(number))
            assert channel.recv(5) == Pong(number)
            process.kill()
            with pytest.raises(ChannelClosed):
                channel.recv(10)
            channel.close()


@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (
            msgspec.msgpack.encode({"type": "reboot"}),
            r"tagged 'reboot', expected one of ping, stop",
        ),
        (msgspec.msgpack.encode({"number": 1}), r"dict .*, expected one of ping, stop"),
        (msgspec.msgpack.encode([1, 2]), r"list \[1, 2\], expected one of ping, stop"),
        (msgspec.msgpack.encode(Ping("one")), r"tagged 'ping'.*Expected `int`, got `str`"),  # type: ignore[arg-type]
        (b"\xc1garbage", r"8 bytes that are no msgpack"),
        (b"", r"0 bytes"),
    ],
)
def test_a_foreign_message_is_a_protocol_error_that_names_it(
    raw: tuple[Channel[Ping, Any], socket.socket], payload: bytes, named: str
) -> None:
    channel, theirs = raw
    theirs.sendall(frame(payload))
    with pytest.raises(ProtocolError, match=named):
        channel.recv(5)
    with pytest.raises(ChannelClosed):
        channel.recv(5)
    assert theirs.recv(1) == b""


def test_frames_over_the_limit_are_neither_sent_nor_received(
    raw: tuple[Channel[Ping, Any], socket.socket],
) -> None:
    channel, theirs = raw
    with pytest.raises(ValueError, match="max_frame is 1024"):
        channel.send(Ping(1, bytes(2000)))
    channel.send(Ping(2))
    assert theirs.recv(4096) == frame(msgspec.msgpack.encode(Ping(2)))
    theirs.sendall(b"GET / HTTP/1.1\r\n\r\n")
    with pytest.raises(ProtocolError, match="expected at most 1024"):
        channel.recv(5)


def test_strays_are_turned_away_and_the_peer_is_still_accepted(listener: Listener) -> None:
    where = (listener.address.host, listener.address.port)
    guess = msgspec.structs.replace(listener.address, token="0" * 32)

    def arrive() -> None:
        with socket.create_connection(where) as http:
            http.sendall(b"GET / HTTP/1.1\r\n\r\n")
            http.recv(1)
        with socket.create_connection(where):
            pass
        with pytest.raises(ChannelClosed):
            connect(guess, VERSION, Request, timeout=10)
        echo(listener.address)

    thread, raised = in_thread(arrive)
    with listener.accept(Pong, timeout=20) as channel:
        channel.send(Ping(5))
        assert channel.recv(5) == Pong(5)
        channel.send(Stop())
        thread.join(10)
    assert not raised


def test_another_version_is_refused_on_both_sides_and_named(listener: Listener) -> None:
    thread, raised = in_thread(lambda: connect(listener.address, 6, Request, timeout=10))
    with pytest.raises(ProtocolError, match="received protocol version 6, expected 7"):
        listener.accept(Pong, timeout=10)
    thread.join(10)
    assert str(raised[0]) == "received protocol version 7, expected 6"
    assert isinstance(raised[0], ProtocolError)


def test_accept_and_connect_give_up_in_time(listener: Listener) -> None:
    with pytest.raises(TimeoutError):
        listener.accept(Pong, timeout=0.05)
    with pytest.raises(TimeoutError):  # the kernel takes the connection, nobody the handshake
        connect(listener.address, VERSION, Request, timeout=0.05)


def test_closing_the_listener_wakes_accept_and_ends_connecting(listener: Listener) -> None:
    thread, raised = in_thread(lambda: listener.accept(Pong))
    time.sleep(0.1)
    listener.close()
    thread.join(10)
    assert [type(error) for error in raised] == [ChannelClosed]
    with pytest.raises(ChannelClosed):
        connect(listener.address, VERSION, Request, timeout=5)
