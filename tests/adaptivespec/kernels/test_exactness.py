"""A token has the same bits whatever is computed beside it: alone, in a prompt, a tree, a batch."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptivespec.models.attention import Segment
from adaptivespec.models.decoder import Decoder
from adaptivespec.tree import ancestor_mask, depths
from tests.decoders import as_decoder, prefill
from tests.factories import VOCAB_SIZE, tiny_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DECODERS = {
    name: as_decoder(tiny_model("qwen3", num_hidden_layers=3, head_dim=32), dtype)
    for name, dtype in DTYPES.items()
}
TEXT = torch.randint(VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(1)).tolist()


def one_by_one(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] of plain decoding."""
    cache = decoder.new_cache(len(tokens))
    cache.open(0, len(tokens))
    return torch.cat([prefill(decoder, cache, 0, [token]) for token in tokens])


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("size", [2, 7, 13, 24, 25, 90])
def test_a_prompt_in_chunks_of_any_size_has_the_bits_of_plain_decoding(
    name: str, size: int
) -> None:
    decoder = DECODERS[name]
    cache = decoder.new_cache(len(TEXT))
    cache.open(0, len(TEXT))
    chunks = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    logits = torch.cat([prefill(decoder, cache, 0, chunk) for chunk in chunks])
    assert torch.equal(logits, one_by_one(decoder, TEXT))


@st.composite
def trees(draw: st.DrawFn) -> list[int]:
    """Parents of the nodes; the root's is -1."""
    size = draw(st.integers(1, 30))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=25, deadline=None)
@given(shapes=st.lists(trees(), min_size=1, max_size=4), lengths=st.data())
def test_a_node_has_the_bits_of_its_path_alone(
    name: str, shapes: list[list[int]], lengths: st.DataObject
) -> None:
    """Trees of several requests, verified in one pass, against each path decoded token by token."""
    decoder = DECODERS[name]
    held = [lengths.draw(st.integers(0, 60)) for _ in shapes]
    cache = decoder.new_cache(sum(held) + sum(map(len, shapes)))
    tokens: list[int] = []
    positions: list[int] = []
    segments = []
    for request, (parents, length) in enumerate(zip(shapes, held, strict=True)):
        cache.open(request, length + len(parents))
        if length:
            prefill(decoder, cache, request, TEXT[:length])
        above = torch.tensor([parents])
        start = len(tokens)
        segments.append(Segment(request, start, start + len(parents), ancestor_mask(above)[0]))
        tokens += [(7 * i + request) % VOCAB_SIZE for i in range(len(parents))]
        positions += (length + depths(above)[0]).tolist()
    hidden = decoder.forward(torch.tensor(tokens), torch.tensor(positions), cache, segments)
    logits = decoder.logits(hidden.final)
    for segment, parents, length in zip(segments, shapes, held, strict=True):
        node = len(parents) - 1
        path = []
        while node >= 0:
            path.append(segment.start + node)
            node = parents[node]
        path.reverse()
        alone = one_by_one(decoder, TEXT[:length] + [tokens[row] for row in path])
        assert torch.equal(logits[path], alone[length:])
