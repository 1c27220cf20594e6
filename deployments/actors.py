"""The draft and target actors: a worker behind a socket, in a process and on a device of its
own."""

import atexit
import logging
import os

import msgspec
import ray
import torch

from adaptivespec import tracing
from adaptivespec.config import Compute, Settings
from adaptivespec.cost import DraftCosts, VerifyCosts
from adaptivespec.drafters.build import make_drafter
from adaptivespec.engine.build import make_target
from adaptivespec.limits import Limits
from adaptivespec.startup import draft_costs, verify_costs
from adaptivespec.worker import DraftWorker, TargetWorker
from transport.channel import Address
from transport.frames import TO_DRAFT, TO_TARGET
from transport.link import LinkAddress, LinkEndpoint, LinkLayout, connect_link, open_link
from transport.server import serve

log = logging.getLogger(__name__)


class TargetInfo(msgspec.Struct, frozen=True):
    """What a loaded target says of itself."""

    address: Address
    pid: int
    limits: Limits
    costs: VerifyCosts | None


class DraftInfo(msgspec.Struct, frozen=True):
    """What a loaded drafter says of itself."""

    address: Address
    pid: int
    state_size: int
    costs: DraftCosts | None


def own_host(settings: Settings) -> str:
    """Where an actor listens for the other one."""
    return "127.0.0.1" if settings.on_one_node else ray.util.get_node_ip_address()


class _Actor:
    """A worker whose messages come over a channel on a thread of its own, one peer at a time; Ray
    carries only the set-up."""

    def __init__(self, settings: Settings, compute: Compute, role: str) -> None:
        self._settings = settings
        self._role = role
        self._host = own_host(settings)
        self._device = torch.device(compute.device)
        torch.set_num_threads(compute.threads)
        # An interpreter that finalises ends its threads where they are, and torch aborts the
        # process for that. Registered first, this comes last: spans are exported before.
        atexit.register(os._exit, 0)
        tracing.configure(f"adaptivespec-{role}")


@ray.remote(max_concurrency=2, max_restarts=0)
class TargetActor(_Actor):
    """Owns the engine, and the target's end of the link."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings, settings.target.compute, "target")

    def load(self) -> TargetInfo:
        """Load the model and start to serve. Raises ConfigError."""
        settings = self._settings
        engine = make_target(settings, self._device)
        self._worker = TargetWorker(engine)
        self._worker.warm_up()
        self._link_layout = LinkLayout.of(settings, engine.state_size)
        self._endpoints: dict[int, LinkEndpoint] = {}
        return TargetInfo(
            address=serve(self._worker, self._host, TO_TARGET, self._role),
            pid=os.getpid(),
            limits=Limits.of(settings, engine.config),
            costs=verify_costs(settings, engine),
        )

    def open_link(self, generation: int) -> LinkAddress:
        """Wait for the drafter of this generation, and for no earlier one any longer."""
        for endpoint in self._endpoints.values():
            endpoint.close()
        endpoint = open_link(self._host, generation, self._link_layout, self._device)
        self._endpoints = {generation: endpoint}
        return endpoint.address

    def join_link(self, generation: int, _drafter: Address) -> None:
        """Meet the drafter; the worker takes the link at the next UseLink. Messages to the drafter
        are the controller's. Raises LinkDown."""
        settings = self._settings
        link = self._endpoints.pop(generation).accept(
            settings.link_timeout_s, settings.link_setup_timeout_s
        )
        self._worker.offer_link(generation, link)


@ray.remote(max_concurrency=2, max_restarts=0)
class DraftActor(_Actor):
    """Owns the drafter, and its end of the link."""

    def __init__(self, settings: Settings) -> None:
        assert settings.drafter is not None
        super().__init__(settings, settings.drafter.compute, "draft")
        self._info: DraftInfo | None = None

    def load(self) -> DraftInfo:
        """Load the drafter and start to serve; once loaded, say so again. Raises ConfigError."""
        if self._info is None:
            drafter = make_drafter(self._settings, self._device)
            self._worker = DraftWorker(drafter)
            self._worker.warm_up()
            self._info = DraftInfo(
                address=serve(self._worker, self._host, TO_DRAFT, self._role),
                pid=os.getpid(),
                state_size=drafter.state_size,
                costs=draft_costs(self._settings, drafter),
            )
        return self._info

    def join_link(self, generation: int, address: LinkAddress) -> None:
        """Meet the target; the worker takes the link at the next UseLink. Raises LinkDown."""
        assert self._info is not None
        settings = self._settings
        link = connect_link(
            address,
            LinkLayout.of(settings, self._info.state_size),
            self._device,
            settings.link_timeout_s,
            settings.link_setup_timeout_s,
        )
        self._worker.offer_link(generation, link)
