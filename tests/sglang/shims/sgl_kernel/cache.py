"""Slots of the KV pool: which tokens have which, and moving what was accepted."""

import ctypes

import torch
from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Give each request's positions start to end [bs] the next of out_cache_loc's slots."""
    taken = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The inverse: pack the slots of the positions start to end [bs] into out_cache_loc."""
    taken = 0
    for row, start, end in _spans(req_pool_indices, start_offset, end_offset):
        out_cache_loc[taken : taken + end - start] = req_to_token[row, start:end]
        taken += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """out_cache_loc [bs * topk * num_steps]: each request's slots behind its seq_lens [bs]."""
    positions = seq_lens.unsqueeze(1) + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices.unsqueeze(1), positions]
    out_cache_loc[: slots.numel()] = slots.flatten()


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    topk: int,
    num_steps: int,
    pool_len: int,
) -> Tensor:
    """[bs * topk, pool_len]: `req_to_token` of each branch of each request.

    Behind a request's seq_lens [bs] tokens, its branches have num_steps slots each, in turn.
    """
    rows = req_to_token[req_pool_indices].repeat_interleave(topk, dim=0)
    first = seq_lens.repeat_interleave(topk).unsqueeze(1)
    steps = torch.arange(num_steps)
    branch = torch.arange(topk).repeat(len(seq_lens)).unsqueeze(1)
    return rows.scatter(1, first + steps, rows.gather(1, first + branch * num_steps + steps))


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """bonus_tokens [bs]: the last accepted of each row of accept_tokens [bs * accept_stride]."""
    rows = accept_tokens.view(-1, accept_stride)
    last = accept_lens.long().unsqueeze(1) - 1
    bonus_tokens.copy_(rows.gather(1, last).squeeze(1))


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Pack the slots of the accepted nodes: of accept_index without its -1."""
    slots = out_cache_loc[accept_index[accept_index >= 0].long()]
    accept_out_cache_loc[: len(slots)] = slots


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Copy slots src_loc to tgt_loc [n] in every buffer; data_ptrs are addresses and strides a
    slot's bytes. All are read before any is written, as sources may be targets too."""
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for base, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        read = [ctypes.string_at(base + slot * size, size) for slot in sources]
        for slot, content in zip(targets, read, strict=True):
            ctypes.memmove(base + slot * size, content, size)


def _spans(rows: Tensor, starts: Tensor, ends: Tensor) -> list[tuple[int, int, int]]:
    return list(zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True))
