"""What the orchestrator needs of an engine: a target, and the drafter that may be with it."""

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from adaptivespec.config import Settings
from adaptivespec.limits import Limits
from adaptivespec.request import Delta, GenerationRequest
from deployments.status import Load


class Engine(Protocol):
    """Runs requests on a target that it starts, and starts again, when it is told to.

    It says when it has lost either side, once each, by callbacks on the event loop. With a target
    that is lost, its requests have ended with TargetLost, and its drafter counts as lost too.
    """

    @property
    def alive(self) -> bool:
        """Whether its own thread or task still runs, as it always should."""
        ...

    async def start_target(self) -> Limits:
        """Start the target anew; what it can hold. Raises ConfigError for what a restart cannot
        cure, TargetLost otherwise."""
        ...

    async def attach_drafter(self) -> None:
        """Give the target a drafter, a new one unless the present one still answers. Raises
        ConfigError for what a restart cannot cure, DrafterLost, LinkDown or TargetLost."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield what each step adds to the request; closing early frees its slot and cache. Raises
        RequestError, Overloaded, TargetLost."""
        ...

    async def load(self) -> Load:
        """What is going on, by the word of both sides just now. Raises TargetLost."""
        ...


def make_engine(
    settings: Settings,
    env: dict[str, str],
    on_target_lost: Callable[[], None],
    on_drafter_lost: Callable[[], None],
) -> Engine:
    """The engine that the settings name; `env` is for the processes that it starts."""
    if settings.engine == "sglang":
        from deployments.sglang_engine import SGLangEngine

        return SGLangEngine(settings, env, on_target_lost, on_drafter_lost)
    from deployments.embedded_engine import EmbeddedEngine

    return EmbeddedEngine(settings, env, on_target_lost, on_drafter_lost)
