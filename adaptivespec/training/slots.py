"""Decoding of many sequences at once for throughput: a fixed number of slots of one capacity.

The engine's cache gives every request a span of its own length, which serving needs and which costs
one attention call per request. Here all sequences advance by one token per pass, so one product per
layer covers them all.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from adaptivespec.models.attention import matmul_attention
from adaptivespec.models.decoder import Decoder, Hidden


class Slots:
    """Keys and values of `count` sequences of up to `capacity` tokens each."""

    def __init__(self, decoder: Decoder, count: int, capacity: int) -> None:
        config = decoder.config
        self.capacity = capacity
        self.lengths = torch.zeros(count, dtype=torch.int64, device=decoder.device)
        """Tokens of every slot; free slots have a length too, of no meaning."""
        self._decoder = decoder
        self._group = config.heads // config.kv_heads
        shape = (config.layers, 2, count, config.kv_heads, 0, config.head_dim)
        self._kv = torch.empty(shape, dtype=decoder.dtype, device=decoder.device)

    def fill(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], aux_layers: Sequence[int]
    ) -> Hidden:
        """Start a sequence in each of `slots` with its prompt, in one pass whose rows are the
        prompts one behind the other."""
        device = self._decoder.device
        lengths = [len(prompt) for prompt in prompts]
        positions = torch.cat([torch.arange(n, device=device) for n in lengths])
        tokens = torch.tensor([t for prompt in prompts for t in prompt], device=device)
        self._reserve(max(lengths))
        context = _Prompts(self._kv, slots, lengths, positions)
        self.lengths[torch.tensor(slots, device=device)] = torch.tensor(lengths, device=device)
        return self._decoder.run(tokens, positions, context, aux_layers)

    def advance(self, tokens: Tensor, aux_layers: Sequence[int]) -> Hidden:
        """Add one token to every slot, tokens int64 [slots]: the pass has one row per slot."""
        positions = self.lengths.clamp_max(self.capacity - 1)
        self._reserve(int(positions.max()) + 1)
        context = _Rows(self._kv, positions, self._group)
        hidden = self._decoder.run(tokens, positions, context, aux_layers)
        self.lengths = positions + 1
        return hidden

    def _reserve(self, length: int) -> None:
        """Room for `length` tokens in every slot, and hardly more: `_Rows` multiplies all of it,
        because products of a part of each slot would copy that part first."""
        room = self._kv.shape[4]
        if length > room:
            more = min(self.capacity, -(-length // _STRIDE) * _STRIDE) - room
            # zeros: what is behind a sequence's end is multiplied too, and 0 * NaN would be NaN
            self._kv = F.pad(self._kv, (0, 0, 0, more))


_STRIDE = 64
"""Tokens by which the room of all slots grows."""


class _Prompts:
    """`Context` of whole prompts, each in a slot of its own."""

    def __init__(
        self, kv: Tensor, slots: Sequence[int], lengths: Sequence[int], positions: Tensor
    ) -> None:
        self._kv = kv
        self._parts = list(zip(slots, lengths, strict=True))
        self.slots = positions + kv.shape[4] * torch.repeat_interleave(
            torch.tensor(slots, device=kv.device), torch.tensor(lengths, device=kv.device)
        )

    def write(self, layer: int, kv: Tensor) -> None:
        self._new = kv.unflatten(1, (2, -1)).transpose(0, 2)  # [kv_heads, 2, T, head_dim]
        start = 0
        for slot, n in self._parts:
            rows = self._new[:, :, start : start + n]
            self._kv[layer, :, slot, :, :n] = rows.transpose(0, 1)
            start += n

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        keys, values = self._new.unbind(1)
        queries = q.transpose(0, 1)
        outputs, start = [], 0
        for _, n in self._parts:
            rows = slice(start, start + n)
            outputs.append(
                F.scaled_dot_product_attention(
                    queries[None, :, rows],
                    keys[None, :, rows],
                    values[None, :, rows],
                    is_causal=True,
                    scale=scale,
                    enable_gqa=True,
                )[0]
            )
            start += n
        return torch.cat(outputs, 1).transpose(0, 1).flatten(1)


class _Rows:
    """`Context` of one new row per slot."""

    def __init__(self, kv: Tensor, positions: Tensor, group: int) -> None:
        self._kv = kv
        self._positions = positions
        self._count = len(positions)
        self._all = torch.arange(self._count, device=kv.device)
        self.slots = positions + kv.shape[4] * self._all
        hidden = torch.arange(kv.shape[4], device=kv.device) > positions[:, None]
        bias = torch.zeros(hidden.shape, dtype=kv.dtype, device=kv.device)
        bias.masked_fill_(hidden, float("-inf"))
        self._bias = bias.repeat_interleave(kv.shape[3], 0)[:, None].repeat(1, group, 1)

    def write(self, layer: int, kv: Tensor) -> None:
        # the two index tensors come first in what is assigned to: [slots, 2, kv_heads, head_dim]
        self._kv[layer][:, self._all, :, self._positions] = kv.unflatten(1, (2, -1))

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        keys, values = self._kv[layer].flatten(1, 2)  # [slots * kv_heads, room, head_dim]
        queries = q.reshape(len(keys), -1, q.shape[-1])
        attended = matmul_attention(queries, keys, values, self._bias, scale)
        return attended.reshape(self._count, -1)
