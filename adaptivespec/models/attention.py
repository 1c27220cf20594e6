"""Grouped-query attention of a packed batch: rows of many requests, each on its own cache span."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from adaptivespec.engine.cache import KVCache


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows start:stop of a packed batch: n new positions of one request.

    All see the whole committed prefix. `mask` bool [n, pending + n] says what they see of the
    request's uncommitted rows and of each other: the ancestor mask of a tree. None: everything
    before and themselves (a chain).
    """

    request: int
    start: int
    stop: int
    mask: Tensor | None = None


class Context(Protocol):
    """What the rows of one pass attend to: takes each layer's new keys and values, then answers its
    queries. `slots` int64 [T]: where the rows' keys and values are stored."""

    slots: Tensor

    def write(self, layer: int, kv: Tensor) -> None:
        """Store kv [T, 2 * kv_heads, head_dim]: keys, then values."""

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads * head_dim]."""


class _View(NamedTuple):
    rows: slice  # of the packed batch
    start: int  # of the keys, in the arena
    end: int
    bias: Tensor | None  # [n * heads per kv head, keys], added to the scores; None: sees all


class Packing:
    """The `Context` of a packed batch over a `KVCache`, worked out once for all layers: the slots
    that new keys and values go to, and per segment its keys and mask. Creating it reserves the rows
    in the cache."""

    def __init__(self, cache: KVCache, segments: Sequence[Segment], group: int) -> None:
        """`group`: query heads per kv head. Raises ValueError when a request's capacity is
        exceeded, KeyError for an unknown request."""
        self.cache = cache
        self.views: list[_View] = []
        slots: list[int] = []
        for segment in segments:
            n = segment.stop - segment.start
            start, end = cache.extend(segment.request, n)
            slots.extend(range(end - n, end))
            bias = _bias(segment.mask, n, end - start, group, cache)
            self.views.append(_View(slice(segment.start, segment.stop), start, end, bias))
        self.slots = torch.tensor(slots, device=cache.device)

    def write(self, layer: int, kv: Tensor) -> None:
        self.cache.write(layer, self.slots, kv)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        outputs = [
            attend(
                q[view.rows],
                self.cache.keys(layer, view.start, view.end),
                self.cache.values(layer, view.start, view.end),
                view.bias,
                scale,
            )
            for view in self.views
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attention of q [n, heads, D] over k, v [kv_heads, 1, L, D] -> [n, heads * D].

    The queries that share a kv head are stacked as rows of one product, so that keys are neither
    repeated nor read twice; `bias` [n * heads / kv_heads, L] follows that order (query, head)."""
    n, heads, dim = q.shape
    kv_heads = k.shape[0]
    width = heads // kv_heads * dim
    stacked = q.view(n, kv_heads, width).transpose(0, 1).reshape(kv_heads, 1, -1, dim)
    if bias is not None and bias.numel() >= _MATMUL_SCORES and _prefers_matmul(q):
        out = matmul_attention(stacked[:, 0], k[:, 0], v[:, 0], bias, scale)
    else:
        out = F.scaled_dot_product_attention(stacked, k, v, attn_mask=bias, scale=scale)
    return out.reshape(kv_heads, n, width).transpose(0, 1).reshape(n, heads * dim)


_MATMUL_SCORES = 40_000
"""Stacked queries x keys from which plain products win; measured with 3 to 96 queries over 80 to
1040 keys, two threads."""


def _prefers_matmul(q: Tensor) -> bool:
    """torch's fused kernel for CPUs multiplies bf16 far below what oneDNN reaches on many rows."""
    return q.device.type == "cpu" and q.dtype == torch.bfloat16


def matmul_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
    """q [kv_heads, R, D], k and v [kv_heads, L, D], bias [R, L] or [kv_heads, R, L] -> like q."""
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)
    return torch.bmm(scores.softmax(-1), v)


def _bias(mask: Tensor | None, n: int, keys: int, group: int, cache: KVCache) -> Tensor | None:
    """The additive mask of `attend` for n new rows over `keys` positions."""
    if mask is None:
        if n == 1:
            return None
        hidden = torch.ones((n, n), dtype=torch.bool, device=cache.device).triu_(1)
    else:
        hidden = ~mask.to(cache.device)
    bias = torch.zeros((n, keys), dtype=cache.dtype, device=cache.device)
    bias[:, keys - hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    return bias.repeat_interleave(group, 0)
