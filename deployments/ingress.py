"""The ingress deployment: the OpenAI API on Ray Serve, in front of an orchestrator."""

import asyncio
from collections.abc import AsyncGenerator

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.handle import DeploymentHandle

from adaptivespec import tracing
from adaptivespec.config import Settings
from adaptivespec.errors import Overloaded, TargetLost
from adaptivespec.request import Delta, GenerationRequest
from adaptivespec.tokenizer import load_tokenizer
from deployments.openai.api import create_app
from deployments.status import Status

GONE = (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError)


class ServeBackend:
    """A Backend behind a Serve handle. Errors come out as what the orchestrator raised, without
    Ray's wrapping; an orchestrator that is gone counts as a lost target."""

    def __init__(self, orchestrator: DeploymentHandle) -> None:
        self._generate = orchestrator.options(method_name="generate", stream=True)
        self._status = orchestrator.options(method_name="status")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        response = self._generate.remote(request)
        try:
            async for delta in response:
                yield delta
        except GeneratorExit:
            response.cancel()
            raise
        except asyncio.CancelledError as error:
            response.cancel()
            if _is_ours():
                raise
            raise TargetLost("the orchestrator gave the request up") from error
        except RayTaskError as error:
            raise error.cause from None
        except BackPressureError as error:
            raise Overloaded(error.message) from error
        except GONE as error:
            raise TargetLost("the orchestrator is gone") from error

    async def status(self) -> Status:
        try:
            status: Status = await self._status.remote()
            return status
        except RayTaskError as error:
            raise error.cause from None
        except GONE as error:
            raise TargetLost("the orchestrator is gone") from error


def _is_ours() -> bool:
    """Whether a CancelledError cancels the current task, rather than telling that Ray cancelled the
    remote one."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


@serve.ingress()
class Ingress:
    """Stateless: any number of replicas. Requests wait, and are refused, in the orchestrator, which
    knows what fits; this deployment only has to let them through."""

    def __init__(self, settings: Settings, orchestrator: DeploymentHandle) -> None:
        tracing.configure("adaptivespec-ingress")
        self._tokenizer = load_tokenizer(settings.model.path)
        self._backend = ServeBackend(orchestrator)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once per replica, after the constructor."""
        return create_app(self._backend, self._tokenizer)

    def __del__(self) -> None:
        """Called by Serve when the replica stops."""
        tracing.shutdown()
