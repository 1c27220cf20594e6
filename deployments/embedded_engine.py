"""The embedded engine: a controller in this process, stepped by a thread of its own, speaking with
both actors over sockets."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable

from adaptivespec.config import Settings
from adaptivespec.controller import Controller
from adaptivespec.errors import DrafterLost, TargetLost
from adaptivespec.limits import Limits
from adaptivespec.policy import make_policy
from adaptivespec.port import DraftPort, TargetPort
from adaptivespec.rehearsal import rehearse
from adaptivespec.request import NOTHING_USED, Delta, GenerationRequest
from adaptivespec.tokenizer import load_tokenizer
from deployments.actors import TargetActor, TargetInfo
from deployments.cell import Cell
from deployments.status import Counters, Load
from deployments.step_loop import StepLoop
from transport.frames import FROM_DRAFT, FROM_TARGET
from transport.port import open_port


class EmbeddedEngine:
    """An `Engine` whose every step is this project's own code."""

    def __init__(
        self,
        settings: Settings,
        env: dict[str, str],
        on_target_lost: Callable[[], None],
        on_drafter_lost: Callable[[], None],
    ) -> None:
        # The step loop shares the interpreter with Serve's event loop, whose work on each delta
        # would otherwise hold up the next step by up to 5 ms.
        sys.setswitchinterval(2e-4)
        self._settings = settings
        self._tokenizer = load_tokenizer(settings.model.path)
        self._policy = make_policy(settings.policy)
        self._cell: Cell[TargetInfo] = Cell(settings, env, TargetActor)
        self._events = asyncio.get_running_loop()
        self._on_target_lost = on_target_lost
        self._on_drafter_lost = on_drafter_lost
        self._loop = StepLoop(self._lose_target)
        self._past = NOTHING_USED  # by targets that are gone

    @property
    def alive(self) -> bool:
        return self._loop.alive

    async def start_target(self) -> Limits:
        info, _ = await asyncio.gather(
            self._cell.start_target(),
            asyncio.to_thread(rehearse, make_policy(self._settings.policy)),
        )
        self._policy.profiled(info.costs, None)
        timeout_s = self._settings.target_timeout_s
        port: TargetPort = await asyncio.to_thread(
            open_port, info.address, FROM_TARGET, timeout_s, TargetLost
        )
        controller = Controller(
            port,
            info.limits,
            self._tokenizer,
            self._policy,
            self._settings,
            self._lose_drafter,
        )
        await self._loop.adopt(controller)
        return info.limits

    async def attach_drafter(self) -> None:
        linked = await self._cell.link_drafter()
        self._policy.profiled(None, linked.costs)
        timeout_s = self._settings.link_timeout_s
        port: DraftPort = await asyncio.to_thread(
            open_port, linked.drafter, FROM_DRAFT, timeout_s, DrafterLost
        )
        await self._loop.ask(
            lambda controller: controller.attach(port, linked.generation, linked.needs_states)
        )

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        return self._loop.generate(request)

    async def load(self) -> Load:
        return await self._loop.ask(self._load)

    def _load(self, controller: Controller) -> Load:
        target, drafter = controller.ping()
        totals, overhead = self._past + controller.totals, controller.overhead_s()
        return Load(
            running=controller.running,
            queued=controller.waiting,
            kv_tokens_used=controller.kv_used,
            target_requests=target.requests,
            target_kv_tokens=target.cache_tokens,
            drafter_requests=drafter.requests if drafter else 0,
            counters=Counters(
                steps=totals.steps,
                drafted_tokens=totals.drafted_tokens,
                accepted_tokens=totals.accepted_tokens,
                promoted_tokens=totals.promoted_tokens,
            ),
            step_overhead_ms=overhead and overhead * 1e3,
        )

    # -- called on the step loop's thread ---------------------------------------------------------

    def _lose_target(self, controller: Controller) -> None:
        self._past += controller.totals
        self._events.call_soon_threadsafe(self._on_target_lost)

    def _lose_drafter(self, reason: str) -> None:
        self._events.call_soon_threadsafe(self._on_drafter_lost)
