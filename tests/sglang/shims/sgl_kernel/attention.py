"""Attention over the paged KV pool: torch's own, one request at a time.

q and out are [tokens, heads, dim]; k_buffer and v_buffer [slots, kv_heads, dim].
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def _attend(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    slots: Tensor,
    visible: Tensor | None,
    scale: float,
) -> Tensor:
    """[n, heads, dim] of q's n tokens over the KV in `slots` [m], where visible [n, m] or all."""
    k, v = k_buffer[slots], v_buffer[slots]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _refuse(kernel: str, **unsupported: Any) -> None:
    for name, value in unsupported.items():
        if value is not None and value:
            raise NotImplementedError(f"the stand-in's {kernel} does not do {name}={value!r}")


def decode_attention_cpu(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    out: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    loc: Tensor,
    attn_logits: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
) -> None:
    """One token a request: writes its key and value to `loc` [bs], then attends to all seq_lens."""
    _refuse(
        "decode_attention_cpu",
        k_scale=k_scale != 1,
        v_scale=v_scale != 1,
        logit_cap=logit_cap,
        is_cross_attn=is_cross_attn,
        sliding_window_size=sliding_window_size,
        encoder_lens=encoder_lens is not None,
        sinks=sinks is not None,
    )
    if key is not None and value is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:])
        v_buffer[loc] = value.view(-1, *v_buffer.shape[1:])
    for i, (row, length) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        slots = req_to_token[row, :length]
        out[i : i + 1] = _attend(q[i : i + 1], k_buffer, v_buffer, slots, None, sm_scale)


def extend_attention_cpu(
    q: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    out: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    k_scale: float,
    v_scale: float,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    extend_start_loc: Tensor,
    max_len_extend: int,
    sm_scale: float,
    logit_cap: float,
    is_cross_attn: bool,
    sliding_window_size: int,
    encoder_lens: Tensor | None,
    sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """The last extend_seq_lens [bs] of each request's seq_lens [bs] tokens: a prompt's or a tree's.

    Their keys and values are in the pool already. tree_mask, flat [bs * n * n], says which of the
    n tokens of a request see which; without it they are causal. All see what is before them.
    """
    _refuse(
        "extend_attention_cpu",
        k_scale=k_scale != 1,
        v_scale=v_scale != 1,
        logit_cap=logit_cap,
        is_cross_attn=is_cross_attn,
        sliding_window_size=sliding_window_size,
        encoder_lens=encoder_lens is not None,
        sinks=sinks is not None,
        bidirectional=not is_causal,
    )
    batch = zip(
        req_pool_indices.tolist(),
        seq_lens.tolist(),
        extend_seq_lens.tolist(),
        extend_start_loc.tolist(),
        strict=True,
    )
    for i, (row, length, n, start) in enumerate(batch):
        visible = torch.ones(n, length, dtype=torch.bool)
        if tree_mask is None:
            visible = visible.tril(length - n)
        else:
            visible[:, length - n :] = tree_mask[i * n * n : (i + 1) * n * n].view(n, n)
        slots, tokens = req_to_token[row, :length], slice(start, start + n)
        out[tokens] = _attend(q[tokens], k_buffer, v_buffer, slots, visible, sm_scale)
