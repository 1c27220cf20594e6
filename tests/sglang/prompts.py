"""Chats for SGLang: short ones, and longer ones with a prefix in common."""

from adaptivespec.request import GenerationRequest
from tests.smollm2 import PROMPTS, chat

TOKENS = 64

_RULES = "Rules: answer in plain words, in full sentences, and stay with the question. " * 8

PLAIN = [chat(text) for text in PROMPTS[:12]]
LONG = [chat(_RULES + text) for text in PROMPTS[12:20]]  # longer than a chunk of prefill
CHATS = PLAIN + LONG


def requests(prompts: list[list[int]], kappa: float = 1.0) -> list[GenerationRequest]:
    """Greedy requests for TOKENS tokens."""
    return [GenerationRequest(prompt=p, max_tokens=TOKENS, kappa=kappa) for p in prompts]
