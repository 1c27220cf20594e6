"""The actor that owns an SGLang engine. Requests reach it from the orchestrator, over Ray; the
scheduler, a process below it, speaks with the drafter itself."""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
import ray

from adaptivespec.config import Settings
from adaptivespec.limits import Limits
from adaptivespec.request import Delta, GenerationRequest
from adaptivespec.sglang.messages import State
from adaptivespec.sglang.target import SGLangTarget
from adaptivespec.tokenizer import load_tokenizer
from deployments.actors import own_host
from transport.channel import Address
from transport.link import LinkAddress

_UNBOUNDED = 100_000
"""Calls at once: how many requests may wait is the target's to say, and to refuse."""


class SGLangInfo(msgspec.Struct, frozen=True):
    """What a started engine says of itself."""

    pid: int
    limits: Limits


class SGLangState(msgspec.Struct, frozen=True):
    """What the engine is doing, as its owner and its scheduler see it."""

    running: int
    queued: int
    scheduler: State


@ray.remote(max_concurrency=_UNBOUNDED, max_restarts=0)
class SGLangActor:
    """An `SGLangTarget` in a process of its own. It ends when one of SGLang's processes does, and
    these end with it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def load(self) -> SGLangInfo:
        """Start the engine. Raises ConfigError.

        It is started on the thread of the event loop, though that blocks it, for there is nothing
        else to do yet: Linux ends SGLang's processes with the thread that started them.
        """
        settings = self._settings
        tokenizer = load_tokenizer(settings.model.path)
        self._target = SGLangTarget(settings, tokenizer, own_host(settings))
        return SGLangInfo(os.getpid(), self._target.limits)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Yield what each step adds; cancelling the call aborts the request. Raises RequestError,
        Overloaded or TargetLost."""
        async with aclosing(self._target.generate(request)) as deltas:
            async for delta in deltas:
                yield delta

    async def state(self) -> SGLangState:
        """Asks the scheduler. Raises TargetLost."""
        scheduler = await asyncio.to_thread(self._target.state)
        return SGLangState(self._target.running, self._target.waiting, scheduler)

    async def open_link(self, generation: int) -> LinkAddress:
        """Wait for the drafter of this generation, and for no earlier one any longer."""
        return await asyncio.to_thread(self._target.open_link, generation)

    async def join_link(self, generation: int, drafter: Address) -> None:
        """Meet the drafter, who takes messages at `drafter`; the next step uses it. Raises
        LinkDown."""
        await asyncio.to_thread(self._target.join_link, generation, drafter)
