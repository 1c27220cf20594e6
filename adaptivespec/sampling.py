"""Sampling parameters, and the target's own token at every node of a draft tree."""

import msgspec


class SamplingParams(msgspec.Struct, frozen=True):
    """How the target chooses its own token. temperature 0 is greedy; top_k 0 and the 1.0/0.0
    defaults of top_p/min_p mean "off". `seed` fixes the draw at every position of the output."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
