"""A drafter in a process of its own, as the tests' own end of it and as the program that runs it.

It is no child of the tests: when SGLang shuts an engine down, it ends every child of its process.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Self

import msgspec
import torch

from adaptivespec.config import Settings
from adaptivespec.sglang.target import SGLangTarget
from transport.channel import Address, ChannelClosed, Listener, connect
from transport.link import LinkAddress, LinkLayout, connect_link

VERSION = 1
PATIENCE_S = 120.0


class Ready(msgspec.Struct, tag=True):
    """The drafter is loaded, and takes messages at `address`."""

    address: Address
    pid: int


class Join(msgspec.Struct, tag=True):
    """Meet the target."""

    link: LinkAddress


class Given(msgspec.Struct):
    """What the program is given on its command line."""

    settings: Settings
    tests: Address


class DraftProcess:
    """`with DraftProcess(settings) as drafter:` a loaded drafter; `join` links it to a target."""

    def __init__(self, settings: Settings) -> None:
        listener = Listener("127.0.0.1", VERSION)
        given = msgspec.json.encode(Given(settings, listener.address)).decode()
        command = ["setsid", "--fork", sys.executable, "-m", __name__, given]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
        self._channel = listener.accept(Ready, PATIENCE_S)
        listener.close()
        self._ready: Ready = self._channel.recv(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()  # the program ends with it

    def join(self, target: SGLangTarget, generation: int = 1) -> None:
        """Link it to a target, which uses it from its next step on."""
        link = target.open_link(generation)
        meeting = Thread(target=self._channel.send, args=(Join(link),))
        meeting.start()
        target.join_link(generation, self._ready.address)
        meeting.join()

    def kill(self) -> None:
        """End it as a crash would."""
        os.kill(self._ready.pid, signal.SIGKILL)


def main() -> None:
    from adaptivespec.drafters.build import make_drafter
    from adaptivespec.worker import DraftWorker
    from transport.frames import TO_DRAFT
    from transport.server import serve

    torch.set_num_threads(1)
    given = msgspec.json.decode(sys.argv[1], type=Given)
    settings = given.settings
    drafter = make_drafter(settings)
    worker = DraftWorker(drafter)
    worker.warm_up()
    address = serve(worker, "127.0.0.1", TO_DRAFT, "draft")
    layout = LinkLayout.of(settings, drafter.state_size)
    with connect(given.tests, VERSION, Join, PATIENCE_S) as channel:
        channel.send(Ready(address, os.getpid()))
        try:
            while True:
                link = channel.recv().link
                limits = settings.link_timeout_s, settings.link_setup_timeout_s
                joined = connect_link(link, layout, torch.device("cpu"), *limits)
                worker.offer_link(link.generation, joined)
        except ChannelClosed:
            os._exit(0)  # an interpreter that finalises ends its threads where they are


if __name__ == "__main__":
    main()
