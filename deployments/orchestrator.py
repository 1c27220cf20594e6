"""The orchestrator deployment: one engine, and the care for both of its sides."""

import asyncio
import logging

import msgspec

from adaptivespec import tracing
from adaptivespec.config import Settings
from adaptivespec.errors import AdaptiveSpecError, DrafterLost, LinkDown, TargetLost
from adaptivespec.limits import Limits
from adaptivespec.request import GenerationRequest
from deployments.delivery import Recipient, Sender
from deployments.engine import make_engine
from deployments.status import DrafterState, Load, Status, TargetState

log = logging.getLogger(__name__)

_RETRY_S, _MAX_RETRY_S = 0.5, 10.0  # between attempts to bring a lost actor back, doubling
_ANSWER_S = 3.0  # a target that answers no ping for so long is not healthy


class Orchestrator:
    """Serves one cell. A task of its own keeps the cell whole: a lost target ends its requests and
    is started again; a lost drafter is replaced while decoding goes on."""

    async def __init__(self, settings: Settings, env: dict[str, str]) -> None:  # type: ignore[misc]
        """Start everything once. Raises ConfigError where that can never succeed."""
        tracing.configure("adaptivespec-orchestrator")
        self._settings = settings
        self._changed = asyncio.Event()
        self._answers = Sender()
        self._engine = make_engine(settings, env, self._lose_target, self._lose_drafter)
        self._limits: Limits | None = None
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

    async def generate(self, request: GenerationRequest, to: Recipient) -> None:
        """Send what each step adds to the request. Being cancelled frees its slot and cache.
        Raises RequestError, Overloaded, TargetLost."""
        await self._answers.send(self._engine.generate(request), to)

    async def status(self) -> Status:
        """State, load and limits. Asks the target, so that "ready" means it answered just now."""
        settings, limits = self._settings, self._limits
        target, load = self._target, Load()
        if target == "ready":
            try:
                load = await asyncio.wait_for(self._engine.load(), _ANSWER_S)
            except (TargetLost, TimeoutError) as error:
                log.warning("the target does not answer: %s", error)
                target = "lost"
        return Status(
            model=settings.model.name,
            context_length=limits.longest if limits else 0,
            vocab_size=limits.vocab_size if limits else 0,
            max_running=settings.target.max_running,
            kv_tokens=limits.kv_tokens if limits else 0,
            drafter_kind=settings.drafter_kind,
            policy=settings.policy_kind,
            kappa=settings.kappa,
            guards=settings.guards,
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
        if not self._engine.alive or self._keeper.done():
            raise RuntimeError("the orchestrator's own tasks have ended; its log says why")

    # -- keeping the cell whole -------------------------------------------------------------------

    async def _start_target(self) -> None:
        """Raises ConfigError or TargetLost; the target then counts as lost."""
        self._target = "starting"
        try:
            self._limits = await self._engine.start_target()
        except AdaptiveSpecError:
            self._target = "lost"
            raise
        if self._target == "starting":  # and not lost again already
            self._target = "ready"

    async def _attach_drafter(self) -> None:
        """Raises DrafterLost, LinkDown or TargetLost; the drafter then counts as lost."""
        self._drafter = "starting"
        try:
            await self._engine.attach_drafter()
        except AdaptiveSpecError:
            self._drafter = "lost"
            raise
        if self._drafter == "starting":  # and not lost again already
            self._drafter = "ready"

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

    def _lose_target(self) -> None:
        self._target = "lost"
        self._lose_drafter()

    def _lose_drafter(self) -> None:
        if self._settings.drafter:
            self._drafter = "lost"
        self._changed.set()
