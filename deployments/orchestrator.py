"""The orchestrator deployment: one cell, its step loop, and the care for both."""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from adaptivespec import tracing
from adaptivespec.config import Settings
from adaptivespec.controller import Controller
from adaptivespec.errors import AdaptiveSpecError, DrafterLost, LinkDown, TargetLost
from adaptivespec.policy import make_policy
from adaptivespec.request import NOTHING_USED, Delta, GenerationRequest
from adaptivespec.tokenizer import load_tokenizer
from deployments.actors import TargetInfo
from deployments.cell import Cell
from deployments.status import Counters, DrafterState, Load, Status, TargetState
from deployments.step_loop import StepLoop

log = logging.getLogger(__name__)

_RETRY_S, _MAX_RETRY_S = 0.5, 10.0  # between attempts to bring a lost actor back, doubling
_ANSWER_S = 3.0  # a target that answers no ping for so long is not healthy


class Orchestrator:
    """Serves one cell. A task of its own keeps the cell whole: a lost target ends its requests and
    is started again; a lost drafter is replaced while decoding goes on."""

    async def __init__(self, settings: Settings, env: dict[str, str]) -> None:  # type: ignore[misc]
        """Start everything once. Raises ConfigError where that can never succeed."""
        tracing.configure("adaptivespec-orchestrator")
        # The step loop shares the interpreter with Serve's event loop, whose work on each delta
        # would otherwise hold up the next step by up to 5 ms.
        sys.setswitchinterval(2e-4)
        self._settings = settings
        self._tokenizer = load_tokenizer(settings.model.path)
        self._policy = make_policy(settings.policy)
        self._cell = Cell(settings, env)
        self._events = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._loop = StepLoop(self._on_target_lost)
        self._past = NOTHING_USED  # by targets that are gone
        self._info: TargetInfo | None = None
        self._target: TargetState = "starting"
        self._drafter: DrafterState = "starting" if settings.drafter else "none"
        await self._start_target()
        if settings.drafter:
            try:
                await self._attach_drafter()
            except (DrafterLost, LinkDown) as error:
                log.warning("starting without a drafter: %s", error)
                self._changed.set()
        self._keeper = asyncio.create_task(self._keep_whole())

    # -- for the ingress --------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield what each step adds to the request. Closing early frees its slot and cache.
        Raises RequestError, Overloaded, TargetLost."""
        async with aclosing(self._loop.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def status(self) -> Status:
        """State, load and limits. Asks the target, so that "ready" means it answered just now."""
        settings, info = self._settings, self._info
        target, load = self._target, Load()
        if target == "ready":
            try:
                load = await asyncio.wait_for(self._loop.ask(self._load), _ANSWER_S)
            except (TargetLost, TimeoutError) as error:
                log.warning("the target does not answer: %s", error)
                target = "lost"
        return Status(
            model=settings.model.name,
            context_length=info.limits.longest if info else 0,
            vocab_size=info.limits.vocab_size if info else 0,
            max_running=settings.target.max_running,
            kv_tokens=settings.target.kv_tokens,
            drafter_kind=settings.drafter_kind,
            policy=settings.policy_kind,
            kappa=settings.kappa,
            max_shape=settings.max_shape,
            target=target,
            drafter=self._drafter,
            **msgspec.structs.asdict(load),
        )

    def __del__(self) -> None:
        """Called by Serve when it stops this replica in order."""
        tracing.shutdown()

    async def check_health(self) -> None:
        """For Serve: raises when this replica can no longer heal itself."""
        if not self._loop.alive or self._keeper.done():
            raise RuntimeError("the orchestrator's own tasks have ended; its log says why")

    # -- keeping the cell whole -------------------------------------------------------------------

    async def _start_target(self) -> None:
        """Raises ConfigError or TargetLost; the target then counts as lost."""
        self._target = "starting"
        try:
            port, self._info = await self._cell.start_target()
        except AdaptiveSpecError:
            self._target = "lost"
            raise
        controller = Controller(
            port,
            self._info.limits,
            self._tokenizer,
            self._policy,
            self._settings.max_promotions,
            self._on_drafter_lost,
        )
        self._target = "ready"
        await self._loop.adopt(controller)

    async def _attach_drafter(self) -> None:
        """Raises DrafterLost, LinkDown or TargetLost; the drafter then counts as lost."""
        self._drafter = "starting"
        try:
            linked = await self._cell.link_drafter()
            self._drafter = "ready"
            await self._loop.ask(
                lambda controller: controller.attach(
                    linked.port, linked.generation, linked.needs_states
                )
            )
        except AdaptiveSpecError:
            self._drafter = "lost"
            raise

    async def _keep_whole(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            delay_s = _RETRY_S
            while self._target == "lost" or self._drafter == "lost":
                try:
                    if self._target == "lost":
                        await self._start_target()
                    if self._drafter == "lost":
                        await self._attach_drafter()
                except AdaptiveSpecError as error:
                    log.error("trying again in %s s: %s", delay_s, error)
                    await asyncio.sleep(delay_s)
                    delay_s = min(2 * delay_s, _MAX_RETRY_S)

    def _on_target_lost(self, controller: Controller) -> None:
        def mark() -> None:
            self._past += controller.totals
            self._target = "lost"
            self._lose_drafter()

        self._events.call_soon_threadsafe(mark)

    def _on_drafter_lost(self, reason: str) -> None:
        self._events.call_soon_threadsafe(self._lose_drafter)

    def _lose_drafter(self) -> None:
        if self._settings.drafter:
            self._drafter = "lost"
        self._changed.set()

    def _load(self, controller: Controller) -> Load:
        """What is going on, and what both sides really hold."""
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
