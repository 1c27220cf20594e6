"""At any kappa, every step in SGLang is the embedded engine's: the same tokens, the same trees."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.system import EAGLE3, Output, SGLangSystem, running_system, settings  # isort: skip

from adaptivespec.config import load_settings
from adaptivespec.local import LocalSystem
from adaptivespec.request import Delta, GenerationRequest, Origin
from adaptivespec.shape import Shape
from tests.sglang.prompts import CHATS, PLAIN, requests


@pytest.fixture(scope="module")
def system(smollm2: Path) -> Iterator[SGLangSystem]:
    """Nothing is retracted, and every prompt's states reach the drafter in one step: prompts that
    start with what the radix cache has come faster here than the embedded engine computes them."""
    roomy = {"prefill_chunk": 2048}
    with running_system(settings(smollm2, drafter=EAGLE3, target=roomy)) as running:
        yield running


@pytest.fixture(scope="module")
def embedded(smollm2: Path) -> LocalSystem:
    """The torch engine with the same model, head, policy and limits."""
    return LocalSystem.load(
        load_settings(
            {
                "model": {"path": str(smollm2), "dtype": "float32"},
                "target": {"compute": {"threads": 1}},
                "drafter": EAGLE3,
                "max_shape": [7, 4, 16],
            }
        )
    )


def steps_of(deltas: list[Delta]) -> list[int]:
    """Accepted tokens of each verification; the first delta is the prompt's."""
    return [sum(o is not Origin.TARGET for o in delta.origins) for delta in deltas[1:]]


def expect_the_embedded_engines_steps(
    system: SGLangSystem, embedded: LocalSystem, asked: list[GenerationRequest]
) -> list[Output]:
    outputs = system.generate(asked)
    answers = embedded.generate(asked)
    for output, deltas in zip(outputs, answers, strict=True):
        assert output.tokens == [token for delta in deltas for token in delta.tokens]
        assert output.steps == steps_of(deltas)
        usage = deltas[-1].usage
        assert usage is not None
        assert output.promoted == usage.promoted_tokens
        assert output.drafted == usage.drafted_tokens
    return outputs


@pytest.mark.parametrize(("kappa", "count"), [(1.0, 20), (0.2, 10)])
def test_every_step_is_the_embedded_engines(
    system: SGLangSystem, embedded: LocalSystem, kappa: float, count: int
) -> None:
    """The same tokens from the same trees of the same shapes, step by step; so the acceptance
    length is the same too."""
    outputs = expect_the_embedded_engines_steps(system, embedded, requests(CHATS[-count:], kappa))
    assert (sum(output.promoted for output in outputs) > 0) == (kappa < 1)


def test_requests_in_a_batch_choose_their_own_shape_and_rule(
    system: SGLangSystem, embedded: LocalSystem
) -> None:
    mixed = [
        GenerationRequest(prompt=PLAIN[0], max_tokens=32, mode="off"),
        GenerationRequest(prompt=PLAIN[1], max_tokens=32, mode="static", shape=Shape(5, 3, 16)),
        GenerationRequest(prompt=PLAIN[2], max_tokens=32, mode="static", shape=Shape(1, 1, 2)),
        GenerationRequest(prompt=PLAIN[3], max_tokens=32, kappa=0.1),
        GenerationRequest(prompt=PLAIN[4], max_tokens=1),
        GenerationRequest(prompt=PLAIN[5], max_tokens=2),
    ]
    expect_the_embedded_engines_steps(system, embedded, mixed)


def test_an_answer_of_one_token_leaves_nothing_behind(system: SGLangSystem) -> None:
    """It ends with its prompt, before any step."""
    system.generate([GenerationRequest(prompt=PLAIN[0], max_tokens=1)])
    state = system.target.state()
    assert (state.requests, state.drafter_requests, state.stalled_s) == (0, 0, 0)
