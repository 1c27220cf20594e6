"""The margin rule for a batch of trees on a device, of which another walk makes accepted tokens;
`kernels.acceptance` is the rule and the walk on a CPU.

The rule is that of arXiv 2609.02897, at temperature 0; docs/method.md tells its choices.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from adaptivespec.tree import fold_paths


class Walk(NamedTuple):
    """What a step accepts of each tree.

    path     int64 [B, N]: the accepted nodes in order, the root first; padded with -1
    accepted int64 [B]: accepted nodes below the root
    bonus    [B]: the token emitted after the last accepted node, of the dtype of `predict`
    """

    path: Tensor
    accepted: Tensor
    bonus: Tensor


class Promotions(NamedTuple):
    """Which accepted nodes the margin rule let through.

    nodes    bool [B, N]: aligned with Walk.path; True where that node was promoted
    total    int64 [B]: promoted nodes on the path
    smallest float32 [B]: the smallest p_target(node) / p_target(top-1) among them; 1 without any
    """

    nodes: Tensor
    total: Tensor
    smallest: Tensor


def promote(
    tokens: Tensor,
    parents: Tensor,
    target: Tensor,
    gap: Tensor,
    kappa: Tensor,
    max_promotions: Tensor | int | None = None,
) -> tuple[Tensor, Tensor]:
    """Let a drafted child stand in for the target's own token where the rule allows it.

    tokens, parents: int32 [B, N] as in DraftTrees. target: int [B, N], the target's token at every
    node. gap: float32 [B, N], ln p_target(node | its parent) - ln p_target(top-1 | its parent), at
    most 0; -inf forbids a node to be promoted, as at roots and padding. kappa: float32 [B] in
    (0, 1]; 1 is strict and promotes nothing, not even a tie with the top-1: pass it for requests
    that sample. max_promotions: per step, int [B] or one for all; None for no cap.

    At a node none of whose children is the target's token, the child of the largest gap >= ln kappa
    is promoted, of equals the one of lower index; not below `max_promotions` promotions on the way
    from the root. Returns (predict, promoted): `target` with the promoted children's tokens in
    place, and bool [B, N], the nodes at which that happened.
    """
    above = parents.clamp_min(0).long()
    drafted = (parents >= 0) & (tokens >= 0)
    exact = drafted & (tokens == target.gather(-1, above))
    matched = torch.zeros_like(above).scatter_add(-1, above, exact.long())
    passing = drafted & (matched.gather(-1, above) == 0)
    passing &= (gap >= kappa.log()[:, None]) & (kappa < 1)[:, None]

    gap = torch.where(passing, gap, -torch.inf)
    best = torch.full_like(gap, -torch.inf).scatter_reduce(-1, above, gap, "amax")
    passing &= gap == best.gather(-1, above)
    size = tokens.shape[-1]
    index = torch.where(passing, torch.arange(size, device=tokens.device), size)
    child = torch.full_like(index, size).scatter_reduce(-1, above, index, "amin")
    promoted = child < size

    if max_promotions is not None:
        # The first promotions of a path are those within the cap, so counting all of them, the
        # forbidden too, forbids the right ones.
        edge = passing & (index == child.gather(-1, above))
        spent = fold_paths(edge.long(), parents, torch.add)
        cap = torch.as_tensor(max_promotions, device=spent.device)
        promoted = promoted & (spent < cap.reshape(-1, 1))

    token = tokens.gather(-1, child.clamp_max(size - 1)).to(target.dtype)
    return torch.where(promoted, token, target), promoted


def promotions(path: Tensor, promoted: Tensor, gap: Tensor) -> Promotions:
    """What `promote` did along Walk.path [B, N]; `promoted` and `gap` [B, N] as there."""
    node = path.clamp_min(0)
    before = node.roll(1, -1)
    jumped = promoted.gather(-1, before) & (path >= 0)
    jumped[:, 0] = False
    margin = torch.where(jumped, gap.gather(-1, node), 0.0).amin(-1).exp()
    return Promotions(jumped, jumped.sum(-1), margin)
