"""What trees are padded to on GPUs, and that padding changes nothing: in the kernel that SGLang's
Triton backend verifies trees with, which Triton interprets here."""

from types import SimpleNamespace
from typing import Any

import tests.sglang.engine  # isort: skip  # noqa: F401  the shims, before SGLang

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from torch import Tensor

from adaptivespec.config import DCSPolicy
from adaptivespec.policy import make_policy
from adaptivespec.sglang.graphs import bucket_widths
from adaptivespec.sglang.verify import verify_input
from adaptivespec.tree import ancestor_mask, widen
from tests.adaptivespec.trees import Tree, batch, trees
from tests.sglang.strategies import seeds

HEADS, SIZE = 2, 16


def test_the_papers_policy_pads_nothing() -> None:
    reachable = [shape.nodes for shape in make_policy(DCSPolicy()).reachable]
    assert bucket_widths(reachable, 32) == [1, 4, 5, 6, 7, 8, 16, 24, 32]


@given(st.sets(st.integers(1, 40), max_size=8), st.integers(1, 70), st.data())
def test_widths_cover_all_sizes_with_little_padding(
    reachable: set[int], largest: int, data: st.DataObject
) -> None:
    reachable = {nodes for nodes in reachable if nodes <= largest}
    widths = bucket_widths(sorted(reachable), largest)
    assert widths == sorted(set(widths))
    assert {1, largest} | reachable <= set(widths)
    assert widths[-1] == largest
    nodes = data.draw(st.integers(max(reachable, default=1), largest))
    assert min(width for width in widths if width >= nodes) - nodes < 8 or nodes in reachable


def verify(tokens: Any, lengths: list[int], cached: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """As TritonAttnBackend does: attention [B, N, HEADS, SIZE] of trees' nodes over what is cached
    [S, 2, HEADS, SIZE], request after request, and over each other."""
    rows, size = tokens.tokens.shape
    seq_lens = torch.tensor(lengths)
    held = SimpleNamespace(seq_lens=seq_lens, seq_lens_cpu=seq_lens)
    spec = verify_input(tokens, held, full_mask=True)
    ends = torch.cat([torch.zeros(1, dtype=torch.long), seq_lens.cumsum(0)])
    masks = torch.cat([torch.zeros(1, dtype=torch.long), (size * (seq_lens + size)).cumsum(0)])
    out = torch.empty(rows * size, HEADS, SIZE)
    extend_attention_fwd(
        q.reshape(-1, HEADS, SIZE).contiguous(),
        k.reshape(-1, HEADS, SIZE).contiguous(),
        v.reshape(-1, HEADS, SIZE).contiguous(),
        out,
        cached[:, 0].contiguous(),
        cached[:, 1].contiguous(),
        qo_indptr=torch.arange(0, rows * size + 1, size),
        kv_indptr=ends,
        kv_indices=torch.arange(len(cached)),
        custom_mask=spec.custom_mask,
        is_causal=True,
        mask_indptr=masks,
        max_len_extend=size,
        k_scale=1.0,
        v_scale=1.0,
        sm_scale=SIZE**-0.5,
    )
    return out.view(rows, size, HEADS, SIZE)


@settings(max_examples=15, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3), st.integers(0, 9), seeds, st.data())
def test_a_node_sees_what_is_cached_and_its_own_path(
    forest: list[Tree], padding: int, generator: torch.Generator, data: st.DataObject
) -> None:
    drafted = batch(forest)
    rows, size = drafted.tokens.shape
    counts = st.lists(st.integers(1, 6), min_size=rows, max_size=rows)
    lengths = data.draw(counts, label="lengths")
    cached = torch.randn(sum(lengths), 2, HEADS, SIZE, generator=generator)
    q, k, v = torch.randn(3, rows, size + padding, HEADS, SIZE, generator=generator)
    out = verify(widen(drafted, size + padding), lengths, cached, q, k, v)

    visible = ancestor_mask(drafted.parents)
    start = 0
    for row, length in enumerate(lengths):
        before = cached[start : start + length]
        start += length
        keys = torch.cat([before[:, 0], k[row, :size]]).transpose(0, 1)
        values = torch.cat([before[:, 1], v[row, :size]]).transpose(0, 1)
        mask = torch.cat([torch.ones(size, length, dtype=torch.bool), visible[row]], 1)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q[row, :size].transpose(0, 1), keys, values, attn_mask=mask
        ).transpose(0, 1)
        real = drafted.tokens[row] >= 0
        torch.testing.assert_close(out[row, :size][real], expected[real])
