"""The property above all, in SGLang: at kappa 1 the output is SGLang's own plain greedy output,
whatever it does with its requests meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.system import EAGLE3, SGLangSystem, running_system, settings  # isort: skip

from adaptivespec.request import GenerationRequest
from tests.sglang.engine import running_engine
from tests.sglang.prompts import CHATS, PLAIN, TOKENS, requests


@pytest.fixture(scope="module")
def plain(smollm2: Path) -> list[list[int]]:
    """SGLang's own greedy answers, with the plugin installed but not selected."""
    with running_engine(smollm2, max_running_requests=8) as engine:
        params = {"temperature": 0, "max_new_tokens": TOKENS}
        answers = engine.generate(input_ids=CHATS, sampling_params=params)
    assert all("adaptivespec" not in answer["meta_info"] for answer in answers)
    return [answer["output_ids"] for answer in answers]


POLICIES = {"dcs": {"kind": "dcs"}, "goodput": {"kind": "goodput", "largest": [7, 4, 16]}}


@pytest.fixture(scope="module", params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def system(smollm2: Path, plain: list[list[int]], policy: str) -> Iterator[SGLangSystem]:
    """Chunks shorter than the long prompts, few KV slots, and SGLang's own switch to retract
    requests every few steps. After `plain`, for an engine that shuts down takes any other with
    it."""
    tight = {"kv_tokens": 1100, "prefill_chunk": 96}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TEST_RETRACT", "true")
        patch.setenv("SGLANG_TEST_RETRACT_INTERVAL", "10")
        application = settings(smollm2, drafter=EAGLE3, target=tight, policy=POLICIES[policy])
        with running_system(application) as running:
            yield running


def test_kappa_1_gives_plain_greedy_output(
    system: SGLangSystem, plain: list[list[int]], policy: str
) -> None:
    chats = CHATS if policy == "dcs" else CHATS[8:16]  # both short and long ones
    outputs = system.generate(requests(chats))
    expected = dict(zip(map(tuple, CHATS), plain, strict=True))
    assert [output.tokens for output in outputs] == [expected[tuple(c)] for c in chats]
    accepted, steps = (sum(map(count, (o.steps for o in outputs))) for count in (sum, len))
    assert accepted > 0
    if policy == "dcs":  # the other drafts where it is faster, on this machine at this hour
        assert accepted > steps / 2, "trees were drafted, and paid"
    assert sum(output.meta_info["num_retractions"] for output in outputs) > 0
    assert sum(output.meta_info["cached_tokens"] for output in outputs) > 0
    assert all(output.promoted == 0 for output in outputs)


def test_plain_decoding_is_one_node(system: SGLangSystem, plain: list[list[int]]) -> None:
    off = [GenerationRequest(prompt=p, max_tokens=TOKENS, mode="off") for p in PLAIN[:4]]
    outputs = system.generate(off)
    assert [output.tokens for output in outputs] == plain[:4]
    assert all(output.drafted == 0 and not any(output.steps) for output in outputs)
