"""The EAGLE-3 drafter: trees from a head that reads the target's hidden states."""

from collections.abc import Sequence

import torch
from torch import Tensor

from adaptivespec.drafters.base import Extension
from adaptivespec.drafters.growth import GrowingTrees, Level, best_children
from adaptivespec.drafters.packing import Rows, commit_chains, pack_chains, pack_level
from adaptivespec.models.eagle3 import Eagle3Head
from adaptivespec.pricing import Growth, Prices
from adaptivespec.shape import Shape
from adaptivespec.tree import DraftTrees


class Eagle3Drafter:
    """A `Drafter` around an `Eagle3Head`.

    Committed tokens enter the head with the target's states, one pass for all of them; a tree's
    nodes with the head's own, one pass per level. So a commit computes the accepted nodes anew,
    from better states, and starts the tree afresh; until then `draft` can go on growing it.

    The target's state at position t meets token t + 1 at draft position t, so the cache is one
    position shorter than the text.
    """

    def __init__(self, head: Eagle3Head, kv_tokens: int, max_running: int, largest: Shape) -> None:
        """Room for `max_running` requests whose capacities add up to `kv_tokens`, and for trees up
        to the shape `largest`."""
        self.state_size = head.config.layer.hidden_size
        self._head = head
        self._trees = GrowingTrees(largest, max_running, head.device)
        rows = self._trees.rows
        self._cache = head.new_cache(kv_tokens + max_running * rows)
        self._states = torch.zeros(
            (max_running, rows, self.state_size), dtype=head.dtype, device=head.device
        )

    def open(self, request: int, token: int, capacity: int) -> None:
        self._trees.open(request, token)
        self._cache.open(request, capacity + self._trees.rows)

    def close(self, request: int) -> None:
        self._trees.close(request)
        self._cache.close(request)

    def commit(self, extensions: Sequence[Extension], states: Tensor | None) -> Tensor:
        if states is None:
            raise ValueError("an EAGLE-3 head needs the target's states")
        requests = [extension.request for extension in extensions]
        for request in requests:
            self._cache.commit(request, ())  # drops the tree
        rows = pack_chains(extensions, self._cache)
        above = states.to(self._head.device, self._head.dtype)
        computed, *best = self._forward(rows, above, rows.last)
        commit_chains(rows, self._cache)
        self._states[self._trees.slots(requests), 0] = computed[rows.last]
        self._trees.plant(requests, [added[-1] for _, added in extensions], *best)
        return self._trees.confidence(requests)

    @property
    def growth(self) -> Growth:
        return self._trees.growth

    def draft(
        self, requests: Sequence[int], shapes: Sequence[Shape], prices: Prices | None = None
    ) -> DraftTrees:
        return self._trees.draft(requests, shapes, self._expand, prices)

    def _expand(self, level: Level) -> tuple[Tensor, Tensor]:
        above = self._states[level.slots, level.parents]
        rows = pack_level(level, self._cache)
        computed, *best = self._forward(rows, above, range(len(rows.tokens)))
        self._states[level.slots, level.rows] = computed
        return best[0], best[1]

    def _forward(
        self, rows: Rows, above: Tensor, wanted: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states after the rows, and the best children of the rows `wanted`."""
        states, logits = self._head.forward(
            rows.tokens, above, rows.positions, self._cache, rows.segments, wanted
        )
        logprobs, children = best_children(logits, self._trees.width)
        return states, logprobs, self._head.target_ids[children]
