"""The KV cache: one arena, in which every open request owns one contiguous span."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptivespec.errors import CacheFull


@dataclass(slots=True)
class _Span:
    start: int
    capacity: int
    length: int = 0  # committed rows
    pending: int = 0  # rows written behind them, not yet committed

    @property
    def end(self) -> int:
        """First position behind everything that is written."""
        return self.start + self.length + self.pending


class KVCache:
    """Keys and values of all open requests, and optionally one state row per token beside them.

    Because a span is contiguous, attention reads a request's keys as a view. New rows are written
    behind the committed ones and stay *pending* (a draft tree, possibly in several passes) until
    `commit` keeps some and drops the rest.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        tokens: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        state_size: int = 0,
    ) -> None:
        """Reserve an arena of `tokens` positions: layers * 2 * kv_heads * head_dim values each,
        and `state_size` more (0: no states)."""
        shape = (layers, 2 * kv_heads, tokens, head_dim)
        self.arena = torch.empty(shape, dtype=dtype, device=device)
        """[layers, 2 * kv_heads, tokens, head_dim]: keys, then values."""
        self._states = torch.empty((tokens, state_size), dtype=dtype, device=device)
        self._layers = self.arena.unbind()
        self._spans: dict[int, _Span] = {}
        self.tokens = tokens
        self.device = self.arena.device
        self.dtype = dtype
        self.state_size = state_size

    @property
    def used(self) -> int:
        """Positions reserved by open requests."""
        return sum(span.capacity for span in self._spans.values())

    def open(self, request: int, capacity: int) -> None:
        """Reserve `capacity` positions, moving other spans together where no gap is large enough.
        Raises CacheFull when the capacities do not fit, ValueError if `request` is open."""
        if request in self._spans:
            raise ValueError(f"request {request} is already open")
        if capacity > self.tokens - self.used:
            raise CacheFull(
                f"{capacity} positions asked for, {self.tokens - self.used} of {self.tokens} free"
            )
        start = self._gap(capacity)
        self._spans[request] = _Span(self._compact() if start is None else start, capacity)

    def close(self, request: int) -> None:
        """Release a request's span; unknown requests are ignored."""
        self._spans.pop(request, None)

    def length(self, request: int) -> int:
        """Committed positions of a request."""
        return self._spans[request].length

    def pending(self, request: int) -> int:
        """Positions written behind the committed ones."""
        return self._spans[request].pending

    def extend(self, request: int, rows: int) -> tuple[int, int]:
        """Add `rows` pending positions, to be written next. Returns the arena positions
        (start, end) of all that the request now holds: the new ones are the last `rows` of them.
        Raises ValueError when they exceed the capacity."""
        span = self._spans[request]
        if span.end + rows > span.start + span.capacity:
            raise ValueError(
                f"request {request}: {span.length} + {span.pending} + {rows} positions exceed "
                f"its capacity {span.capacity}"
            )
        span.pending += rows
        return span.start, span.end

    def write(self, layer: int, slots: Tensor, kv: Tensor) -> None:
        """Store kv [T, 2 * kv_heads, head_dim] (keys, then values) at arena positions int64 [T]."""
        self._layers[layer].index_copy_(1, slots, kv.transpose(0, 1))

    def write_states(self, slots: Tensor, states: Tensor) -> None:
        """Store states [T, state_size] at arena positions int64 [T]."""
        self._states.index_copy_(0, slots, states)

    def read(self, layer: int, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at arena positions: [kv_heads, B, L, head_dim] each, a copy for positions
        int64 [B, L], a view with B = 1 for a slice of L."""
        kv = self._layers[layer]
        if isinstance(rows, slice):
            kv = kv[:, None, rows]
        else:
            kv = kv.index_select(1, rows.flatten()).unflatten(1, rows.shape)
        keys, values = kv.chunk(2)
        return keys, values

    def states(self, request: int, start: int, stop: int) -> Tensor:
        """View [stop - start, state_size] of the states of committed positions start:stop."""
        span = self._spans[request]
        if not 0 <= start <= stop <= span.length:
            raise ValueError(f"request {request}: states {start}:{stop} of {span.length} positions")
        return self._states[span.start + start : span.start + stop]

    def commit(self, request: int, path: Sequence[int], keep: Sequence[int] = ()) -> None:
        """Commit the pending rows `path`, in this order (a tree's root first); the rows `keep` stay
        pending behind them, in this order; all other pending rows are dropped. Row numbers count
        from the first pending row. Only rows that change place are copied."""
        span = self._spans[request]
        rows = [*path, *keep]
        if any(not 0 <= row < span.pending for row in rows):
            raise ValueError(f"request {request}: rows {rows} of {span.pending} pending")
        base = span.start + span.length
        still = next((i for i, row in enumerate(rows) if i != row), len(rows))
        if still < len(rows):
            source = torch.tensor(rows[still:], device=self.device) + base
            to = slice(base + still, base + len(rows))
            self.arena[:, :, to] = self.arena.index_select(2, source)
            self._states[to] = self._states.index_select(0, source)
        span.length += len(path)
        span.pending = len(keep)

    def _gap(self, capacity: int) -> int | None:
        """Start of the first gap of at least `capacity` positions."""
        free = 0
        for span in sorted(self._spans.values(), key=lambda span: span.start):
            if span.start - free >= capacity:
                return free
            free = span.start + span.capacity
        return free if self.tokens - free >= capacity else None

    def _compact(self) -> int:
        """Move all spans to the front, keeping their order; returns the first free position."""
        free = 0
        for span in sorted(self._spans.values(), key=lambda span: span.start):
            if span.start != free:
                old, new = slice(span.start, span.end), slice(free, free + span.end - span.start)
                for kv in self.arena:  # layer by layer: the copy is as large as one layer's span
                    kv[:, new] = kv[:, old].clone()
                self._states[new] = self._states[old].clone()
                span.start = free
            free += span.capacity
        return free
