"""Where the checks run, what they ask the model, and when two answers count as the same."""

from pathlib import Path
from typing import Any, NamedTuple

import torch

from adaptivespec.tokenizer import load_tokenizer

TIE = {"float32": 1e-3, "bfloat16": 0.5}  # logits of this model are in the tens

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Count from 1 to 20.",
    "Why is the sky blue?",
    "Write a Python class Stack with push, pop and peek.",
    "List the months of the year and the number of days in each.",
    "Repeat this sentence five times: The quick brown fox jumps over the lazy dog.",
    "Write a polite email that asks for a day off.",
]


class Machine(NamedTuple):
    """Where the checks run. `gpus` as CUDA_VISIBLE_DEVICES names them; none on a CPU."""

    model: Path
    work: Path  # for what one check leaves for another
    gpus: list[str]

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @property
    def compute(self) -> dict[str, Any]:
        return {"device": "cuda", "num_gpus": 1} if self.gpus else {"threads": 1}

    @property
    def drafter_gpu(self) -> str | None:
        """One of its own, if there are two."""
        return self.gpus[1 % len(self.gpus)] if self.gpus else None

    @property
    def tokens(self) -> int:
        """Of an answer."""
        return 48 if self.gpus else 24

    def prompts(self) -> list[list[int]]:
        tokenizer = load_tokenizer(str(self.model))
        chosen = PROMPTS if self.gpus else PROMPTS[:4]
        return [tokenizer.apply_chat_template([{"role": "user", "content": p}]) for p in chosen]


class CheckFailed(Exception):
    """What is not as it should be."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise CheckFailed(what)


def compare(
    machine: Machine,
    dtype: str,
    prompts: list[list[int]],
    ours: list[list[int]],
    theirs: list[list[int]],
    what: str = "answers",
) -> str:
    """How many answers are the same, of as many as `ours`. Raises CheckFailed at a difference that
    is no tie."""
    ties = 0
    for prompt, a, b in zip(prompts, ours, theirs, strict=False):
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None:
            raise CheckFailed(f"{what}: {len(a)} tokens, not {len(b)}")
        logits = reference_logits(machine, prompt + a[:at])
        margin = abs(float(logits[a[at]] - logits[b[at]]))
        told = f"{what}: token {at} is {a[at]}, not {b[at]}, whose logits are {margin:.4f} apart"
        require(margin <= TIE[dtype], told)
        ties += 1
    return f"{len(ours) - ties} of {len(ours)} equal" + (f", {ties} but for a tie" if ties else "")


def reference(machine: Machine) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(machine.model, dtype=torch.float32)
    return model.to(machine.device).eval()


@torch.inference_mode()
def reference_logits(machine: Machine, tokens: list[int]) -> torch.Tensor:
    """transformers' logits [V] after these tokens, in fp32."""
    return reference(machine)(torch.tensor([tokens], device=machine.device)).logits[0, -1]


def transformers_greedy(machine: Machine, prompts: list[list[int]]) -> list[list[int]]:
    model = reference(machine)
    answers = []
    for prompt in prompts:
        given = torch.tensor([prompt], device=machine.device)
        output = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=machine.tokens,
            do_sample=False,
            pad_token_id=2,
        )
        answers.append(output[0, len(prompt) :].tolist())
    return answers
