"""Grouped-query attention against the textbook, and rows that grow in several passes."""

import pytest
import torch
from torch import Tensor

from adaptivespec.engine.cache import KVCache
from adaptivespec.models.attention import Packing, Segment
from tests.decoders import prefill, tiny_decoder

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 16, 0.25


def textbook(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """softmax(q k / s) v per head in float32; k and v [kv_heads, L, D], `seen` bool [n, L]."""
    outputs = []
    for head in range(HEADS):
        keys, values = (x[head * KV_HEADS // HEADS].float() for x in (k, v))
        scores = (q[:, head].float() @ keys.T * SCALE).masked_fill(~seen, -torch.inf)
        outputs.append(scores.softmax(-1) @ values)
    return torch.cat(outputs, -1)


@pytest.mark.parametrize(
    "sizes",  # (committed positions, new rows, of a tree?) per request
    [
        [(70, 1, False)],
        [(400, 40, True)],
        [(0, 30, False)],
        [(60, 1, False), (61, 1, False), (61, 1, False)],
        [(50, 16, True), (90, 16, True), (300, 16, True)],
        [(90, 7, True), (120, 16, True), (80, 1, False), (100, 12, True)],
        [(100, 9, True), (0, 200, False), (110, 4, True), (900, 1, False), (64, 64, False)],
    ],
    ids=["row", "tree", "prompt", "rows", "trees", "ragged", "mixed"],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=["fp32", "bf16"]
)
def test_attention_is_the_textbooks(
    dtype: torch.dtype, tolerance: float, sizes: list[tuple[int, int, bool]]
) -> None:
    torch.manual_seed(0)
    cache = KVCache(1, KV_HEADS, DIM, sum(held + new for held, new, _ in sizes), dtype)
    segments, seen, start = [], [], 0
    for request, (held, new, is_tree) in enumerate(sizes):
        cache.open(request, held + new)
        begin, end = cache.extend(request, held)
        cache.write(0, torch.arange(begin, end), torch.randn(held, 2 * KV_HEADS, DIM).to(dtype))
        cache.commit(request, range(held))
        own = torch.ones(new, new, dtype=torch.bool).tril()
        if is_tree:
            own &= torch.rand(new, new) < 0.5
            own |= torch.eye(new, dtype=torch.bool)
        segments.append(Segment(request, start, start + new, own if is_tree else None))
        seen.append(torch.cat((torch.ones(new, held, dtype=torch.bool), own), 1))
        start += new
    q = torch.randn(start, HEADS, DIM).to(dtype)
    packing = Packing(cache, segments, HEADS // KV_HEADS)
    packing.write(0, torch.randn(start, 2 * KV_HEADS, DIM).to(dtype))
    out = packing.attend(0, q, SCALE)
    for segment, mask in zip(segments, seen, strict=True):
        begin, end = cache.extend(segment.request, 0)
        keys, values = (x[:, 0] for x in cache.read(0, slice(begin, end)))
        rows = slice(segment.start, segment.stop)
        torch.testing.assert_close(
            out[rows].float(),
            textbook(q[rows], keys, values, mask),
            rtol=tolerance,
            atol=tolerance,
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
