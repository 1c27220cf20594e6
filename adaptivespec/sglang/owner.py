"""The worker's end of the conversation with the owner of its engine."""

import logging
import threading
from collections.abc import Callable

from adaptivespec.errors import AdaptiveSpecError
from adaptivespec.sglang.messages import (
    LINES,
    VERSION,
    Ask,
    FromWorker,
    Hello,
    Joined,
    JoinLink,
    LinkOpened,
    OpenLink,
    Refused,
    State,
    ToWorker,
)
from adaptivespec.sglang.remote import RemoteDrafter
from transport.channel import Address, ChannelClosed, connect
from transport.server import converse

log = logging.getLogger(__name__)


def answer_owner(
    owner: Address,
    timeout: float,
    hello: Hello,
    remote: RemoteDrafter,
    state: Callable[[], State],
) -> None:
    """Introduce the worker to its owner, who listens within `timeout` seconds, once the engine has
    started, and answer as long as that lives, on threads of their own: over several lines, so that
    nothing waits for a drafter but the one who sets its link up."""

    def handle(message: ToWorker) -> FromWorker:
        try:
            match message:
                case OpenLink():
                    return LinkOpened(remote.open_link(message.generation))
                case JoinLink():
                    remote.join_link(message)
                    return Joined()
                case Ask():
                    return state()
        except AdaptiveSpecError as error:
            return Refused(str(error))

    def run() -> None:
        try:
            with connect(owner, VERSION, ToWorker, timeout) as channel:
                channel.send(hello)
                converse(channel, handle)
        except (ChannelClosed, TimeoutError) as error:
            log.warning("the owner of this engine has gone: %s", error)

    for _ in range(LINES):
        threading.Thread(target=run, name="adaptivespec-owner", daemon=True).start()
