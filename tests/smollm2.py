"""The packaged model, transformers' answers of it, and drafters for it that need no download."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from adaptivespec.config import PACKAGED, load_settings
from adaptivespec.engine.build import make_target
from adaptivespec.local import LocalSystem
from adaptivespec.models.loading import load_model
from adaptivespec.models.sources import resolve
from adaptivespec.request import GenerationRequest
from adaptivespec.tokenizer import Tokenizer, load_tokenizer

PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain photosynthesis to a child in three sentences.",
    "Translate to Spanish: The library opens at nine in the morning.",
    "List five animals that live in the sea.",
    "A train travels 60 miles in 1.5 hours. How fast does it go?",
    "Write a haiku about autumn.",
    "What is the difference between a list and a tuple in Python?",
    "Repeat the word apple ten times.",
    "Summarise: The cat sat on the mat. The dog barked. The cat ran away.",
    "Give me a recipe for pancakes.",
    "Count from 1 to 20.",
    "Why is the sky blue?",
    "Write an SQL query that counts the rows of a table named users.",
    "Who wrote Romeo and Juliet?",
    "Tom has 3 boxes of 12 pencils and gives away 7. How many are left?",
    "Name the planets of the solar system in order.",
    "Write a polite email that asks for a day off.",
    "What does HTTP stand for?",
    "Rewrite in the past tense: I walk to school and I see my friends.",
    "Write a function in C that swaps two integers.",
    "What are the primary colours?",
    "Describe a sunset in two sentences.",
    "How do I boil an egg?",
    "Complete the pattern: 2, 4, 8, 16,",
    "What is machine learning?",
    "Write a JSON object that describes a book with a title, an author and a year.",
    "Tell me a short story about a robot and a bird.",
    "Which is larger, 0.9 or 0.11?",
    "Give three tips for better sleep.",
]


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(PACKAGED)


def chat(text: str) -> list[int]:
    """Token ids of one user message."""
    return tokenizer().apply_chat_template([{"role": "user", "content": text}])


@cache
def transformers_model(dtype: torch.dtype = torch.float32) -> Any:
    """The same file, loaded and run by transformers."""
    file = resolve(PACKAGED)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype)
    return model.eval()


@cache
def _plain() -> LocalSystem:
    settings = load_settings(
        {"model": {"dtype": "float32"}, "drafter": None, "policy": {"kind": "dcs"}}
    )
    return LocalSystem(settings, make_target(settings), tokenizer(), None)


def greedy(prompt: list[int], max_new_tokens: int) -> list[int]:
    """transformers' own greedy continuation, up to and including an end-of-turn token. Plain
    decoding finds it, and transformers says in one pass whether every token is its first choice,
    for decoding itself it takes some ten times as long."""
    request = GenerationRequest(prompt=prompt, max_tokens=max_new_tokens, mode="off")
    [deltas] = _plain().generate([request])
    tokens = [token for delta in deltas for token in delta.tokens]
    with torch.inference_mode():
        logits = transformers_model()(torch.tensor([prompt + tokens[:-1]])).logits[0]
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens
    assert len(tokens) == max_new_tokens or tokens[-1] in tokenizer().eos_ids
    assert tokenizer().eos_ids.isdisjoint(tokens[:-1])
    return tokens


def save_shallow_lm(folder: Path, layers: int = 4) -> Path:
    """The first layers of the packaged model as a model of its own: a real, if poor, draft LM."""
    model = transformers_model()
    fields = model.config.to_dict() | {"num_hidden_layers": layers}
    del fields["quantization_config"]  # of the file; the weights that are saved are float32
    config = model.config.__class__(**fields)
    shallow = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _, surplus = shallow.load_state_dict(model.state_dict(), strict=False)
    assert all(int(name.split(".")[2]) >= layers for name in surplus), surplus
    shallow.save_pretrained(folder)
    return folder


def packaged_embedding() -> torch.Tensor:
    """[V, H] float32."""
    name = "model.embed_tokens.weight"
    return load_model(PACKAGED, torch.float32, only=[name])[1][name]
