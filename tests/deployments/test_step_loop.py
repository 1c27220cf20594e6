"""The thread that steps the controller: what reaches it from an event loop, what it survives."""

import asyncio
from contextlib import aclosing

import pytest

from adaptivespec.config import load_settings
from adaptivespec.controller import Controller
from adaptivespec.errors import RequestError, TargetLost
from adaptivespec.limits import Limits
from adaptivespec.local import LocalSystem
from adaptivespec.messages import TargetMessage, TargetReply, Verify
from adaptivespec.policy import make_policy
from adaptivespec.port import Local
from adaptivespec.request import Delta, GenerationRequest
from deployments.step_loop import StepLoop
from tests.factories import write_hf_folder

REQUEST = GenerationRequest(prompt=[5, 9, 17], max_tokens=20)
LONG = GenerationRequest(prompt=[5, 9], max_tokens=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_hf_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture
def system(folder: str) -> LocalSystem:
    args = {"model": {"path": folder, "dtype": "float32"}, "target": {"compute": {"threads": 1}}}
    return LocalSystem.load(load_settings(args))


def dying(system: LocalSystem, error: Exception, passes: int) -> Controller:
    """A controller over the same target, which raises `error` after so many passes."""
    left = passes

    def handle(message: TargetMessage) -> TargetReply | None:
        nonlocal left
        left -= isinstance(message, Verify)
        if left < 0:
            raise error
        return system.target.handle(message)

    limits: Limits = system.controller.limits
    policy = make_policy(system.settings.policy)
    return Controller(Local(handle), limits, system.tokenizer, policy)


async def collect(loop: StepLoop, request: GenerationRequest) -> list[int]:
    async with aclosing(loop.generate(request)) as deltas:
        return [token async for delta in deltas for token in delta.tokens]


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def ignore(controller: Controller) -> None:
    """A lost target that nobody replaces."""


def test_requests_of_one_event_loop_run_together(system: LocalSystem) -> None:
    expected = tokens(system.generate([REQUEST])[0])

    async def run() -> list[list[int]]:
        loop = StepLoop(ignore)
        await loop.adopt(system.controller)
        return await asyncio.gather(*(collect(loop, REQUEST) for _ in range(5)))

    assert asyncio.run(run()) == [expected] * 5


def test_what_the_controller_refuses_is_raised(system: LocalSystem) -> None:
    async def run() -> None:
        loop = StepLoop(ignore)
        await loop.adopt(system.controller)
        with pytest.raises(RequestError, match="token ids"):
            await collect(loop, GenerationRequest(prompt=[10**6], max_tokens=5))

    asyncio.run(run())


def test_leaving_early_frees_the_request(system: LocalSystem) -> None:
    async def run() -> tuple[int, int]:
        loop = StepLoop(ignore)
        await loop.adopt(system.controller)
        async with aclosing(loop.generate(LONG)) as deltas:
            await anext(deltas)
        await loop.ask(lambda controller: controller.step())
        target, drafter = await loop.ask(lambda controller: controller.ping())
        assert drafter is not None
        return target.cache_tokens, drafter.requests

    assert asyncio.run(run()) == (0, 0)


def test_a_question_that_is_given_up_does_no_harm(system: LocalSystem) -> None:
    expected = tokens(system.generate([REQUEST])[0])

    async def run() -> list[int]:
        loop = StepLoop(ignore)
        await loop.adopt(system.controller)
        answer = asyncio.create_task(collect(loop, LONG))
        for _ in range(20):
            question = asyncio.create_task(loop.ask(lambda controller: controller.running))
            await asyncio.sleep(0)
            question.cancel()
        await answer
        assert loop.alive
        return await collect(loop, REQUEST)

    assert asyncio.run(run()) == expected


@pytest.mark.parametrize(
    "error", [TargetLost("the peer has closed the channel"), ValueError("a defect")]
)
def test_a_lost_target_ends_its_requests_and_a_new_one_serves(
    system: LocalSystem, error: Exception
) -> None:
    expected = tokens(system.generate([REQUEST])[0])
    lost: list[Controller] = []
    controller = dying(system, error, passes=3)

    async def run() -> list[int]:
        loop = StepLoop(lost.append)
        await loop.adopt(controller)
        with pytest.raises(TargetLost, match=str(error)):
            await collect(loop, LONG)
        with pytest.raises(TargetLost, match="being started"):
            await collect(loop, REQUEST)
        await loop.adopt(system.controller)
        return await collect(loop, REQUEST)

    assert asyncio.run(run()) == expected
    assert lost == [controller]
