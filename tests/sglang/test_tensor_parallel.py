"""Two ranks of the target, in two processes: one talks to the drafter, both commit the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.system import SGLangSystem, running_system, settings  # isort: skip

import torch
from transformers import AutoModelForCausalLM

from adaptivespec.request import GenerationRequest, Mode
from adaptivespec.sampling import SamplingParams
from tests.factories import VOCAB_SIZE, write_hf_folder

TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads two ranks can share."""
    return write_hf_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def system(model: Path) -> Iterator[SGLangSystem]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # the cores of each rank
        application = settings(model, drafter={"kind": "lookup"}, sglang={"tp_size": 2})
        with running_system(application) as running:
            yield running


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(0)
    lengths = range(20, 24)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=random).tolist() for n in lengths]


def test_greedy_output_is_transformers(
    system: SGLangSystem, model: Path, prompts: list[list[int]]
) -> None:
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = [
        reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS, eos_token_id=-1
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    asked = [GenerationRequest(prompt=p, max_tokens=TOKENS) for p in prompts]
    outputs = system.generate(asked, ignore_eos=True)
    assert [output.tokens for output in outputs] == expected
    assert sum(sum(output.steps) for output in outputs) > 0


def test_seeded_output_does_not_depend_on_drafts(
    system: SGLangSystem, prompts: list[list[int]]
) -> None:
    def sampled(mode: Mode) -> list[list[int]]:
        asked = [
            GenerationRequest(
                prompt=prompt,
                max_tokens=TOKENS,
                mode=mode,
                sampling=SamplingParams(temperature=0.7, seed=seed),
            )
            for seed, prompt in enumerate(prompts)
        ]
        outputs = system.generate(asked, ignore_eos=True)
        return [output.tokens for output in outputs]

    drafted = sampled("adaptive")
    assert drafted == sampled("off")
    assert drafted == sampled("static")
