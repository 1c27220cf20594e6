"""What a step accepts of the verified trees, as plain values."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptivespec.guards import NO_STEP_GUARDS, StepGuards
from adaptivespec.kernels import acceptance as kernels
from adaptivespec.margin import Walk, promotions
from adaptivespec.messages import Verified
from adaptivespec.tree import DraftTrees, depths

Array = NDArray[Any]

_ANY = 2**31  # promotions: more than a step can have


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
    """What became of a step's trees [B, N]: each one's outcome, and the accepted nodes of all,
    int64 [B, N], the roots first, padded with -1."""

    outcomes: list[Acceptance]
    trees: DraftTrees
    path: Tensor


def accept(verified: Verified, kappa: list[float], guards: StepGuards = NO_STEP_GUARDS) -> Verdict:
    """Apply the margin rule to each tree of the answer, with its own kappa and guards, and follow
    it from the root."""
    tokens, parents, target = (
        _view(data, verified.nodes, np.int32)
        for data in (verified.tokens, verified.parents, verified.target)
    )
    logprobs, gap = (
        _view(data, verified.nodes, np.float32) for data in (verified.logprobs, verified.gap)
    )
    trees = DraftTrees(*map(torch.from_numpy, (tokens, parents, logprobs)))
    if guards.never is not None:
        replaced = torch.from_numpy(target), torch.from_numpy(gap)
        gap = guards.allowed(trees.tokens, trees.parents, *replaced).numpy()
    path, promoted = np.empty(tokens.shape, np.int64), np.empty(tokens.shape, np.bool_)
    caps = np.full(len(kappa), _ANY) if guards.caps is None else guards.caps.numpy()
    log_kappa = np.log(np.array(kappa, np.float32))
    kernels.follow(tokens, parents, target, gap, log_kappa, caps, path, promoted)
    drafted, levels = np.empty((2, len(kappa)), np.int64)
    kernels.measure(tokens, parents, drafted, levels)
    rows = zip(tokens, target, gap, path, promoted, drafted.tolist(), levels.tolist(), strict=True)
    return Verdict([_outcome(*row) for row in rows], trees, torch.from_numpy(path))


def _outcome(
    tokens: Array,
    target: Array,
    gap: Array,
    path: Array,
    promoted: Array,
    drafted: int,
    levels: int,
) -> Acceptance:
    nodes = path[path >= 0]
    jumps = nodes[promoted[: len(nodes)]]
    margin = float(np.exp(gap[jumps].min())) if len(jumps) else 1.0
    return Acceptance(
        path=nodes.tolist(),
        tokens=tokens[nodes[1:]].tolist(),
        promoted=promoted[1 : len(nodes)].tolist(),
        bonus=int(target[nodes[-1]]),
        margin=margin,
        drafted=drafted,
        depth=levels,
    )


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


def _view(data: bytearray, nodes: int, dtype: type) -> Array:
    """[B, nodes] over the message's own bytes."""
    return np.frombuffer(data, dtype).reshape(-1, nodes)
