"""The controller's port to a worker in another process."""

from typing import Any, Generic, TypeVar

import msgspec

from transport.channel import Address, Channel, ChannelClosed, ProtocolError, connect
from transport.frames import PROTOCOL_VERSION

Message = TypeVar("Message", bound=msgspec.Struct)
Reply = TypeVar("Reply", bound=msgspec.Struct)


class ChannelPort(Generic[Message, Reply]):
    """adaptivespec.worker.Port over a channel: silence of `timeout_s`, a dead peer and a foreign
    frame all raise `lost`."""

    remote = True

    def __init__(
        self, channel: Channel[Message, Reply], timeout_s: float, lost: type[Exception]
    ) -> None:
        self._channel = channel
        self._timeout_s = timeout_s
        self._lost = lost

    def post(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            raise self._lost(str(error)) from error

    def reply(self) -> Reply:
        try:
            return self._channel.recv(self._timeout_s)
        except TimeoutError as error:
            raise self._lost(f"no answer within {self._timeout_s} s") from error
        except (ChannelClosed, ProtocolError) as error:
            raise self._lost(str(error)) from error

    def close(self) -> None:
        self._channel.close()


def open_port(
    address: Address, reply_type: Any, timeout_s: float, lost: type[Exception]
) -> ChannelPort[Any, Any]:
    """Connect to a worker's listener; whatever fails raises `lost`."""
    try:
        channel = connect(address, PROTOCOL_VERSION, reply_type, timeout_s)
    except (ChannelClosed, ProtocolError, TimeoutError) as error:
        raise lost(f"cannot connect to {address.host}:{address.port}: {error}") from error
    return ChannelPort(channel, timeout_s, lost)
