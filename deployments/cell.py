"""One cell: a target actor, a draft actor and the link between them, started and restarted."""

import asyncio
import logging
import os
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import ray
from ray.actor import ActorClass, ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from adaptivespec.config import Compute, Settings
from adaptivespec.cost import DraftCosts
from adaptivespec.errors import AdaptiveSpecError, DrafterLost, TargetLost
from deployments.actors import DraftActor, DraftInfo
from transport.channel import Address

log = logging.getLogger(__name__)

ORCHESTRATOR_BUNDLE, TARGET_BUNDLE, DRAFT_BUNDLE = range(3)

_CALL_S = 15.0  # a set-up call that loads nothing, beyond what it may wait for by its settings
_ALIVE_S = 1.0  # a drafter that cannot say so sooner is started anew


class Loaded(Protocol):
    """What the `load` of every target actor returns."""

    @property
    def pid(self) -> int: ...


Info = TypeVar("Info", bound=Loaded)


@dataclass(frozen=True)
class Linked:
    """A drafter that is joined to the target: where it takes messages, the generation of the link,
    and what drafting was measured to cost."""

    drafter: Address
    generation: int
    needs_states: bool
    costs: DraftCosts | None


class Cell(Generic[Info]):
    """Starts the actors in their bundles of this replica's placement group, which Serve created
    with the replica and removes with it. An actor that is found dead is started again.

    An actor of `target_class` is made from the settings; `load` makes it ready, and `open_link`
    and `join_link` connect it to the drafter.
    """

    def __init__(self, settings: Settings, env: dict[str, str], target_class: ActorClass) -> None:
        self.target: ActorHandle | None = None
        self._settings = settings
        self._env = env
        self._target_class = target_class
        self._draft: ActorHandle | None = None
        self._generation = 0

    async def start_target(self) -> Info:
        """Start the target anew. Raises ConfigError for what a restart cannot cure, TargetLost
        otherwise."""
        self.kill_target()
        settings = self._settings
        self.target = self._spawn(self._target_class, TARGET_BUNDLE, settings.target.compute)
        info: Info = await call(self.target.load, settings.startup_timeout_s, TargetLost)
        log.info("target ready: process %d", info.pid)
        return info

    def kill_target(self) -> None:
        """End its process, if there is one, and with it whatever calls are under way."""
        _kill(self.target)

    async def link_drafter(self) -> Linked:
        """Join a drafter, a new one unless the present one still answers, to the target by a link
        of a new generation. Raises ConfigError for what a restart cannot cure, DrafterLost
        otherwise."""
        target = self.target
        assert target is not None
        draft, info = await self._live_drafter()
        self._generation += 1
        generation = self._generation
        address = await call(target.open_link, _CALL_S, DrafterLost, generation)
        joining_s = _CALL_S + self._settings.link_setup_timeout_s
        await asyncio.gather(
            call(target.join_link, joining_s, DrafterLost, generation, info.address),
            call(draft.join_link, joining_s, DrafterLost, generation, address),
        )
        log.info("drafter ready: process %d, link generation %d", info.pid, generation)
        return Linked(info.address, generation, info.state_size > 0, info.costs)

    async def drafter_died(self) -> bool:
        """Whether the drafter's process has ended; one that is only slow to answer has not."""
        assert self._draft is not None
        try:
            await asyncio.wait_for(self._draft.load.remote(), _ALIVE_S)
        except RayActorError:
            return True
        except TimeoutError:
            return False
        return False

    async def _live_drafter(self) -> tuple[ActorHandle, DraftInfo]:
        if self._draft is not None:
            try:
                return self._draft, await call(self._draft.load, _ALIVE_S, DrafterLost)
            except DrafterLost as error:
                log.warning("restarting the drafter: %s", error)
                _kill(self._draft)
        drafter = self._settings.drafter
        assert drafter is not None
        self._draft = self._spawn(DraftActor, DRAFT_BUNDLE, drafter.compute)
        startup_s = self._settings.startup_timeout_s
        return self._draft, await call(self._draft.load, startup_s, DrafterLost)

    def _spawn(self, actor: ActorClass, bundle: int, compute: Compute) -> ActorHandle:
        # Ray would say one thread. The other is said again here, for a worker may load torch before
        # this package.
        env = {"OMP_NUM_THREADS": str(compute.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        return actor.options(
            num_cpus=compute.num_cpus,
            num_gpus=compute.num_gpus,
            runtime_env={"env_vars": self._env | env},
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                ray.util.get_current_placement_group(), bundle
            ),
        ).remote(self._settings)


def bundles(settings: Settings) -> list[dict[str, float]]:
    """The placement group's bundles: orchestrator, target and, if there is one, drafter."""
    actors = [settings.target.compute]
    if settings.drafter is not None:
        actors.append(settings.drafter.compute)
    return [
        {"CPU": settings.orchestrator_cpus},
        *({"CPU": c.num_cpus} | ({"GPU": c.num_gpus} if c.num_gpus else {}) for c in actors),
    ]


def tracing_env() -> dict[str, str]:
    """The OTEL_* variables of this process, for the actors that it starts."""
    return {key: value for key, value in os.environ.items() if key.startswith("OTEL_")}


def _kill(actor: ActorHandle | None) -> None:
    if actor is not None:
        ray.kill(actor)


async def call(method: Any, timeout_s: float, lost: type[Exception], *args: Any) -> Any:
    """Await a call of an actor. Its own errors are raised as they are; its death, and silence for
    `timeout_s`, raise `lost`."""
    try:
        return await asyncio.wait_for(method.remote(*args), timeout_s)
    except TimeoutError as error:
        raise lost(f"no answer within {timeout_s} s") from error
    except RayTaskError as error:
        if isinstance(error.cause, AdaptiveSpecError):
            raise error.cause from error
        raise lost(str(error)) from error
    except RayError as error:
        raise lost(str(error)) from error
