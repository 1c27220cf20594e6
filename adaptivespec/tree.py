"""Draft trees: a batch of token trees as three padded tensors."""

from dataclasses import dataclass

import torch
from torch import Tensor


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


def roots(tokens: list[int], device: torch.device | str = "cpu") -> DraftTrees:
    """One-node trees ("no draft") for the given root tokens: [B, 1] each."""
    column = torch.tensor(tokens, dtype=torch.int32, device=device)[:, None]
    parents = torch.full_like(column, -1)
    return DraftTrees(column, parents, torch.zeros_like(column, dtype=torch.float32))
