"""Grouped-query attention against the textbook, and rows that grow in several passes."""

import pytest
import torch
from torch import Tensor

from adaptivespec.models.attention import Segment, attend
from tests.decoders import prefill, tiny_decoder

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 16, 0.25


def textbook(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """softmax(q k / s) v per head in float32; `seen` bool [n, L]."""
    outputs = []
    for head in range(HEADS):
        keys, values = (x[head * KV_HEADS // HEADS, 0].float() for x in (k, v))
        scores = (q[:, head].float() @ keys.T * SCALE).masked_fill(~seen, -torch.inf)
        outputs.append(scores.softmax(-1) @ values)
    return torch.cat(outputs, -1)


@pytest.mark.parametrize("rows", [1, 2, 10, 11, 40])  # 3 heads each: both sides of 32 stacked rows
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
def test_attention_is_the_textbooks(dtype: torch.dtype, tolerance: float, rows: int) -> None:
    torch.manual_seed(rows)
    keys = 70
    q = torch.randn(rows, HEADS, DIM).to(dtype)
    k, v = (torch.randn(KV_HEADS, 1, keys, DIM).to(dtype) for _ in range(2))
    seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    bias = torch.zeros(rows, keys, dtype=dtype).masked_fill(~seen, -torch.inf)
    stacked = bias.repeat_interleave(HEADS // KV_HEADS, 0)
    for mask in [stacked] if rows > 1 else [stacked, None]:
        out = attend(q, k, v, mask, SCALE)
        torch.testing.assert_close(
            out.float(), textbook(q, k, v, seen), rtol=tolerance, atol=tolerance
        )


def test_pending_rows_grow_in_passes_and_keep_what_is_asked() -> None:
    """A drafter's tree: a second level below the first, a commit that re-roots, a third level."""
    decoder = tiny_decoder("qwen3")
    cache = decoder.new_cache(32)
    cache.open(0, 32)
    prompt = [1, 17, 300, 45]
    prefill(decoder, cache, 0, prompt)

    def grow(tokens: list[int], depth: int, mask: list[list[int]]) -> Tensor:
        positions = torch.full((len(tokens),), cache.length(0) + depth)
        segment = Segment(0, 0, len(tokens), torch.tensor(mask, dtype=torch.bool))
        return decoder.forward(torch.tensor(tokens), positions, cache, [segment]).final

    def alone(tokens: list[int]) -> Tensor:
        fresh = decoder.new_cache(32)
        fresh.open(0, 32)
        segment = Segment(0, 0, len(tokens))
        positions = torch.arange(len(tokens))
        return decoder.forward(torch.tensor(tokens), positions, fresh, [segment]).final[-1]

    def same(rows: Tensor, paths: list[list[int]]) -> None:
        expected = torch.stack([alone(prompt + path) for path in paths])
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)

    same(grow([5], 0, [[1]]), [[5]])
    same(grow([7, 9], 1, [[1, 1, 0], [1, 0, 1]]), [[5, 7], [5, 9]])
    second = grow([11, 13], 2, [[1, 0, 1, 1, 0], [1, 1, 0, 0, 1]])
    same(second, [[5, 9, 11], [5, 7, 13]])
    cache.commit(0, [0], keep=[2, 3])  # 5 is accepted; 9 and 11 below it survive
    assert (cache.length(0), cache.pending(0)) == (5, 2)
    same(grow([15], 2, [[1, 1, 1]]), [[5, 9, 11, 15]])
