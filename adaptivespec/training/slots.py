"""Many sequences that advance together: a fixed number of slots of one capacity, over one cache."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptivespec.models.attention import Segment
from adaptivespec.models.decoder import Decoder, Hidden


class Slots:
    """Keys and values of `count` sequences of up to `capacity` tokens each."""

    def __init__(self, decoder: Decoder, count: int, capacity: int) -> None:
        self.lengths = torch.zeros(count, dtype=torch.int64)
        """Tokens of every slot; free slots have a length too, of no meaning."""
        self._decoder = decoder
        self._capacity = capacity
        self._cache = decoder.new_cache(count * capacity)
        for slot in range(count):
            self._cache.open(slot, capacity)

    def fill(
        self, slots: Sequence[int], prompts: Sequence[Sequence[int]], aux_layers: Sequence[int]
    ) -> Hidden:
        """Start a sequence in each of `slots` with its prompt, in one pass whose rows are the
        prompts one behind the other."""
        for slot in slots:
            self._empty(slot)
        return self._append(slots, prompts, aux_layers)

    def advance(self, tokens: Tensor, aux_layers: Sequence[int]) -> Hidden:
        """Add one token to every slot, tokens int64 [slots]: the pass has one row per slot. A slot
        that is full, so a free one, begins anew."""
        for slot in (self.lengths == self._capacity).nonzero()[:, 0].tolist():
            self._empty(slot)
        every = range(len(self.lengths))
        return self._append(every, [[token] for token in tokens.tolist()], aux_layers)

    def _empty(self, slot: int) -> None:
        self._cache.close(slot)
        self._cache.open(slot, self._capacity)
        self.lengths[slot] = 0

    def _append(
        self, slots: Sequence[int], chains: Sequence[Sequence[int]], aux_layers: Sequence[int]
    ) -> Hidden:
        tokens: list[int] = []
        positions: list[int] = []
        segments = []
        for slot, chain in zip(slots, chains, strict=True):
            length = int(self.lengths[slot])
            segments.append(Segment(slot, len(tokens), len(tokens) + len(chain)))
            tokens += chain
            positions += range(length, length + len(chain))
        device = self._decoder.device
        rows = torch.tensor(tokens, device=device), torch.tensor(positions, device=device)
        hidden = self._decoder.forward(*rows, self._cache, segments, aux_layers)
        for slot, chain in zip(slots, chains, strict=True):
            self._cache.commit(slot, range(len(chain)))
            self.lengths[slot] += len(chain)
        return hidden
