"""Whatever drafter, policy and batch, with kappa = 1 output is transformers' own in float32, and
that of plain decoding in bfloat16.

The packaged model, 30 prompts of 64 tokens: eight at once with requests joining and leaving, a few
also one at a time, and with a drafter that dies twice in every answer. Drafters may be bfloat16:
what they propose changes nothing.
"""

from collections.abc import Callable
from typing import Any

import pytest

from adaptivespec.config import Settings, load_settings
from adaptivespec.drafters.build import make_drafter
from adaptivespec.engine.build import make_target
from adaptivespec.engine.engine import TargetEngine
from adaptivespec.local import LocalSystem
from adaptivespec.request import Delta, GenerationRequest, Mode
from tests.smollm2 import PROMPTS, chat, greedy, save_shallow_lm, tokenizer

MAX_TOKENS = 64
POLICIES = {
    "dcs": {"kind": "dcs"},
    "static": {"kind": "static", "shape": [5, 4, 16]},
    "goodput": {"kind": "goodput"},
}

Drafter = dict[str, Any]
"""The settings of one."""


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {prompt: greedy(chat(prompt), MAX_TOKENS) for prompt in PROMPTS}


@pytest.fixture(scope="module", params=["lookup", "lm", "eagle3"])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    if request.param == "lm":
        return {"kind": "lm", "path": str(save_shallow_lm(tmp_path_factory.mktemp("lm")))}
    return {"kind": request.param}


@pytest.fixture(scope="module")
def engine(drafter: Drafter) -> TargetEngine:
    """Loaded once per drafter: an EAGLE-3 head has a part on the target's side."""
    return make_target(settings(drafter, "dcs"))


def settings(drafter: Drafter, policy: str, dtype: str = "float32") -> Settings:
    return load_settings(
        {
            "model": {"dtype": dtype},
            "target": {"kv_tokens": 4096, "max_running": 8, "max_queued": 64},
            "drafter": drafter,
            "policy": POLICIES[policy],
            "kappa": 1.0,
        }
    )


def run(
    system: LocalSystem,
    batch: int,
    prompts: list[str],
    after_step: Callable[[], None],
    mode: Mode = "adaptive",
) -> dict[str, list[int]]:
    """Answer all `prompts`, `batch` at a time: whenever one ends, the next joins."""
    answers: dict[str, list[int]] = {prompt: [] for prompt in prompts}
    waiting = list(reversed(prompts))

    def join() -> None:
        prompt = waiting.pop()

        def sink(event: Delta | Exception) -> None:
            if isinstance(event, Exception):
                raise event
            answers[prompt] += event.tokens

        wanted = GenerationRequest(prompt=chat(prompt), max_tokens=MAX_TOKENS, kappa=1.0, mode=mode)
        system.controller.submit(wanted, sink)

    while waiting or system.controller.busy:
        while waiting and system.controller.running + system.controller.waiting < batch:
            join()
        system.controller.step()
        after_step()
    return answers


@pytest.mark.parametrize(
    ("policy", "batch", "count"),
    [("dcs", 8, 30), ("static", 8, 12), ("goodput", 8, 12), ("dcs", 1, 4), ("goodput", 1, 4)],
)
def test_output_is_greedy_output(
    drafter: Drafter,
    engine: TargetEngine,
    expected: dict[str, list[int]],
    policy: str,
    batch: int,
    count: int,
) -> None:
    config = settings(drafter, policy)
    system = LocalSystem(config, engine, tokenizer(), make_drafter(config))
    answers = run(system, batch, PROMPTS[:count], lambda: None)
    assert answers == {prompt: expected[prompt] for prompt in PROMPTS[:count]}
    totals = system.controller.totals
    # Goodput gives a drafter up that does not pay, as a model's first layers do not.
    assert totals.drafted_tokens > 0
    assert totals.accepted_tokens > 0 or policy == "goodput"


def test_output_is_the_same_while_drafters_die(
    drafter: Drafter, engine: TargetEngine, expected: dict[str, list[int]]
) -> None:
    config = settings(drafter, "dcs")
    system = LocalSystem(config, engine, tokenizer(), make_drafter(config))
    steps = 0

    def live_and_die() -> None:
        nonlocal steps
        steps += 1
        if steps % 12 == 8:
            system.controller.detach()
        if steps % 12 == 0:
            system.attach(make_drafter(config))

    prompts = PROMPTS[:16]
    assert run(system, 8, prompts, live_and_die) == {p: expected[p] for p in prompts}
    assert system.controller.totals.accepted_tokens > 0


def test_in_bfloat16_output_is_that_of_plain_decoding() -> None:
    """Our kernels give a token the same bits in a tree, in a batch and alone: no near-tie falls
    another way. transformers' rounding is another one, so it is no reference here."""
    config = settings({"kind": "eagle3"}, "static", "bfloat16")
    system = LocalSystem.load(config)
    alone = run(system, 1, PROMPTS[:12], lambda: None, "off")
    assert system.controller.totals.drafted_tokens == 0
    assert run(system, 8, PROMPTS[:12], lambda: None) == alone
    assert system.controller.totals.accepted_tokens > 0
