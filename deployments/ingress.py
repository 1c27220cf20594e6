"""The ingress deployment: the OpenAI API on Ray Serve, in front of an orchestrator."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from adaptivespec import tracing
from adaptivespec.config import Settings
from adaptivespec.errors import Overloaded, TargetLost
from adaptivespec.request import Delta, GenerationRequest
from adaptivespec.tokenizer import load_tokenizer
from deployments.delivery import Event, Receiver
from deployments.openai.api import create_app
from deployments.status import Status

log = logging.getLogger(__name__)

GONE = (RayActorError, DeploymentUnavailableError, ReplicaUnavailableError)

_LATE_S = 5.0  # what is left of an answer, once the call for it has ended, is on its way


class ServeBackend:
    """A Backend behind a Serve handle. Errors come out as what the orchestrator raised, without
    Ray's wrapping; an orchestrator that is gone counts as a lost target."""

    def __init__(self, orchestrator: DeploymentHandle) -> None:
        self._generate = orchestrator.options(method_name="generate")
        self._status = orchestrator.options(method_name="status")
        self._receiver: Receiver | None = None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        if self._receiver is None:  # before there is an event loop there is none
            self._receiver = Receiver(ray.util.get_node_ip_address())
        with self._receiver.answer() as (recipient, events):
            response = self._generate.remote(request, recipient)
            watch = asyncio.create_task(_watch(response, events))
            try:
                async with aclosing(_until_finished(events)) as deltas:
                    async for delta in deltas:
                        yield delta
            except (GeneratorExit, asyncio.CancelledError):
                response.cancel()
                watch.cancel()
                raise

    async def status(self) -> Status:
        try:
            status: Status = await self._status.remote()
            return status
        except RayTaskError as error:
            raise error.cause from None
        except GONE as error:
            raise TargetLost("the orchestrator is gone") from error


async def _watch(response: DeploymentResponse, events: asyncio.Queue[Event]) -> None:
    """Put what ends a call for an answer behind the answer: an error, or None."""
    outcome: Event = None
    try:
        await response
    except (asyncio.CancelledError, RequestCancelledError):
        if _is_ours():
            return  # whoever would read this has left
        outcome = TargetLost("the orchestrator gave the request up")
    except RayTaskError as error:
        outcome = error.cause
    except BackPressureError as error:
        outcome = Overloaded(error.message)
    except GONE:
        outcome = TargetLost("the orchestrator is gone")
    except Exception as error:
        log.exception("a call for an answer failed")
        outcome = error
    events.put_nowait(outcome)


async def _until_finished(events: asyncio.Queue[Event]) -> AsyncGenerator[Delta, None]:
    """The deltas of an answer. Raises what ended it, and TargetLost if its end does not come."""
    patience_s = None
    while True:
        try:
            async with asyncio.timeout(patience_s):
                event = await events.get()
        except TimeoutError:
            raise TargetLost("the end of the answer was lost on its way") from None
        if event is None:
            patience_s = _LATE_S
        elif isinstance(event, Exception):
            raise event
        else:
            yield event
            if event.finish_reason:
                return


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
