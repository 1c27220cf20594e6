"""What a step accepts of the verified trees, as plain values."""

from typing import NamedTuple

import torch
from torch import Tensor

from adaptivespec.guards import NO_STEP_GUARDS, StepGuards
from adaptivespec.margin import Walk, promotions, walk
from adaptivespec.messages import Verified
from adaptivespec.tree import DraftTrees, depths


class Acceptance(NamedTuple):
    """One tree's outcome. `path` has the root in front; `tokens` and `promoted` are of the accepted
    nodes below it, in order; `margin` is the smallest promoted p(node) / p(top-1), 1 without any;
    `drafted` and `depth` are the nodes and levels below the root, accepted or not."""

    path: list[int]
    tokens: list[int]
    promoted: list[bool]
    bonus: int
    margin: float
    drafted: int
    depth: int


class Verdict(NamedTuple):
    """What became of a step's trees: each one's outcome, and the walks over all."""

    outcomes: list[Acceptance]
    trees: DraftTrees
    walk: Walk


def accept(verified: Verified, kappa: list[float], guards: StepGuards = NO_STEP_GUARDS) -> Verdict:
    """Apply the margin rule to each tree of the answer, with its own kappa and guards, and walk
    it."""
    tokens = _view(verified.tokens, verified.nodes)
    parents = _view(verified.parents, verified.nodes)
    target = _view(verified.target, verified.nodes)
    gap = _view(verified.gap, verified.nodes, torch.float32)
    logprobs = _view(verified.logprobs, verified.nodes, torch.float32)
    predict, promoted = guards.promote(tokens, parents, target, gap, torch.tensor(kappa))
    walked = walk(tokens, parents, predict)
    trees = DraftTrees(tokens, parents, logprobs)
    return Verdict(outcomes(tokens, parents, walked, promoted, gap), trees, walked)


def outcomes(
    tokens: Tensor, parents: Tensor, walked: Walk, promoted: Tensor, gap: Tensor
) -> list[Acceptance]:
    """What walks of trees [B, N] accepted; `promoted` and `gap` [B, N] as in `margin.promote`."""
    jumps = promotions(walked.path, promoted, gap)
    real = tokens >= 0
    # Plain lists all at once: reading tensors one element at a time costs more than the method.
    columns = zip(
        walked.path.tolist(),
        tokens.gather(-1, walked.path.clamp_min(0)).tolist(),
        jumps.nodes.tolist(),
        (walked.accepted + 1).tolist(),
        walked.bonus.tolist(),
        jumps.smallest.tolist(),
        (real.sum(-1) - 1).tolist(),
        torch.where(real, depths(parents), 0).amax(-1).tolist(),
        strict=True,
    )
    return [
        Acceptance(path[:n], run[1:n], jumped[1:n], bonus, margin, drafted, depth)
        for path, run, jumped, n, bonus, margin, drafted, depth in columns
    ]


def _view(data: bytearray, nodes: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """[B, nodes] over the message's own bytes."""
    return torch.frombuffer(data, dtype=dtype).view(-1, nodes)
