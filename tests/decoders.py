"""Our decoder with the weights of a transformers model."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from adaptivespec.engine.cache import KVCache
from adaptivespec.models.attention import Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.decoder import Decoder, Hidden
from tests.factories import Architecture, tiny_model


def as_decoder(model: Any, dtype: torch.dtype = torch.float32) -> Decoder:
    config = DecoderConfig.from_hf(model.config.to_dict())
    weights = {k: v.detach() for k, v in model.state_dict().items()}
    return Decoder(config, weights, dtype)


def tiny_decoder(architecture: Architecture = "llama", **config: Any) -> Decoder:
    return as_decoder(tiny_model(architecture, **config))


def prefill(decoder: Decoder, cache: KVCache, request: int, tokens: list[int]) -> Tensor:
    """Append a chain of tokens to an open request and commit it; logits [T, V]."""
    start = cache.length(request)
    hidden = decoder.forward(
        torch.tensor(tokens),
        torch.arange(start, start + len(tokens)),
        cache,
        [Segment(request, 0, len(tokens))],
    )
    cache.commit(request, range(len(tokens)))
    return decoder.logits(hidden.final)


def states(decoder: Decoder, tokens: Sequence[int], aux_layers: Sequence[int] = ()) -> Hidden:
    """What one fresh pass over a text gives at its tokens."""
    count = len(tokens)
    cache = decoder.new_cache(count)
    cache.open(0, count)
    ids, positions = torch.tensor(tokens), torch.arange(count)
    return decoder.forward(ids, positions, cache, [Segment(0, 0, count)], aux_layers)


def greedy(
    decoder: Decoder, prompt: Sequence[int], count: int, ends: Collection[int] = ()
) -> list[int]:
    """Plain greedy decoding: `count` tokens at most, up to the first of `ends`, which is kept."""
    cache = decoder.new_cache(len(prompt) + count)
    cache.open(0, len(prompt) + count)
    answer: list[int] = []
    added = list(prompt)
    while len(answer) < count and not (answer and answer[-1] in ends):
        added = [int(prefill(decoder, cache, 0, added)[-1].argmax())]
        answer += added
    return answer
