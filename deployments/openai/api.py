"""The HTTP application: OpenAI's endpoints, health and version, over any Backend."""

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

import adaptivespec
from adaptivespec.errors import Overloaded, RequestError, TargetLost
from adaptivespec.request import GenerationRequest
from adaptivespec.tokenizer import Tokenizer
from deployments.backend import Backend
from deployments.openai import conversion, openapi
from deployments.openai.answer import Answer
from deployments.openai.body import read_body
from deployments.openai.errors import ApiError, error_response
from deployments.openai.parsing import parse_chat, parse_completion
from deployments.openai.requests import ChatBody, CompletionBody
from deployments.openai.responses import ChatDialect, Dialect, Replies, TextDialect
from deployments.status import Status

MAX_BODY_BYTES = 4 * 2**20
STATUS_TIMEOUT_S = 5.0

Body = TypeVar("Body", ChatBody, CompletionBody)


class Api:
    """The endpoints. Stateless but for the limits, which never change once the target is ready."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, max_body_bytes: int) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())
        self._limits: Status | None = None

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._generate(request, parse_chat, conversion.chat_prompt, ChatDialect())

    async def completions(self, request: Request) -> Response:
        """Go on from a text, or from token ids."""
        return await self._generate(
            request, parse_completion, conversion.completion_prompt, TextDialect()
        )

    async def models(self) -> Response:
        """The one model that is served."""
        limits = await self._ready_limits()
        return _json({"object": "list", "data": [self._model(limits)]})

    async def model(self, model: str) -> Response:
        """The model of this id, or 404."""
        limits = await self._ready_limits()
        conversion.check_model(model, limits)
        return _json(self._model(limits))

    async def health(self) -> Response:
        """200 while the target answers, else 503; the orchestrator's status as the body."""
        status = await self._status()
        ready = status.target == "ready"
        return _json(status, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def version(self) -> Response:
        """The version of the server."""
        return _json({"version": adaptivespec.__version__})

    async def _generate(
        self,
        request: Request,
        parse: Callable[[bytes], Body],
        tokenise: Callable[[Body, Tokenizer, Status], list[int]],
        dialect: Dialect,
    ) -> Response:
        body = parse(await read_body(request, self._max_body_bytes))
        limits = await self._ready_limits()
        conversion.check_model(body.model, limits)

        async def prepare(traceparent: str | None) -> GenerationRequest:
            # In a thread: a megabyte of text takes a second, in which other streams must go on.
            prompt = await asyncio.to_thread(tokenise, body, self._tokenizer, limits)
            return conversion.generation_request(body, prompt, limits, traceparent)

        return Answer(
            self._backend,
            prepare,
            Replies(dialect, limits.model),
            streaming=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )

    async def _status(self) -> Status:
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await self._backend.status()
        except TimeoutError as error:
            message = f"the orchestrator has not answered for {STATUS_TIMEOUT_S} s"
            raise TargetLost(message) from error

    async def _ready_limits(self) -> Status:
        if self._limits is None:
            status = await self._status()
            if status.context_length == 0:
                raise TargetLost("the target engine is starting")
            self._limits = status
        return self._limits

    def _model(self, limits: Status) -> dict[str, Any]:
        return {
            "id": limits.model,
            "object": "model",
            "created": self._created,
            "owned_by": "adaptivespec",
            "max_model_len": limits.context_length,  # vLLM's extension
        }


def create_app(
    backend: Backend, tokenizer: Tokenizer, *, max_body_bytes: int = MAX_BODY_BYTES
) -> FastAPI:
    """The application that serves `backend`'s model. Larger bodies are refused with 413."""
    api = Api(backend, tokenizer, max_body_bytes)
    app = openapi.DocumentedApp(title="AdaptiveSpec", version=adaptivespec.__version__)
    chat = openapi.request_body(ChatBody)
    completion = openapi.request_body(CompletionBody)
    app.post("/v1/chat/completions", openapi_extra=chat)(api.chat_completions)
    app.post("/v1/completions", openapi_extra=completion)(api.completions)
    app.get("/v1/models")(api.models)
    app.get("/v1/models/{model:path}")(api.model)
    app.get("/health")(api.health)
    app.get("/version")(api.version)
    for kind in (ApiError, RequestError, Overloaded, TargetLost, HTTPException, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    return app


def _json(data: Any, status: int = HTTPStatus.OK) -> Response:
    return Response(msgspec.json.encode(data), status, media_type="application/json")


async def _answer_error(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=499)  # nginx's code for a client that left; nobody reads it
