"""Growing draft trees level by level, and keeping them between calls: shared by the drafters that
run a model.

A tree is grown by *expanding* nodes: one forward pass over a node gives the distribution of its
children. `GrowingTrees` remembers, per request, which nodes were expanded and their best children,
so that no node is computed twice: a later, larger `draft` goes on where the last one stopped, and
`advance` keeps what lies below the committed tokens. The model itself is a function behind
`Expand`; it keeps its own rows (keys and values, features) under the same numbers.

The trees are kept on the CPU, whatever device the model is on: a node takes nanoseconds there, and
a level one small copy each way.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptivespec.appraisal import keep_best, market
from adaptivespec.errors import CacheFull
from adaptivespec.kernels import choices
from adaptivespec.kernels import trees as kernels
from adaptivespec.kernels.trees import DEPTH, PARENT, ROW, SLOT, TOKEN, Frontier, Nodes, Pool
from adaptivespec.pricing import LIKELIHOODS, Growth, Prices
from adaptivespec.shape import Shape
from adaptivespec.tree import DraftTrees


class Level(NamedTuple):
    """Nodes to be expanded by one forward pass, packed request by request.

    Row 0 of a request is its root, the last committed token, which the model has already seen; rows
    1, 2, ... are its expanded nodes in the order of their expansion. n nodes in R requests:
    """

    requests: list[int]
    """[R]"""
    sizes: list[int]
    """[R], nodes per request, all positive; their sum is n."""
    starts: list[int]
    """[R], the row of each request's first node; the others follow it."""
    nodes: Tensor
    """int64 [5, n]: the lines below, on the model's device."""
    masks: list[Tensor]
    """[R], bool [sizes[r], starts[r] + sizes[r]] on the CPU: the rows that each node sees, by row
    number; the root, its ancestors and itself."""

    @property
    def slots(self) -> Tensor:
        """int64 [n], a small number per request, fixed while it is open: for state kept per row."""
        return self.nodes[SLOT]

    @property
    def rows(self) -> Tensor:
        """int64 [n]"""
        return self.nodes[ROW]

    @property
    def parents(self) -> Tensor:
        """int64 [n], the parents' rows."""
        return self.nodes[PARENT]

    @property
    def tokens(self) -> Tensor:
        """int64 [n]"""
        return self.nodes[TOKEN]

    @property
    def depths(self) -> Tensor:
        """int64 [n], levels below the root, from 1."""
        return self.nodes[DEPTH]


Expand = Callable[[Level], tuple[Tensor, Tensor]]
"""Runs the model over a level. Returns each node's best children, best first: float32 [n, K]
log-probabilities, -inf where there are fewer, and int64 [n, K] tokens, distinct per node."""


def best_children(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` most likely of each row of logits [n, V]: float32 log-probabilities and indices,
    int64, [n, width] each."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        logprobs = np.empty((len(logits), width), np.float32)
        places = np.empty(logprobs.shape, np.int64)
        choices.best(logits.contiguous().numpy(), logprobs, places)
        return torch.from_numpy(logprobs), torch.from_numpy(places)
    best = logits.log_softmax(-1, dtype=torch.float32).topk(width)
    return best.values, best.indices


class Advance(NamedTuple):
    """What became of a request's tree when tokens were committed."""

    path: list[int]
    """Rows of the committed tokens that had been expanded, from the first on."""
    below: list[int]
    """Rows that survive below the last committed token: they are rows 1, 2, ... from now on. Empty
    if a committed token had not been expanded; then the new root must be planted."""


class GrowingTrees:
    """The expanded nodes of up to `requests` requests, for a model on `device`. `largest` bounds
    what `draft` may be asked for."""

    def __init__(self, largest: Shape, requests: int, device: torch.device) -> None:
        self.width = max(largest.width, 1)
        self.rows = 1 + max(largest.depth - 1, 0) * self.width
        """Rows per request, the root's included: the largest shape alone, or several others."""
        self.growth = Growth()
        """What the last `draft` took."""
        self._device = device
        self._slots: dict[int, int] = {}
        self._free = list(range(requests))
        self._nodes = Nodes.empty(requests, self.rows, self.width)

    def open(self, request: int, token: int) -> None:
        """Start a request with a root that has no children yet. Raises ValueError if it is open,
        CacheFull if too many are."""
        if request in self._slots:
            raise ValueError(f"request {request} is already open")
        if not self._free:
            raise CacheFull(f"{len(self._slots)} requests are open, and no more fit")
        self._slots[request] = slot = self._free.pop()
        kernels.clear(self._nodes, slot, token)
        self._nodes.logprobs[slot, 0] = -np.inf
        self._nodes.children[slot, 0] = 0

    def close(self, request: int) -> None:
        """Forget a request; unknown ones are ignored."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def slots(self, requests: Sequence[int]) -> Tensor:
        """int64 [len(requests)] on the model's device, as in `Level.slots`. Raises KeyError for an
        unknown request."""
        return torch.from_numpy(self._slots_of(requests)).to(self._device)

    def confidence(self, requests: Sequence[int]) -> Tensor:
        """float32 [len(requests)] on the CPU: probability of each root's best child, 0 if none."""
        return torch.from_numpy(np.exp(self._nodes.logprobs[self._slots_of(requests), 0, 0]))

    def plant(
        self, requests: Sequence[int], tokens: Sequence[int], logprobs: Tensor, children: Tensor
    ) -> None:
        """Replace each request's tree by the root `tokens[i]` with its best children, as `Expand`
        returns them: [len(requests), width] each."""
        slots = self._slots_of(requests)
        for slot, token in zip(slots, tokens, strict=True):
            kernels.clear(self._nodes, slot, token)
        self._nodes.logprobs[slots, 0] = logprobs.cpu().numpy()
        self._nodes.children[slots, 0] = children.cpu().numpy()

    def advance(self, requests: Sequence[int], committed: Sequence[list[int]]) -> list[Advance]:
        """Re-root each tree at the last of its newly committed tokens (at least one each)."""
        return [
            self._advance(slot, np.array(tokens))
            for slot, tokens in zip(self._slots_of(requests), committed, strict=True)
        ]

    def _advance(self, slot: int, tokens: NDArray[np.int64]) -> Advance:
        path, below = np.empty(len(tokens), np.int64), np.empty(self.rows, np.int64)
        known = kernels.descend(self._nodes, slot, tokens, path)
        if known < len(tokens):
            return Advance(path[:known].tolist(), [])
        left = kernels.reroot(self._nodes, slot, path[-1], below)
        return Advance(path.tolist(), below[:left].tolist())

    def draft(
        self,
        requests: Sequence[int],
        shapes: Sequence[Shape],
        expand: Expand,
        prices: Prices | None = None,
    ) -> DraftTrees:
        """Grow one tree per request, `width` nodes of the last level at a time, as far as its shape
        asks, and keep the best nodes - 1 candidates of all levels: trees on the CPU. A tree of
        depth d takes at most d - 1 calls of `expand`, which all requests share. With `prices`, only
        nodes that are worth theirs are expanded and kept, and growing ends with the level that is
        not."""
        widest, deepest = self._check(shapes)
        slots = self._slots_of(requests)
        self._make_room(slots, shapes)
        depths, widths, _ = np.array(shapes, np.int64).reshape(-1, 3).T.copy()
        most = widest + max(deepest - 1, 0) * widest**2
        pool = Pool.of_roots(self._nodes.tokens[slots, 0], most)
        frontier = Frontier.of_roots(len(slots), max(widest, 1))
        priced = market(prices, len(slots))
        brought, passes, expanded = np.zeros((2, LIKELIHOODS)), 0, 0
        news, fresh = np.zeros_like(slots), np.empty((5, frontier.rows.size), np.int64)
        for level in range(1, deepest + 1):
            found, more = kernels.advance_level(
                self._nodes, slots, widths, depths, level, frontier, pool, priced, brought, news,
                fresh,
            )  # fmt: skip
            if found:
                passes, expanded = passes + 1, expanded + found
                self._expand(requests, slots, news, fresh[:, :found], expand)
            if not more:
                break
        self.growth = Growth(passes, expanded, *(brought.tolist() if prices else ()))
        columns = pool.tokens, pool.parents, pool.logprobs, pool.totals
        return keep_best(pool.sizes, columns, [shape.nodes for shape in shapes], priced)

    def _expand(
        self,
        requests: Sequence[int],
        slots: NDArray[np.int64],
        news: NDArray[np.int64],
        fresh: NDArray[np.int64],
        expand: Expand,
    ) -> None:
        """Run the model over the nodes `fresh` [5, n], of which each request has `news` [B], its
        latest rows."""
        level = Level([], [], [], torch.from_numpy(fresh).to(self._device), [])
        for request, slot, size in zip(requests, slots.tolist(), news.tolist(), strict=True):
            if size:
                stop = int(self._nodes.counts[slot])
                level.requests.append(request)
                level.sizes.append(size)
                level.starts.append(stop - size)
                visible = self._nodes.visible[slot, stop - size : stop, :stop]
                level.masks.append(torch.from_numpy(visible))
        logprobs, children = expand(level)
        slot, row = fresh[SLOT], fresh[ROW]
        self._nodes.logprobs[slot, row] = logprobs.cpu().numpy()
        self._nodes.children[slot, row] = children.cpu().numpy()

    def _make_room(self, slots: NDArray[np.int64], shapes: Sequence[Shape]) -> None:
        """Forget expanded nodes where those that a shape may add would not fit."""
        for slot, shape in zip(slots, shapes, strict=True):
            if self._nodes.counts[slot] + (shape.depth - 1) * shape.width > self.rows:
                kernels.clear(self._nodes, slot, self._nodes.tokens[slot, 0])

    def _check(self, shapes: Sequence[Shape]) -> tuple[int, int]:
        """The largest width and depth. Raises ValueError if a tree of `shapes` cannot be held."""
        widest = max(shape.width for shape in shapes)
        deepest = max(shape.depth for shape in shapes)
        if widest > self.width or any(1 + (s.depth - 1) * s.width > self.rows for s in shapes):
            raise ValueError(
                f"{max(shapes)} does not fit a drafter for width {self.width} and {self.rows} rows"
            )
        return widest, deepest

    def _slots_of(self, requests: Sequence[int]) -> NDArray[np.int64]:
        return np.array([self._slots[request] for request in requests])
