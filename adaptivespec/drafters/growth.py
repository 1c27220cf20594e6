"""Growing draft trees level by level, and keeping them between calls: shared by the drafters that
run a model.

A tree is grown by *expanding* nodes: one forward pass over a node gives the distribution of its
children. `GrowingTrees` remembers, per request, which nodes were expanded and their best children,
so that no node is computed twice: a later, larger `draft` goes on where the last one stopped, and
`advance` keeps what lies below the committed tokens. The model itself is a function behind
`Expand`; it keeps its own rows (keys and values, features) under the same numbers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adaptivespec.errors import CacheFull
from adaptivespec.pricing import LIKELIHOODS, Appraisal, Growth, Prices
from adaptivespec.shape import Shape
from adaptivespec.tree import DraftTrees, ancestor_mask, build, depths, reroot


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
    slots: Tensor
    """int64 [n], a small number per request, fixed while it is open: for state kept per row."""
    rows: Tensor
    """int64 [n]"""
    parents: Tensor
    """int64 [n], the parents' rows."""
    tokens: Tensor
    """int64 [n]"""
    depths: Tensor
    """int64 [n], levels below the root, from 1."""
    masks: list[Tensor]
    """[R], bool [sizes[r], starts[r] + sizes[r]]: the rows that each node sees, by row number; the
    root, its ancestors and itself."""


Expand = Callable[[Level], tuple[Tensor, Tensor]]
"""Runs the model over a level. Returns each node's best children, best first: float32 [n, K]
log-probabilities, -inf where there are fewer, and int64 [n, K] tokens, distinct per node."""


def best_children(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` most likely of each row of logits [n, V]: float32 log-probabilities and indices,
    int64, [n, width] each."""
    best = logits.log_softmax(-1, dtype=torch.float32).topk(width)
    return best.values, best.indices


class Advance(NamedTuple):
    """What became of a request's tree when tokens were committed."""

    path: list[int]
    """Rows of the committed tokens that had been expanded, from the first on."""
    below: list[int]
    """Rows that survive below the last committed token: they are rows 1, 2, ... from now on. Empty
    if a committed token had not been expanded; then the new root must be planted."""


class _Nodes(NamedTuple):
    """What is known of the expanded nodes of S requests, R rows each, the K best children."""

    tokens: Tensor  # int64 [S, R], -1 where a row is not in use
    parents: Tensor  # int64 [S, R], rows
    depths: Tensor  # int64 [S, R]
    visible: Tensor  # bool [S, R, R], [.., i, j]: row j is row i or one of its ancestors
    children: Tensor  # int64 [S, R, K]
    logprobs: Tensor  # float32 [S, R, K], -inf where there are fewer children

    @classmethod
    def empty(cls, slots: int, rows: int, width: int, device: torch.device) -> "_Nodes":
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros((slots, rows, *shape), dtype=dtype, device=device)

        return cls(
            tokens=zeros(),
            parents=zeros(),
            depths=zeros(),
            visible=zeros(rows, dtype=torch.bool),
            children=zeros(width),
            logprobs=zeros(width, dtype=torch.float32),
        )


class GrowingTrees:
    """The expanded nodes of up to `requests` requests. `largest` bounds what `draft` may be asked
    for."""

    def __init__(self, largest: Shape, requests: int, device: torch.device) -> None:
        self.width = max(largest.width, 1)
        self.rows = 1 + max(largest.depth - 1, 0) * self.width
        """Rows per request, the root's included: the largest shape alone, or several others."""
        self.growth = Growth()
        """What the last `draft` took."""
        self._reach = max(largest.depth - 1, 1)  # levels that may be expanded
        self._device = device
        self._slots: dict[int, int] = {}
        self._free = list(range(requests))
        self._counts = [1] * requests  # rows in use per slot
        self._nodes = _Nodes.empty(requests, self.rows, self.width, device)

    def open(self, request: int, token: int) -> None:
        """Start a request with a root that has no children yet. Raises ValueError if it is open,
        CacheFull if too many are."""
        if request in self._slots:
            raise ValueError(f"request {request} is already open")
        if not self._free:
            raise CacheFull(f"{len(self._slots)} requests are open, and no more fit")
        self._slots[request] = slot = self._free.pop()
        self._clear([slot], [token])
        self._nodes.logprobs[slot, 0] = -torch.inf
        self._nodes.children[slot, 0] = 0

    def close(self, request: int) -> None:
        """Forget a request; unknown ones are ignored."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)

    def slots(self, requests: Sequence[int]) -> Tensor:
        """int64 [len(requests)], as in `Level.slots`. Raises KeyError for an unknown request."""
        return self._index([self._slots[request] for request in requests])

    def confidence(self, requests: Sequence[int]) -> Tensor:
        """float32 [len(requests)] on the CPU: probability of each root's best child, 0 if none."""
        return self._nodes.logprobs[self.slots(requests), 0, 0].exp().cpu()

    def plant(
        self, requests: Sequence[int], tokens: Sequence[int], logprobs: Tensor, children: Tensor
    ) -> None:
        """Replace each request's tree by the root `tokens[i]` with its best children, as `Expand`
        returns them: [len(requests), width] each."""
        slots = [self._slots[r] for r in requests]
        self._clear(slots, tokens)
        self._nodes.logprobs[slots, 0] = logprobs
        self._nodes.children[slots, 0] = children

    def advance(self, requests: Sequence[int], committed: Sequence[list[int]]) -> list[Advance]:
        """Re-root each tree at the last of its newly committed tokens (at least one each)."""
        slots = self.slots(requests)
        reach = min(max(map(len, committed)), self._reach)
        padded = [(tokens + [-1] * reach)[:reach] for tokens in committed]
        paths = self._descend(slots, self._index(padded)).tolist()
        advances = [Advance([row for row in path if row > 0], []) for path in paths]
        inside = [i for i, tokens in enumerate(committed) if len(advances[i].path) == len(tokens)]
        if inside:
            below = self._reroot(slots[inside], self._index([padded[i] for i in inside]))
            for i, rows in zip(inside, below, strict=True):
                advances[i].below.extend(rows)
        return advances

    @torch.inference_mode()
    def draft(
        self,
        requests: Sequence[int],
        shapes: Sequence[Shape],
        expand: Expand,
        prices: Prices | None = None,
    ) -> DraftTrees:
        """Grow one tree per request, `width` nodes of the last level at a time, as far as its shape
        asks, and keep the best nodes - 1 candidates of all levels. A tree of depth d takes at most
        d - 1 calls of `expand`, which all requests share. With `prices`, only nodes that are worth
        theirs are expanded and kept, and growing ends with the level that is not."""
        widest, deepest = self._check(shapes)
        self._make_room([self._slots[r] for r in requests], shapes)
        slots = self.slots(requests)
        width = self._index([shape.width for shape in shapes])[:, None]
        depth = self._index([shape.depth for shape in shapes])[:, None]
        rank = torch.arange(max(widest, 1), device=self._device)

        # The frontier: per request up to `widest` nodes, best first. `node` numbers candidates.
        rows = torch.zeros_like(width)
        node = torch.zeros_like(width)
        score = torch.zeros_like(width, dtype=torch.float32)
        pool = [(self._nodes.tokens[slots, :1], node - 1, score, score)]
        found = 1
        appraisal = None if prices is None else Appraisal(prices, self._device)
        passes, expanded, brought = 0, 0, torch.zeros(2, LIKELIHOODS, device=self._device)
        for level in range(1, deepest + 1):
            siblings = torch.where((rank < width) & (depth >= level), 0.0, -torch.inf)[:, None]
            at = (slots[:, None], rows)
            logprobs = self._nodes.logprobs[at][:, :, :widest] + siblings
            parents = node[:, :, None].expand_as(logprobs).flatten(1)
            above = score[:, :, None].expand_as(logprobs).flatten(1)
            logprobs = logprobs.flatten(1)
            tokens = self._nodes.children[at][:, :, :widest].flatten(1)
            values = logprobs
            if appraisal is not None:
                first = torch.arange(logprobs.shape[1], device=self._device) % widest == 0
                values = appraisal.conditionals(logprobs, first)
                values = appraisal.affordable(values, above + values)
                if level > 1:
                    brought += appraisal.brought(score, above + values)
            total = above + values
            values = torch.where(total > -torch.inf, values, -torch.inf)
            pool.append((tokens, parents, logprobs, values))
            if level == deepest:
                break
            score, best = total.topk(min(widest, total.shape[1]))
            in_front = (rank[: best.shape[1]] < width) & (depth > level) & (score > -torch.inf)
            if appraisal is not None:
                in_front = appraisal.frontier(score, in_front)
                if not in_front.any():
                    break
            score = torch.where(in_front, score, -torch.inf)
            node = found + best
            above, tokens = rows.gather(1, best // widest), tokens.gather(1, best)
            rows, new = self._expand(requests, slots, above, tokens, in_front, expand)
            passes, expanded = passes + (new > 0), expanded + new
            found += total.shape[1]

        self.growth = Growth(passes, expanded, *(brought.tolist() if appraisal else ()))
        tokens, parents, logprobs, values = (
            torch.cat(column, dim=1) for column in zip(*pool, strict=True)
        )
        candidates = DraftTrees(tokens.int(), parents.int(), logprobs)
        return build(candidates, [shape.nodes for shape in shapes], values)[0]

    def _expand(
        self,
        requests: Sequence[int],
        slots: Tensor,
        parents: Tensor,
        tokens: Tensor,
        wanted: Tensor,
        expand: Expand,
    ) -> tuple[Tensor, int]:
        """The rows of the wanted nodes [B, W], 0 elsewhere; those without one yet are expanded, and
        their number."""
        same = (self._nodes.parents[slots][:, None] == parents[:, :, None]) & (
            self._nodes.tokens[slots][:, None] == tokens[:, :, None]
        )
        known, rows = same.max(-1)
        new = wanted & ~known
        counts = [self._counts[self._slots[r]] for r in requests]
        rows = torch.where(new, self._index(counts)[:, None] + new.cumsum(-1) - 1, rows)
        rows = torch.where(wanted, rows, 0)
        at = new.nonzero(as_tuple=True)
        if not len(at[0]):
            return rows, 0
        slot, row, parent, token = slots[at[0]], rows[at], parents[at], tokens[at]
        self._nodes.tokens[slot, row] = token
        self._nodes.parents[slot, row] = parent
        self._nodes.depths[slot, row] = self._nodes.depths[slot, parent] + 1
        self._nodes.visible[slot, row] = self._nodes.visible[slot, parent]
        self._nodes.visible[slot, row, row] = True

        grown = [
            (request, start, size)
            for request, start, size in zip(requests, counts, new.sum(-1).tolist(), strict=True)
            if size
        ]
        masks = []
        for request, start, size in grown:
            owner, stop = self._slots[request], start + size
            self._counts[owner] = stop
            masks.append(self._nodes.visible[owner, start:stop, :stop])
        level = Level(
            requests=[request for request, _, _ in grown],
            sizes=[size for _, _, size in grown],
            starts=[start for _, start, _ in grown],
            slots=slot,
            rows=row,
            parents=parent,
            tokens=token,
            depths=self._nodes.depths[slot, row],
            masks=masks,
        )
        self._nodes.logprobs[slot, row], self._nodes.children[slot, row] = expand(level)
        return rows, len(at[0])

    def _descend(self, slots: Tensor, committed: Tensor) -> Tensor:
        """Rows of `committed` [B, L] below each root -> int64 [B, L], -1 from where the path leaves
        the expanded nodes."""
        tokens, parents = self._nodes.tokens[slots], self._nodes.parents[slots]
        row = torch.zeros_like(slots)
        path = []
        for token in committed.unbind(-1):
            child = (parents == row[:, None]) & (tokens == token[:, None]) & (tokens >= 0)
            found, at = child.max(-1)
            row = torch.where(found, at, -2)  # nobody's parent
            path.append(torch.where(found, at, -1))
        return torch.stack(path, dim=-1)

    def _reroot(self, slots: Tensor, committed: Tensor) -> list[list[int]]:
        """Move the roots down paths that are wholly expanded; the surviving rows below them."""
        tokens, parents = self._nodes.tokens[slots].int(), self._nodes.parents[slots].int()
        trees, moved = reroot(
            DraftTrees(tokens, parents, torch.zeros_like(tokens, dtype=torch.float32)), committed
        )
        origin = torch.where(moved < 0, self.rows, moved).argsort(dim=-1, stable=True)
        at = (slots[:, None], origin)
        self._nodes.logprobs[slots] = self._nodes.logprobs[at]
        self._nodes.children[slots] = self._nodes.children[at]
        self._nodes.tokens[slots] = trees.tokens.long()
        self._nodes.parents[slots] = trees.parents.long()
        self._nodes.depths[slots] = depths(trees.parents)
        self._nodes.visible[slots] = ancestor_mask(trees.parents)
        below = []
        sizes = trees.sizes.tolist()
        for slot, size, rows in zip(slots.tolist(), sizes, origin.tolist(), strict=True):
            self._counts[slot] = size
            below.append(rows[1:size])
        return below

    def _clear(self, slots: list[int], tokens: Sequence[int]) -> None:
        """Leave the roots alone, with the given tokens and whatever children they have."""
        self._nodes.tokens[slots] = -1
        self._nodes.tokens[slots, 0] = self._index(tokens)
        self._nodes.parents[slots] = 0
        self._nodes.parents[slots, 0] = -1
        self._nodes.depths[slots, 0] = 0
        self._nodes.visible[slots] = False
        self._nodes.visible[slots, 0, 0] = True
        for slot in slots:
            self._counts[slot] = 1

    def _make_room(self, slots: list[int], shapes: Sequence[Shape]) -> None:
        """Forget expanded nodes where those that a shape may add would not fit."""
        full = [
            slot
            for slot, shape in zip(slots, shapes, strict=True)
            if self._counts[slot] + (shape.depth - 1) * shape.width > self.rows
        ]
        if full:
            self._clear(full, self._nodes.tokens[full, 0].tolist())

    def _check(self, shapes: Sequence[Shape]) -> tuple[int, int]:
        """The largest width and depth. Raises ValueError if a tree of `shapes` cannot be held."""
        widest = max(shape.width for shape in shapes)
        deepest = max(shape.depth for shape in shapes)
        if widest > self.width or any(1 + (s.depth - 1) * s.width > self.rows for s in shapes):
            raise ValueError(
                f"{max(shapes)} does not fit a drafter for width {self.width} and {self.rows} rows"
            )
        return widest, deepest

    def _index(self, values: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
