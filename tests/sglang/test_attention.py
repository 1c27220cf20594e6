"""The stand-in's attention over the paged KV pool is softmax over what a token may see."""

from collections.abc import Callable
from typing import Any

import sgl_kernel
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.sglang.strategies import Pool, seeds, tree_batches


def dense(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention by its formula, [n, heads, dim]; every two heads of q share one of k."""
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * 0.5
    return torch.einsum("hnm,mhd->nhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def attend(kernel: Callable[..., None], pool: Pool, q: Tensor, **more: Any) -> tuple[Tensor, ...]:
    """What a kernel makes of random keys and values, with these."""
    slots = pool.req_to_token.numel()
    k, v = torch.rand(2, slots, 2, 4, generator=torch.Generator().manual_seed(0))
    out = torch.zeros_like(q)
    kernel(
        q,
        k_buffer=k,
        v_buffer=v,
        out=out,
        k_scale=1.0,
        v_scale=1.0,
        req_to_token=pool.req_to_token,
        req_pool_indices=pool.rows,
        sm_scale=0.5,
        logit_cap=0.0,
        is_cross_attn=False,
        sliding_window_size=0,
        encoder_lens=None,
        sinks=None,
        **more,
    )
    return out, k, v


@given(masks=tree_batches(), as_tree=st.booleans(), generator=seeds)
def test_tokens_see_their_prefix_and_their_ancestors(
    masks: Tensor, as_tree: bool, generator: torch.Generator
) -> None:
    bs, n, _ = masks.shape
    pool = Pool(bs, generator)
    q = torch.rand(bs * n, 4, 4, generator=generator)
    out, k, v = attend(
        sgl_kernel.extend_attention_cpu,
        pool,
        q,
        key=None,
        value=None,
        seq_lens=pool.start + n,
        extend_seq_lens=torch.full((bs,), n),
        extend_start_loc=torch.arange(bs) * n,
        max_len_extend=n,
        tree_mask=masks.flatten() if as_tree else None,
        is_causal=True,
    )
    for i, (row, length) in enumerate(zip(pool.rows, pool.start.tolist(), strict=True)):
        own = masks[i] if as_tree else torch.ones(n, n, dtype=torch.bool).tril()
        visible = torch.cat([torch.ones(n, length, dtype=torch.bool), own], 1)
        slots, tokens = pool.req_to_token[row, : length + n], slice(i * n, (i + 1) * n)
        torch.testing.assert_close(out[tokens], dense(q[tokens], k[slots], v[slots], visible))


@given(bs=st.integers(1, 3), generator=seeds)
def test_a_token_is_stored_and_sees_all(bs: int, generator: torch.Generator) -> None:
    pool = Pool(bs, generator)
    q = torch.rand(bs, 4, 4, generator=generator)
    key, value = torch.rand(2, bs, 2, 4, generator=generator)
    written = pool.req_to_token[pool.rows, pool.start].long()
    out, k, v = attend(
        sgl_kernel.decode_attention_cpu,
        pool,
        q,
        key=key,
        value=value,
        loc=written,
        attn_logits=torch.empty(0),
        seq_lens=pool.start + 1,
    )
    assert k[written].equal(key)
    assert v[written].equal(value)
    for i, (row, length) in enumerate(zip(pool.rows, (pool.start + 1).tolist(), strict=True)):
        slots = pool.req_to_token[row, :length]
        visible = torch.ones(1, length, dtype=torch.bool)
        torch.testing.assert_close(out[i : i + 1], dense(q[i : i + 1], k[slots], v[slots], visible))
