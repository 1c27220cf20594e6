"""Control messages between two processes: a framed, blocking, two-way channel over TCP.

A frame is its length (4 bytes, big-endian) and one msgpack-encoded message of a tagged union. The
first frame each way is the handshake: a token, which only those who were given the listener's
address know, so that a stray connection is refused, and the version of the messages to follow.
"""

import hmac
import logging
import secrets
import select
import socket
import threading
import time
from typing import Any, Generic, Self, TypeVar

import msgspec

logger = logging.getLogger(__name__)

Send = TypeVar("Send", bound=msgspec.Struct)
Recv = TypeVar("Recv", bound=msgspec.Struct)

MAX_FRAME = 16 * 2**20
"""Largest frame payload, in bytes: a prompt of a million tokens fits."""

_PREFIX = 4
_HANDSHAKE_S = 2.0  # a stray peer that stays silent delays the next one by no more
_SEND_S = 5.0  # frames are small: a peer that takes nothing for so long is gone


class ChannelClosed(ConnectionError):
    """The peer is gone, or one of the two sides has closed the channel."""


class ProtocolError(RuntimeError):
    """The peer sent something that is no message of this channel; the channel is closed. The
    message names what was received and what was expected."""


class Address(msgspec.Struct, frozen=True):
    """Where a Listener is, and the token that lets a peer in."""

    host: str
    port: int
    token: str


class _Hello(msgspec.Struct, frozen=True, tag="hello"):
    token: str
    version: int


class _Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    version: int


class Channel(Generic[Send, Recv]):
    """One end of an established connection: `Channel[Command, Reply](sock, Reply)`.

    recv_type: the msgspec Struct, or union of tagged ones, that the peer may send.
    One thread may send while another receives; close() wakes both.
    """

    def __init__(self, sock: socket.socket, recv_type: Any, max_frame: int = MAX_FRAME) -> None:
        self._sock = sock
        self._encoder = msgspec.msgpack.Encoder()
        self._outgoing = bytearray(4096)
        self._incoming = bytearray(64 * 1024)
        self._begin = 0  # _incoming[_begin:_end] is received and not yet decoded
        self._end = 0
        self._send_lock = threading.Lock()
        self._recv_lock = threading.Lock()
        self._closed = False
        sock.setblocking(True)
        _tune(sock)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._expect(recv_type, max_frame)

    def _expect(self, recv_type: Any, max_frame: int) -> None:
        self._max_frame = max_frame
        self._decoder = msgspec.msgpack.Decoder(recv_type)
        self._expected = _tags(recv_type)

    def send(self, message: Send) -> None:
        """Send one message. Raises ChannelClosed, also when the peer does not take it within
        5 s; ValueError: the message is larger than max_frame (nothing is sent)."""
        with self._send_lock:
            if self._closed:
                raise ChannelClosed("the channel is closed")
            frame = self._outgoing
            self._encoder.encode_into(message, frame, _PREFIX)
            size = len(frame) - _PREFIX
            if size > self._max_frame:
                raise ValueError(
                    f"a {type(message).__name__} of {size} bytes; max_frame is {self._max_frame}"
                )
            frame[:_PREFIX] = size.to_bytes(_PREFIX, "big")
            try:
                sent = self._sock.send(frame, socket.MSG_DONTWAIT)
            except BlockingIOError:
                sent = 0
            except OSError as error:  # what the peer said before it went can still be received
                raise ChannelClosed(f"the peer is gone: {error}") from error
            if sent < len(frame):
                self._send_slowly(memoryview(frame[sent:]))

    def _send_slowly(self, rest: memoryview) -> None:
        """The kernel's buffer is full: wait until the peer has made room for `rest`."""
        writable = select.poll()
        writable.register(self._sock, select.POLLOUT)
        deadline = time.monotonic() + _SEND_S
        while rest:
            if not writable.poll(max(0.0, deadline - time.monotonic()) * 1e3):
                self._shut()  # part of the frame may be out: nothing can follow it
                raise ChannelClosed(f"the peer has not taken a message within {_SEND_S} s")
            try:
                rest = rest[self._sock.send(rest, socket.MSG_DONTWAIT) :]
            except OSError as error:
                raise ChannelClosed(f"the peer is gone: {error}") from error

    def recv(self, timeout: float | None = None) -> Recv:
        """Wait for one message, for at most `timeout` seconds (None: for ever).

        Raises TimeoutError (the channel stays usable, and a frame received in part is kept),
        ChannelClosed or ProtocolError.
        """
        deadline = _deadline(timeout)
        with self._recv_lock:
            if self._closed:
                raise ChannelClosed("the channel is closed")
            self._fill(_PREFIX, deadline)
            size = int.from_bytes(self._incoming[self._begin : self._begin + _PREFIX], "big")
            if size > self._max_frame:
                self._shut()
                raise ProtocolError(
                    f"received a frame of {size} bytes, expected at most {self._max_frame}"
                )
            self._fill(_PREFIX + size, deadline)
            start = self._begin + _PREFIX
            self._begin = start + size
            with memoryview(self._incoming) as buffer, buffer[start : self._begin] as payload:
                try:
                    return self._decoder.decode(payload)
                except msgspec.DecodeError as error:
                    self._shut()
                    raise ProtocolError(
                        f"received {_describe(bytes(payload))}, "
                        f"expected one of {self._expected}: {error}"
                    ) from error

    def _fill(self, size: int, deadline: float | None) -> None:
        """Receive until `size` bytes lie at _begin; usually that is one call to the kernel."""
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._begin + size > len(self._incoming):
            pending = self._incoming[self._begin : self._end]
            if size > len(self._incoming):
                self._incoming = bytearray(size)
            self._incoming[: len(pending)] = pending
            self._begin, self._end = 0, len(pending)
        while self._end - self._begin < size:
            left = _left(deadline)
            if not self._readable.poll(None if left is None else left * 1e3):
                raise TimeoutError("no message within the timeout")
            try:
                with memoryview(self._incoming) as buffer, buffer[self._end :] as free:
                    received = self._sock.recv_into(free)
            except OSError as error:
                self._shut()
                raise ChannelClosed(f"the peer is gone: {error}") from error
            if received == 0:
                by = "this side" if self._closed else "the peer"
                self._shut()
                raise ChannelClosed(f"{by} has closed the channel")
            self._end += received

    @property
    def local_host(self) -> str:
        """The IP address of this machine by which the peer knows it."""
        return str(self._sock.getsockname()[0])

    def _shut(self) -> None:
        """Make every call on the connection, in any thread and on the peer's side, return."""
        self._closed = True
        _shutdown(self._sock)

    def close(self) -> None:
        """Close the connection; idempotent. A blocked send or recv, here or at the peer, raises
        ChannelClosed."""
        self._shut()
        with self._send_lock, self._recv_lock:  # nobody is left inside: the descriptor may go
            self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Listener:
    """Waits for a peer, and for its successor after it has gone.

    host: the name or IP address to bind and to publish. version: of the messages.
    """

    def __init__(self, host: str, version: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.create_server((host, 0), family=family)
        self._version = version
        self.address = Address(host, self._sock.getsockname()[1], secrets.token_hex(16))

    def accept(
        self, recv_type: Any, timeout: float | None = None, max_frame: int = MAX_FRAME
    ) -> Channel[Any, Any]:
        """Wait for a peer that knows the token; others are turned away and waiting goes on.

        Raises TimeoutError after `timeout` seconds; ProtocolError when a peer with the token
        speaks another version; ChannelClosed when the listener was closed.
        """
        deadline = _deadline(timeout)
        while True:
            try:
                self._sock.settimeout(_left(deadline))
                sock, peer = self._sock.accept()
            except (TimeoutError, BlockingIOError) as error:
                raise TimeoutError(f"no peer within {timeout} s") from error
            except OSError as error:
                raise ChannelClosed(f"the listener is closed: {error}") from error
            channel: Channel[Any, Any] = Channel(sock, _Hello, max_frame=1024)
            try:
                left = _left(deadline)
                hello = channel.recv(_HANDSHAKE_S if left is None else min(left, _HANDSHAKE_S))
                if not hmac.compare_digest(hello.token.encode(), self.address.token.encode()):
                    raise ProtocolError("received a wrong token")
                channel.send(_Welcome(self._version))
            except (ProtocolError, ChannelClosed, TimeoutError) as error:
                channel.close()
                logger.warning("turned away %s: %s", peer, error)
                continue
            if hello.version != self._version:
                channel.close()
                raise ProtocolError(_versions(hello.version, self._version))
            channel._expect(recv_type, max_frame)
            return channel

    def close(self) -> None:
        """Stop listening; idempotent. Accepted channels live on; a blocked accept raises
        ChannelClosed."""
        _shutdown(self._sock)
        self._sock.close()


def connect(
    address: Address,
    version: int,
    recv_type: Any,
    timeout: float,
    max_frame: int = MAX_FRAME,
) -> Channel[Any, Any]:
    """Connect to a Listener, for at most `timeout` seconds.

    Raises ChannelClosed: nobody listens there, or the token was refused; TimeoutError: no answer
    (the listener does not accept, or serves another peer); ProtocolError: another version.
    """
    deadline = _deadline(timeout)
    try:
        sock = socket.create_connection((address.host, address.port), timeout)
    except TimeoutError:
        raise
    except OSError as error:
        raise ChannelClosed(f"{address.host}:{address.port}: {error}") from error
    channel: Channel[Any, Any] = Channel(sock, _Welcome, max_frame=1024)
    try:
        channel.send(_Hello(address.token, version))
        welcome = channel.recv(_left(deadline))
        if welcome.version != version:
            raise ProtocolError(_versions(welcome.version, version))
    except (ProtocolError, ChannelClosed, TimeoutError):
        channel.close()
        raise
    channel._expect(recv_type, max_frame)
    return channel


def _tune(sock: socket.socket) -> None:
    """Send at once, and notice a machine that vanished without a FIN."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):  # Linux; other systems keep their defaults
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _shutdown(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # already gone, by the peer's doing or ours
        logger.debug("shutdown: %s", error)


def _deadline(timeout: float | None) -> float | None:
    return None if timeout is None else time.monotonic() + timeout


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _tags(recv_type: Any) -> str:
    info = msgspec.inspect.type_info(recv_type)
    types = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    return ", ".join(str(getattr(kind, "tag", kind)) for kind in types)


def _describe(payload: bytes) -> str:
    """What a payload that could not be decoded is, in at most a line."""
    try:
        content = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError:
        return f"{len(payload)} bytes that are no msgpack, {payload[:16]!r}"
    if isinstance(content, dict) and "type" in content:
        return f"a message tagged {content['type']!r}"
    return f"{type(content).__name__} {content!r:.80}"


def _versions(theirs: int, ours: int) -> str:
    return f"received protocol version {theirs}, expected {ours}"
