"""Draft trees: a batch of token trees as three padded tensors, and what is done to them.

Every operation is batched and free of loops over nodes and of host synchronisation: facts about a
node's path from the root come from `fold_paths`, which doubles its reach at every round.
"""

from collections.abc import Callable
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


def _rounds(parents: Tensor) -> int:
    """Doublings after which every path of [B, N] trees is covered."""
    return (parents.shape[-1] - 1).bit_length()
