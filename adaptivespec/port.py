"""The controller's end of its conversation with the target or the drafter."""

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from adaptivespec.messages import DraftMessage, DraftReply, TargetMessage, TargetReply

Message = TypeVar("Message", contravariant=True)
Reply = TypeVar("Reply", covariant=True)


class Port(Protocol[Message, Reply]):
    """The controller's end of the conversation with one side. Answers come in order.

    remote: the other end is another process, to which messages and tensors travel
    """

    @property
    def remote(self) -> bool: ...

    def post(self, message: Message) -> None:
        """Hand over a message without waiting. Raises TargetLost or DrafterLost."""

    def reply(self) -> Reply:
        """Wait for the next answer, for a bounded time. Raises TargetLost or DrafterLost."""

    def close(self) -> None:
        """Hang up; idempotent."""


class Local(Generic[Message, Reply]):
    """A port to a worker in this very thread: a posted message is handled at once."""

    remote = False

    def __init__(self, handle: Callable[[Message], Reply | None]) -> None:
        self._handle = handle
        self._replies: deque[Reply] = deque()

    def post(self, message: Message) -> None:
        reply = self._handle(message)
        if reply is not None:
            self._replies.append(reply)

    def reply(self) -> Reply:
        return self._replies.popleft()

    def close(self) -> None:
        self._replies.clear()


TargetPort = Port[TargetMessage, TargetReply]
DraftPort = Port[DraftMessage, DraftReply]
