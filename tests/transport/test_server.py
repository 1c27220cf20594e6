"""What a served worker makes of its peers' endings, and they of its own."""

import socket
from typing import Any

import pytest

from adaptivespec.messages import Failed, Ping, Pong
from transport.channel import Channel, ChannelClosed
from transport.server import converse

PATIENCE_S = 10.0


def pair() -> tuple[Channel[Any, Any], Channel[Any, Any]]:
    """A worker's channel and its peer's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    return Channel(ours, Ping), Channel(theirs, Pong | Failed)


def test_messages_are_answered_until_the_peer_hangs_up() -> None:
    served, peer = pair()
    with served, peer:
        peer.send(Ping())
        peer.send(Ping())
        peer._sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelClosed):
            converse(served, lambda message: Pong(3))
        assert [peer.recv(PATIENCE_S), peer.recv(PATIENCE_S)] == [Pong(3), Pong(3)]


def broken(message: Ping) -> Pong:
    raise RuntimeError("out of memory")


def test_a_worker_that_breaks_tells_its_peer() -> None:
    served, peer = pair()
    with served, peer:
        peer.send(Ping())
        with pytest.raises(RuntimeError, match="out of memory"):
            converse(served, broken)
        assert peer.recv(PATIENCE_S) == Failed("RuntimeError: out of memory")


def test_a_worker_that_breaks_behind_its_peers_back_is_broken_all_the_same() -> None:
    """It is the worker that is not to be used any more, not the peer that has merely gone."""
    served, peer = pair()

    def gone_before(message: Ping) -> Pong:
        served._shut()
        raise RuntimeError("out of memory")

    with served, peer:
        peer.send(Ping())
        with pytest.raises(RuntimeError, match="out of memory"):
            converse(served, gone_before)
