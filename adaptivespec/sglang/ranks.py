"""Tensor parallelism: rank 0 talks to the drafter and decides; the other ranks do as it does."""

from typing import Any

import torch
from torch import Tensor

from adaptivespec.tree import DraftTrees


class Ranks:
    """SGLang's tensor-parallel group. With one rank, everything here is the identity."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self.first = group.rank_in_group == 0
        self._several = group.world_size > 1

    def agree(self, choice: Tensor) -> Tensor:
        """Rank 0's values, in place: two ranks' logits may differ in their last bits."""
        return self._group.broadcast(choice, src=0) if self._several else choice

    def share(self, trees: DraftTrees | None, rows: int, device: torch.device) -> DraftTrees:
        """Rank 0's trees on every rank; the others pass None. The log-probabilities stay behind:
        verification does not read them."""
        if not self._several:
            assert trees is not None
            return trees
        size = torch.tensor([0 if trees is None else trees.tokens.shape[1]], device=device)
        nodes = int(self.agree(size))
        if trees is None:
            packed = torch.empty((2, rows, nodes), dtype=torch.int32, device=device)
        else:
            packed = torch.stack((trees.tokens, trees.parents))
        tokens, parents = self.agree(packed)
        return DraftTrees(tokens, parents, torch.zeros_like(tokens, dtype=torch.float32))
