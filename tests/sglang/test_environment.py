"""What every other test here stands on: on a CPU, with the stand-in for its kernels, SGLang
verifies draft trees exactly as transformers would continue each prompt."""

import shutil
from typing import Any

import pytest

from tests.sglang.conftest import StartEngine
from tests.smollm2 import PROMPTS, chat, greedy

TOKENS = 32
CHATS = [chat(text) for text in PROMPTS[:6]]  # more than the engine runs at once


def generate(engine: Any) -> list[dict[str, Any]]:
    """Greedy answers to all CHATS, sent together."""
    params = {"temperature": 0, "max_new_tokens": TOKENS}
    outputs: list[dict[str, Any]] = engine.generate(input_ids=CHATS, sampling_params=params)
    return outputs


def expect_transformers_tokens(outputs: list[dict[str, Any]]) -> None:
    assert [out["output_ids"] for out in outputs] == [greedy(prompt, TOKENS) for prompt in CHATS]


def accepted_per_step(outputs: list[dict[str, Any]]) -> float:
    steps = sum(out["meta_info"]["spec_verify_ct"] for out in outputs)
    return sum(len(out["output_ids"]) for out in outputs) / steps


@pytest.mark.skipif(
    not (shutil.which("c++") and shutil.which("ninja")), reason="SGLang compiles its n-gram tries"
)
def test_ngram_trees_give_the_same_tokens_in_fewer_steps(engine: StartEngine) -> None:
    """Trees from the host, as ours are. The second round repeats the first, so they are right."""
    with engine(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8) as running:
        expect_transformers_tokens(generate(running))
        outputs = generate(running)
    expect_transformers_tokens(outputs)
    assert accepted_per_step(outputs) > 2
