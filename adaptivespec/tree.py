"""Draft trees: a batch of token trees as three padded tensors, and what is done to them.

Every operation is batched and free of loops over nodes and of host synchronisation: facts about a
node's path from the root come from `fold_paths`, which doubles its reach at every round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class DraftTrees:
    """A batch of B draft trees, padded to N nodes each.

    tokens   int32 [B, N]; node 0 is the root, the last committed token. Padding is -1.
    parents  int32 [B, N]; parents[b, 0] = -1 and parents[b, i] < i. Padding is 0.
    logprobs float32 [B, N]; log p_draft(node | its parent's path), 0 at the root. Padding is -inf.
    Siblings carry different tokens. All three live on the drafter's device.
    """

    tokens: Tensor
    parents: Tensor
    logprobs: Tensor

    @property
    def sizes(self) -> Tensor:
        """int64 [B]: real nodes per tree."""
        return (self.tokens >= 0).sum(-1)

    def cpu(self) -> "DraftTrees":
        """The same trees on the CPU."""
        return self.to("cpu")

    def to(self, device: torch.device | str) -> "DraftTrees":
        """The same trees on a device."""
        return DraftTrees(self.tokens.to(device), self.parents.to(device), self.logprobs.to(device))

    def rows(self, which: Tensor | slice) -> "DraftTrees":
        """Some of the trees, by an index or a slice."""
        return DraftTrees(self.tokens[which], self.parents[which], self.logprobs[which])


def roots(tokens: list[int], device: torch.device | str = "cpu") -> DraftTrees:
    """One-node trees ("no draft") for the given root tokens: [B, 1] each."""
    column = torch.tensor(tokens, dtype=torch.int32, device=device)[:, None]
    parents = torch.full_like(column, -1)
    return DraftTrees(column, parents, torch.zeros_like(column, dtype=torch.float32))


def pad(*batches: DraftTrees) -> DraftTrees:
    """One batch of all the rows, in order, padded to the largest N."""
    width = max(trees.tokens.shape[1] for trees in batches)
    wide = [widen(trees, width) for trees in batches]
    return DraftTrees(
        torch.cat([trees.tokens for trees in wide]),
        torch.cat([trees.parents for trees in wide]),
        torch.cat([trees.logprobs for trees in wide]),
    )


def widen(trees: DraftTrees, nodes: int) -> DraftTrees:
    """The same trees, padded to N = `nodes`."""
    more = (0, nodes - trees.tokens.shape[1])
    if more == (0, 0):
        return trees
    return DraftTrees(
        functional.pad(trees.tokens, more, value=-1),
        functional.pad(trees.parents, more, value=0),
        functional.pad(trees.logprobs, more, value=-torch.inf),
    )


def trim(trees: DraftTrees) -> DraftTrees:
    """The same trees without columns that are padding in all of them."""
    used = int(trees.sizes.max())
    return DraftTrees(trees.tokens[:, :used], trees.parents[:, :used], trees.logprobs[:, :used])


def fold_paths(
    values: Tensor, parents: Tensor, combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Combine `values` [B, N] over every node's path from the root, the node included -> [B, N].

    `combine` is associative and commutative; either it is idempotent (min, and) or values[:, 0] is
    its neutral element, because a path that ends early meets the root more than once.
    """
    jump = parents.clamp_min(0).long()
    for _ in range(_rounds(parents)):
        values = combine(values, values.gather(-1, jump))
        jump = jump.gather(-1, jump)
    return values


def ancestor_mask(parents: Tensor) -> Tensor:
    """bool [B, N, N] from parents [B, N]: mask[b, i, j] says that j is i or an ancestor of i.

    This is the tree attention mask. Padding, whose parent is 0, sees the root and itself, so that
    no row of attention is empty, and no real node sees padding.
    """
    batch, nodes = parents.shape
    mask = torch.eye(nodes, dtype=torch.bool, device=parents.device).expand(batch, -1, -1)
    jump = parents.clamp_min(0).long()
    for _ in range(_rounds(parents)):
        mask = mask | mask.gather(1, jump[:, :, None].expand(-1, -1, nodes))
        jump = jump.gather(-1, jump)
    return mask


def depths(parents: Tensor) -> Tensor:
    """int64 [B, N]: levels below the root, 0 for the root. Padding, whose parent is 0, reads 1."""
    return fold_paths((parents >= 0).long(), parents, torch.add)


def build(
    pool: DraftTrees, nodes: Sequence[int], values: Tensor | None = None
) -> tuple[DraftTrees, Tensor]:
    """Keep the best nodes[b] - 1 candidates of every pool, and its root.

    pool: [B, P], the root and every scored candidate, in the order they were found: a candidate
    comes after its parent. A candidate's score is its cumulative log-probability, over all levels;
    of equals the earlier one wins, and a kept node's ancestors are always kept. Candidates of
    probability 0 are never kept. nodes: budget per tree, root included, each at least 1. values:
    float32 [B, P], what is accumulated in the place of the log-probabilities; at most 0.

    Returns the trees [B, max(nodes)], nodes in the pool's order, and int64 [B, max(nodes)]: the
    index in the pool of each kept node, -1 for padding.
    """
    size = pool.tokens.shape[1]
    width = max(nodes)
    score = pool.logprobs if values is None else values
    score = fold_paths(score, pool.parents, torch.add)
    # Sums of different association may put a child above its parent by rounding; the minimum over
    # the path cannot.
    score = fold_paths(score, pool.parents, torch.minimum)
    order = score.argsort(dim=-1, descending=True, stable=True)[:, :width]
    budget = torch.tensor(nodes, device=score.device)[:, None]
    kept = torch.arange(order.shape[1], device=score.device) < budget
    kept &= score.gather(-1, order) > -torch.inf
    old = torch.where(kept, order, size).sort(-1).values
    if width > old.shape[1]:
        old = functional.pad(old, (0, width - old.shape[1]), value=size)
    return _select(pool, old), torch.where(old < size, old, -1)


def reroot(trees: DraftTrees, committed: Tensor) -> tuple[DraftTrees, Tensor]:
    """Move every root down the path of its newly committed tokens; keep what is below it.

    committed: [B, L], the accepted tokens and then the bonus token, in order, padded with -1. Where
    that path leaves the tree, a lone root remains, of the last committed token; where nothing was
    committed, the tree stays as it is.

    Returns the trees [B, N], surviving nodes in their old order at the front, and int64 [B, N]: the
    new index of each old node, -1 where it was dropped, by which caches per node are compacted.
    """
    tokens, parents = trees.tokens, trees.parents
    batch, size = tokens.shape
    node = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
    root_token = tokens[:, 0]
    for token in committed.to(tokens.dtype).unbind(-1):
        child = (parents == node[:, None]) & (tokens == token[:, None]) & (tokens >= 0)
        found = torch.where(child.any(-1), child.int().argmax(-1), size)
        node = torch.where(token >= 0, found, node)
        root_token = torch.where(token >= 0, token, root_token)
    index = torch.arange(size, device=tokens.device)
    kept = fold_paths(index == node[:, None], parents, torch.logical_or) & (tokens >= 0)
    moved = torch.where(kept, kept.cumsum(-1) - 1, -1)
    below = _select(trees, torch.where(kept, index, size).sort(-1).values)
    below.tokens[:, 0] = root_token
    below.parents[:, 0] = -1
    below.logprobs[:, 0] = 0
    return below, moved


def _rounds(parents: Tensor) -> int:
    """Doublings after which every path of [B, N] trees is covered."""
    return (parents.shape[-1] - 1).bit_length()


def _select(trees: DraftTrees, old: Tensor) -> DraftTrees:
    """The nodes `old` int64 [B, M] of trees [B, N], ascending, N standing for padding. The parent
    of each is selected too, except the first's, which becomes -1."""
    batch, size = trees.tokens.shape
    new = torch.arange(old.shape[1], dtype=torch.int32, device=old.device).expand(batch, -1)
    index = torch.full((batch, size + 1), -1, dtype=torch.int32, device=old.device)
    index.scatter_(-1, old, new)

    def take(values: Tensor, padding: float) -> Tensor:
        return functional.pad(values, (0, 1), value=padding).gather(-1, old)

    parents = take(trees.parents, 0)
    renamed = index.gather(-1, parents.clamp_min(0).long())
    renamed = torch.where(parents < 0, -1, renamed)
    renamed = torch.where(old < size, renamed, 0)
    return DraftTrees(take(trees.tokens, -1), renamed, take(trees.logprobs, -torch.inf))
