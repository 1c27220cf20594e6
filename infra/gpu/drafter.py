"""A drafter in a process of its own, for checks: what a draft actor is, without Ray.

`DrafterProcess` is the checks' end of it, and `python infra/gpu/drafter.py JSON` the program that
it starts. The process sees one GPU, as an actor does.
"""

import os
import subprocess
import sys
from threading import Thread
from typing import Self

import msgspec
import torch

from adaptivespec.config import Settings
from adaptivespec.sglang.target import SGLangTarget
from transport.channel import Address, ChannelClosed, Listener, connect
from transport.link import LinkAddress, LinkLayout, connect_link

_VERSION = 1
_PATIENCE_S = 120.0


class Ready(msgspec.Struct, tag=True):
    """The drafter is loaded, and takes messages at `address`."""

    address: Address


class Join(msgspec.Struct, tag=True):
    """Meet the target."""

    link: LinkAddress


class Given(msgspec.Struct):
    """What the program is given on its command line."""

    settings: Settings
    owner: Address


class DrafterProcess:
    """`with DrafterProcess(settings, gpu) as drafter:` a loaded drafter on that GPU, or on what the
    settings say when None; `join` links it to a target."""

    def __init__(self, settings: Settings, gpu: str | None) -> None:
        listener = Listener("127.0.0.1", _VERSION)
        given = msgspec.json.encode(Given(settings, listener.address)).decode()
        env = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu is not None else {})
        self._process = subprocess.Popen([sys.executable, __file__, given], env=env)
        self._channel = listener.accept(Ready, _PATIENCE_S)
        listener.close()
        self._ready: Ready = self._channel.recv(_PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def join(self, target: SGLangTarget) -> None:
        """Link it to a target, which uses it from its next step on. Raises LinkDown."""
        link = target.open_link(1)
        meeting = Thread(target=self._channel.send, args=(Join(link),))
        meeting.start()
        target.join_link(1, self._ready.address)
        meeting.join()


def main() -> None:
    from adaptivespec.drafters.build import make_drafter
    from adaptivespec.worker import DraftWorker
    from transport.frames import TO_DRAFT
    from transport.server import serve

    given = msgspec.json.decode(sys.argv[1], type=Given)
    settings = given.settings
    assert settings.drafter is not None
    compute = settings.drafter.compute
    torch.set_num_threads(compute.threads)
    device = torch.device(compute.device)
    drafter = make_drafter(settings, device)
    worker = DraftWorker(drafter)
    worker.warm_up()
    address = serve(worker, "127.0.0.1", TO_DRAFT, "draft")
    layout = LinkLayout.of(settings, drafter.state_size)
    with connect(given.owner, _VERSION, Join, _PATIENCE_S) as channel:
        channel.send(Ready(address))
        try:
            link = channel.recv().link
            limits = settings.link_timeout_s, settings.link_setup_timeout_s
            worker.offer_link(link.generation, connect_link(link, layout, device, *limits))
            channel.recv()  # until the checks are done
        except ChannelClosed:
            os._exit(0)  # an interpreter that finalises ends its threads where they are


if __name__ == "__main__":
    main()
