"""Arms on a running server: this project's, with the `speculation` extension, or any other that
speaks OpenAI's chat completions."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from adaptivespec.bench import extra
from adaptivespec.bench.arms import Arm
from adaptivespec.bench.records import Answer, Counts, Outcome
from adaptivespec.bench.runner import Options
from adaptivespec.bench.sets import Item
from adaptivespec.config import UNGUARDED
from adaptivespec.errors import AdaptiveSpecError

TIMEOUT_S = 3600.0  # of one answer; a slow machine with a long one is no error


class EndpointError(AdaptiveSpecError):
    """A server cannot be reached, refuses a request, or breaks the protocol."""


class Endpoint:
    """One server and one connection pool. The key is that of OPENAI_API_KEY, if it is set."""

    def __init__(self, url: str) -> None:
        """`url`: up to and including /v1. Asks for the model's name. Raises EndpointError."""
        self._url = url.rstrip("/")
        self._openai = extra.load("openai", "talking to a server")
        self._loop = asyncio.Runner()
        self._client = self._openai.AsyncOpenAI(
            base_url=self._url,
            api_key=os.environ.get("OPENAI_API_KEY", "none"),
            timeout=TIMEOUT_S,
            max_retries=0,  # a retry would be part of the time
        )
        models = self._wait(self._client.models.list()).data
        if not models:
            raise EndpointError(f"{self._url}: serves no model")
        self._model: str = models[0].id

    def identity(self) -> dict[str, Any]:
        return {"url": self._url, "model": self._model}

    def status(self) -> dict[str, Any] | None:
        """What /health says, where there is one that says something."""
        address = self._url.removesuffix("/v1") + "/health"
        try:
            response = self._wait(
                self._client.with_options(timeout=10).get(address, cast_to=object)
            )
        except EndpointError:
            return None
        return response if isinstance(response, dict) else None

    def close(self) -> None:
        self._wait(self._client.close())
        self._loop.close()

    def run(self, arm: Arm, items: Sequence[Item], concurrency: int, options: Options) -> Outcome:
        return self._wait(self._run(arm, items, concurrency, options))

    def _wait(self, coroutine: Any) -> Any:
        async def awaited() -> Any:
            return await coroutine

        try:
            return self._loop.run(awaited())
        except self._openai.OpenAIError as error:
            raise EndpointError(f"{self._url}: {error}") from error

    async def _run(
        self, arm: Arm, items: Sequence[Item], concurrency: int, options: Options
    ) -> Outcome:
        waiting = deque(enumerate(items))
        answers: dict[int, Answer] = {}

        async def slot() -> None:
            while waiting:
                index, item = waiting.popleft()
                answers[index] = await self._answer(arm, item, options)

        started = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as slots:
                for _ in range(concurrency):
                    slots.create_task(slot())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        seconds = time.perf_counter() - started
        return Outcome(seconds, [answers[index] for index in range(len(items))])

    async def _answer(self, arm: Arm, item: Item, options: Options) -> Answer:
        seed = options.seed_of(item)
        begun = time.perf_counter()
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": item.message}],
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            seed=seed,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=_extensions(arm, options),
        )
        pieces: list[str] = []
        times: list[float] = []
        reason, usage = "", None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                if piece := _text(choice.delta):
                    pieces.append(piece)
                    times.append(time.perf_counter())
        ended = time.perf_counter()
        if usage is None:
            raise EndpointError(f"{self._url}: an answer without usage, row {item.row}")
        counts = _counts(usage)
        if counts is None and arm.peer is None:
            raise EndpointError(
                f"{self._url}: no speculation in usage, so it may have ignored what was asked; "
                "name a server of another kind with --peer"
            )
        return Answer(
            row=item.row,
            seed=seed,
            text="".join(pieces),
            finish_reason=reason,
            prompt_tokens=usage.prompt_tokens,
            tokens=usage.completion_tokens,
            seconds=ended - begun,
            first_token_s=(times[0] if times else ended) - begun,
            gaps=[b - a for a, b in pairwise(times)],
            counts=counts,
        )


def _text(delta: Any) -> str:
    """What a chunk adds, what a reasoning model thinks aloud included."""
    return (getattr(delta, "reasoning_content", None) or "") + (delta.content or "")


def _extensions(arm: Arm, options: Options) -> dict[str, Any]:
    body: dict[str, Any] = {"ignore_eos": True} if options.ignore_eos else {}
    if arm.peer is None:
        speculation: dict[str, Any] = {"mode": arm.mode}
        if arm.mode != "off" and options.temperature == 0:
            speculation["kappa"] = arm.kappa
        if arm.shape is not None:
            speculation["shape"] = list(arm.shape)
        if arm.guards not in (None, UNGUARDED):
            speculation |= msgspec.to_builtins(arm.guards)
        body["speculation"] = speculation
    return body


def _counts(usage: Any) -> Counts | None:
    """None of a server that does not report them, or others."""
    try:
        return msgspec.convert((usage.model_extra or {}).get("speculation"), Counts)
    except msgspec.ValidationError:
        return None
