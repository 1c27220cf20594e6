"""Stand-in for SGLang's compiled kernels on a CPU: pure torch, for tests alone.

SGLang's CPU mode imports `sgl_kernel`, whose wheels hold CUDA code only. These are the kernels that
serving a dense text model and verifying draft trees call, with the arguments of SGLang 0.5.23's
call sites. Any other kernel is there by name and raises NotImplementedError when it is called.

Slots are indices into the KV pool. `req_to_token` [requests, pool_len] int32 holds the slots of
each request's tokens in order; `req_pool_indices` [bs] says which rows are the batch's.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from sgl_kernel.attention import decode_attention_cpu, extend_attention_cpu
from sgl_kernel.cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from sgl_kernel.speculative import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

# The attention backend calls these two as operators. A namespace of operators takes functions too,
# and goes on raising AttributeError for what it does not have.
torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu  # type: ignore[attr-defined]
torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu  # type: ignore[attr-defined]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute {name!r}")

    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"the stand-in for SGLang's CPU kernels has no {name}")

    return missing
