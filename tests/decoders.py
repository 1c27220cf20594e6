"""Our decoder with the weights of a transformers model."""

from typing import Any

import torch
from torch import Tensor

from adaptivespec.engine.cache import KVCache
from adaptivespec.models.attention import Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.decoder import Decoder
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
