"""SGLang as the engine: it schedules by itself, below its actor; here, requests are passed on to it
and its state is watched."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from adaptivespec.config import Settings
from adaptivespec.errors import AdaptiveSpecError, TargetLost
from adaptivespec.limits import Limits
from adaptivespec.request import Delta, GenerationRequest
from adaptivespec.sglang.messages import State
from deployments.cell import Cell, call
from deployments.sglang_actor import SGLangActor, SGLangInfo, SGLangState
from deployments.status import Counters, Load

log = logging.getLogger(__name__)

_WATCH_S = 0.5  # how soon a death is noticed


class SGLangEngine:
    """An `Engine` whose steps run inside SGLang's scheduler, policy and margin rule included."""

    def __init__(
        self,
        settings: Settings,
        env: dict[str, str],
        on_target_lost: Callable[[], None],
        on_drafter_lost: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._cell: Cell[SGLangInfo] = Cell(settings, env, SGLangActor)
        self._on_target_lost = on_target_lost
        self._on_drafter_lost = on_drafter_lost
        self._target: ActorHandle | None = None  # while it is ready
        self._link: int | None = None  # generation of the one in use
        self._past, self._present = Counters(), Counters()
        self._watcher = asyncio.create_task(self._watch())

    @property
    def alive(self) -> bool:
        return not self._watcher.done()

    async def start_target(self) -> Limits:
        info = await self._cell.start_target()
        self._target = self._cell.target
        return info.limits

    async def attach_drafter(self) -> None:
        self._link = None
        self._link = (await self._cell.link_drafter()).generation

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        target = self._require()
        stream = target.generate.options(num_returns="streaming").remote(request)
        ended = False
        try:
            async for delta in stream:
                yield await delta
            ended = True
        except RayTaskError as error:
            if isinstance(error.cause, AdaptiveSpecError):
                raise error.cause from None
            raise
        except RayActorError as error:
            self._lose_target(target, str(error))
            raise TargetLost("the target was lost and is being started again") from error
        finally:
            if not ended:
                ray.cancel(stream)

    async def load(self) -> Load:
        state = await self._ask(self._require())
        scheduler = state.scheduler
        overhead = scheduler.step_overhead_s
        return Load(
            running=state.running,
            queued=state.queued,
            kv_tokens_used=scheduler.kv_tokens_used,
            target_requests=scheduler.requests,
            target_kv_tokens=scheduler.kv_tokens_used,
            drafter_requests=scheduler.drafter_requests,
            counters=self._past + self._present,
            step_overhead_ms=overhead and overhead * 1e3,
        )

    def _require(self) -> ActorHandle:
        if self._target is None:
            raise TargetLost("the target is not ready; it is being started")
        return self._target

    async def _ask(self, target: ActorHandle) -> SGLangState:
        state: SGLangState = await call(target.state, self._settings.target_timeout_s, TargetLost)
        if target is self._target:
            self._present = _counters(state.scheduler)
        return state

    # -- watching ---------------------------------------------------------------------------------

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_WATCH_S)
            if (target := self._target) is not None:
                await self._look_after(target)

    async def _look_after(self, target: ActorHandle) -> None:
        link, timeout_s = self._link, self._settings.target_timeout_s
        try:
            state = (await self._ask(target)).scheduler
        except TargetLost as error:
            self._lose_target(target, str(error))
            return
        if state.stalled_s > timeout_s:
            self._lose_target(target, f"no step has ended within {timeout_s} s")
        elif link is not None and state.lost is not None:
            self._lose_drafter(link, state.lost)
        elif link is not None and await self._cell.drafter_died():  # which no step has noticed yet
            self._lose_drafter(link, "its process has ended")

    def _lose_target(self, target: ActorHandle, reason: str) -> None:
        """Its requests end, for their calls do."""
        if target is self._target:
            log.error("target lost: %s", reason)
            self._target = self._link = None
            self._past, self._present = self._past + self._present, Counters()
            self._cell.kill_target()
            self._on_target_lost()

    def _lose_drafter(self, link: int, reason: str) -> None:
        if link == self._link:
            log.warning("drafter lost: %s", reason)
            self._link = None
            self._on_drafter_lost()


def _counters(state: State) -> Counters:
    return Counters(
        steps=state.steps,
        drafted_tokens=state.drafted_tokens,
        accepted_tokens=state.accepted_tokens,
        promoted_tokens=state.promoted_tokens,
    )
