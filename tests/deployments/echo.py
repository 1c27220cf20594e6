"""A real Backend without a model: it says the prompt's tokens again."""

import asyncio
import itertools
from collections.abc import AsyncGenerator

import msgspec

from adaptivespec.config import UNGUARDED
from adaptivespec.request import Delta, GenerationRequest, Origin, StepSeconds, Usage
from adaptivespec.shape import Shape
from adaptivespec.tokenizer import Tokenizer
from deployments.status import Status

STEP_SECONDS = StepSeconds(draft=0.25, transfer=0.5, verify=2.0, other=0.125)
STATUS = Status(
    model="echo",
    context_length=512,
    vocab_size=49152,
    max_running=2,
    kv_tokens=2048,
    drafter_kind="none",
    policy="static",
    kappa=0.2,
    guards=UNGUARDED,
    max_shape=Shape(8, 16, 64),
    target="ready",
    drafter="none",
)


class Echo:
    """Two tokens a step, one of them drafted. `requests` are those it has seen; an error in
    `failures` is raised at the step of that number (0: before the first delta); the step in `held`
    waits until `release` is set; a `silent` one holds every text back; `closed` is set once a
    generator has ended, however it did; `unreachable` is raised instead of a status."""

    def __init__(self, tokenizer: Tokenizer, status: Status = STATUS) -> None:
        self.tokenizer = tokenizer
        self.current = status
        self.requests: list[GenerationRequest] = []
        self.failures: dict[int, Exception] = {}
        self.unreachable: Exception | None = None
        self.silent = False
        self.held: int | None = None
        self.release = asyncio.Event()
        self.waiting = asyncio.Event()
        self.closed = asyncio.Event()

    async def status(self) -> Status:
        if self.unreachable:
            raise self.unreachable
        return self.current

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.closed.clear()
        try:
            tokens = itertools.cycle(request.prompt)
            for step in range((request.max_tokens + 1) // 2):
                if step in self.failures:
                    raise self.failures[step]
                if step == self.held:
                    self.waiting.set()
                    await self.release.wait()
                await asyncio.sleep(0)  # a model's step lets others run
                left = request.max_tokens - 2 * step
                yield self._delta(request, list(itertools.islice(tokens, min(left, 2))), left)
        finally:
            self.closed.set()

    def _delta(self, request: GenerationRequest, tokens: list[int], left: int) -> Delta:
        last = left <= 2
        steps = (request.max_tokens + 1) // 2
        usage = Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=request.max_tokens,
            steps=steps,
            drafted_tokens=3 * steps,
            accepted_tokens=request.max_tokens - steps,
            promoted_tokens=0,
            accepted_per_position=[request.max_tokens - steps],
            step_seconds=STEP_SECONDS,
        )
        return Delta(
            tokens=tokens,
            origins=[Origin.DRAFTED, Origin.TARGET][-len(tokens) :],
            pieces=["" if self.silent else self.tokenizer.decode([token]) for token in tokens],
            finish_reason="length" if last else None,
            usage=usage if last else None,
        )


def with_status(**changes: object) -> Status:
    return msgspec.structs.replace(STATUS, **changes)
