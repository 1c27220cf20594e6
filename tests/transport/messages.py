"""Messages of the channel tests."""

import msgspec


class Ping(msgspec.Struct, tag="ping", frozen=True):
    number: int
    body: bytes = b""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    pass


class Pong(msgspec.Struct, tag="pong", frozen=True):
    number: int


Request = Ping | Stop
VERSION = 7
