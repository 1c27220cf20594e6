"""What every other test here stands on: on a CPU, with the stand-in for its kernels, SGLang decodes
and verifies draft trees exactly as transformers would continue each prompt."""

import shutil
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.sglang.conftest import StartEngine
from tests.smollm2 import PROMPTS, chat, greedy, save_shallow_lm

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


def running_children() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


def test_plain_decoding_gives_transformers_greedy_tokens(engine: StartEngine) -> None:
    with engine() as running:
        expect_transformers_tokens(generate(running))


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


def test_trees_of_a_draft_model_give_the_same_tokens_in_fewer_steps(
    engine: StartEngine, tmp_path: Path
) -> None:
    """Trees that branch, by a draft model that is often wrong."""
    draft = save_shallow_lm(tmp_path, layers=28)
    with engine(
        speculative_algorithm="STANDALONE",
        speculative_draft_model_path=str(draft),
        speculative_num_steps=3,
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=6,
    ) as running:
        outputs = generate(running)
    expect_transformers_tokens(outputs)
    assert accepted_per_step(outputs) > 1


def test_a_failed_start_raises_and_leaves_no_process(engine: StartEngine) -> None:
    with pytest.raises(RuntimeError), engine(load_format="gguf"):
        pass
    assert not running_children()


def test_the_death_of_the_engine_ends_a_call_and_leaves_no_process(engine: StartEngine) -> None:
    with engine() as running:
        (scheduler,) = [child for child in running_children() if "schedul" in child.name()]
        scheduler.kill()
        with pytest.raises(RuntimeError):
            generate(running)
    assert not running_children()
