"""Grouped-query attention of a packed batch: rows of many requests, each on its own cache span."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


class _View(NamedTuple):
    """A segment and the arena positions start:stop that its request holds, its own rows last."""

    segment: Segment
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.segment.stop - self.segment.start

    @property
    def keys(self) -> int:
        return self.stop - self.start


class _Batch(NamedTuple):
    """B segments whose attention is one product, padded to n rows and L keys each."""

    rows: slice | Tensor  # of the packed batch; int64 [B * n] where they are padded or apart
    keys: slice | Tensor  # of the arena; int64 [B, L], a slice for one segment
    bias: Tensor | None  # [1, B, n * group, L], added to the scores; None: all see all


class Packing:
    """A packed batch over a `KVCache`, worked out once for all layers: `slots` int64 [T], which new
    keys and values go to, and which segments attend together. Creating it reserves the rows in the
    cache."""

    def __init__(self, cache: KVCache, segments: Sequence[Segment], group: int) -> None:
        """`group`: query heads per kv head. Raises ValueError when a request's capacity is
        exceeded, KeyError for an unknown request."""
        self.cache = cache
        self._group = group
        views: list[_View] = []
        slots: list[int] = []
        for segment in segments:
            view = _View(segment, *cache.extend(segment.request, segment.stop - segment.start))
            slots.extend(range(view.stop - view.rows, view.stop))
            views.append(view)
        self.slots = torch.tensor(slots, device=cache.device)
        batches = _alike(views)
        self._batches = [_batch(batch, group, cache) for batch in batches]
        self._order: Tensor | None = None  # None: the batches are the packed batch
        if len(batches) > 1 or isinstance(self._batches[0].rows, Tensor):
            self._order = _order(batches, len(slots)).to(cache.device)

    def write(self, layer: int, kv: Tensor) -> None:
        """Store kv [T, 2 * kv_heads, head_dim]: keys, then values."""
        self.cache.write(layer, self.slots, kv)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """q [T, heads, head_dim] -> [T, heads * head_dim]."""
        # The queries that share a kv head are stacked as rows of one product, so that keys are
        # neither repeated nor read twice.
        total, heads, dim = q.shape
        kv_heads, width = heads // self._group, self._group * dim
        q = q.view(total, kv_heads, width).transpose(0, 1)
        outputs = []
        for rows, keys, bias in self._batches:
            k, v = self.cache.read(layer, keys)
            chosen = q[:, rows] if isinstance(rows, slice) else q.index_select(1, rows)
            chosen = chosen.reshape(kv_heads, k.shape[1], -1, dim)
            attended = F.scaled_dot_product_attention(chosen, k, v, attn_mask=bias, scale=scale)
            outputs.append(attended.reshape(kv_heads, -1, width))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)
        if self._order is not None:
            out = out.index_select(1, self._order)
        return out.transpose(0, 1).reshape(total, heads * dim)


_MOST_PADDED = 1.5
"""Scores computed per score asked for, up to which segments attend together; measured with 8 and 16
requests of 50 to 900 keys: at 2 they are slower than one by one, from 1.25 to 1.5 faster."""
_MOST_KEYS = 2**15
"""Keys that are copied side by side for one product: bounds the memory of a pass."""


def _alike(views: Sequence[_View]) -> list[list[_View]]:
    """The views in batches that padding does not blow up, each in the order of its rows."""
    batches: list[list[_View]] = []
    rows = keys = asked = 0
    for view in sorted(views, key=lambda view: view.rows * view.keys):
        rows, keys = max(rows, view.rows), max(keys, view.keys)
        asked += view.rows * view.keys
        count = len(batches[-1]) + 1 if batches else 0
        if 0 < count * keys <= _MOST_KEYS and count * rows * keys <= _MOST_PADDED * asked:
            batches[-1].append(view)
        else:
            batches.append([view])
            rows, keys, asked = view.rows, view.keys, view.rows * view.keys
    return [sorted(batch, key=lambda view: view.segment.start) for batch in batches]


def _batch(views: Sequence[_View], group: int, cache: KVCache) -> _Batch:
    n, length = max(view.rows for view in views), max(view.keys for view in views)
    first = views[0].segment.start
    rows: slice | Tensor = slice(first, first + len(views) * n)
    keys: slice | Tensor = slice(views[0].start, views[0].stop)
    if any((view.segment.start, view.rows) != (first + i * n, n) for i, view in enumerate(views)):
        rows = torch.cat([_padded(view.segment.start, view.rows, n) for view in views])
        rows = rows.to(cache.device)
    if len(views) > 1:
        keys = torch.stack([_padded(view.start, view.keys, length) for view in views])
        keys = keys.to(cache.device)
    return _Batch(rows, keys, _bias(views, n, length, group, cache))


def _padded(start: int, count: int, size: int) -> Tensor:
    """int64 [size]: start, start + 1, ..., of which the last of `count` is repeated."""
    return torch.arange(start, start + size).clamp_max_(start + count - 1)


def _order(batches: Sequence[Sequence[_View]], total: int) -> Tensor:
    """int64 [total]: where each row of the packed batch lies in the padded batches, one behind the
    other."""
    order = torch.empty(total, dtype=torch.int64)
    padded = 0
    for batch in batches:
        n = max(view.rows for view in batch)
        for view in batch:
            rows = slice(view.segment.start, view.segment.stop)
            order[rows] = torch.arange(padded, padded + view.rows)
            padded += n
    return order


def _bias(views: Sequence[_View], n: int, length: int, group: int, cache: KVCache) -> Tensor | None:
    """The additive mask of `attend` for n rows over `length` keys of each view. Rows that are
    padding see what there is."""
    if n == 1 and all(view.keys == length and view.segment.mask is None for view in views):
        return None
    bias = torch.zeros((len(views), n, length), dtype=cache.dtype, device=cache.device)
    for own, view in zip(bias, views, strict=True):
        rows, keys, mask = view.rows, view.keys, view.segment.mask
        if keys < length:
            own[:, keys:] = -torch.inf
        if mask is not None:
            hidden = ~mask.to(cache.device)
        elif rows > 1:
            hidden = torch.ones((rows, rows), dtype=torch.bool, device=cache.device).triu_(1)
        else:
            continue
        own[:rows, keys - hidden.shape[1] : keys].masked_fill_(hidden, -torch.inf)
    return bias.repeat_interleave(group, 1)[None]
