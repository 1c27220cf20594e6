"""Sampling parameters, and the target's own token at every node of a draft tree.

A step draws the target's token at *every* node, and the walk keeps the nodes that agree with it.
That is exactly lossless: what is emitted after any prefix is the target's own draw for that prefix.
The draw at an output position depends on the seed and that position alone, so the text for a seed
is the same, token for token, whatever was drafted (up to the numerics of the forward pass).
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptivespec.kernels import choices


class SamplingParams(msgspec.Struct, frozen=True):
    """How the target chooses its own token. temperature 0 is greedy; top_k 0 and the 1.0/0.0
    defaults of top_p/min_p mean "off". `seed` fixes the draw at every position of the output."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Temperatures too small to divide logits by count as 0."""
        return self.temperature < 1e-5


def uniforms(seed: int, start: int, count: int) -> NDArray[np.float64]:
    """The draws, uniform on [0, 1), of output positions start .. start + count - 1.

    Counter-based (Philox 4x64, Salmon et al. 2011): each is a function of the seed (any integer,
    taken modulo 2^64) and its absolute position, whichever steps ask for it.

    All nodes of one depth stand for the same output position and share its draw. That is exact: the
    walk passes one node per depth, so of the tokens made from a draw one is emitted, and its prefix
    depends on earlier draws only.
    """
    words_per_position = 4  # one Philox block
    stream = np.random.Philox(key=seed % 2**64, counter=start)
    words = stream.random_raw(words_per_position * count)[::words_per_position]
    return np.ldexp((words >> np.uint64(11)).astype(np.float64), -53)


def most_likely(logits: Tensor) -> Tensor:
    """int64 [T]: the argmax of each row of logits [T, V], of equals the lowest."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        argmax = np.empty(len(logits), np.int64)
        choices.argmax(logits.contiguous().numpy(), argmax)
        return torch.from_numpy(argmax)
    return logits.max(-1).indices


def gaps(logits: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """How far every node is from its parent's top-1, and every node's own top-1 token.

    logits: [T, V], at T packed nodes. tokens: int [T]. parents: int [T], the row of each node's
    parent, -1 at roots. Returns float32 [T], ln p(node | parent) - ln p(top-1 | parent), which the
    softmax leaves equal to the difference of the logits, -inf at roots and padding (token < 0);
    and int64 [T], the argmax, of equals the lowest.
    """
    argmax = most_likely(logits)
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        gap = torch.empty(len(tokens))
        arrays = (each.contiguous().numpy() for each in (logits, tokens, parents, argmax))
        choices.gaps(*arrays, gap.numpy())
        return gap, argmax
    above = parents.clamp_min(0).long()
    gap = logits[above, tokens.clamp_min(0).long()].float() - logits[above, argmax[above]].float()
    return torch.where((parents >= 0) & (tokens >= 0), gap, -torch.inf), argmax


def target_tokens(
    logits: Tensor,
    params: Sequence[SamplingParams],
    draws: Tensor,
    argmax: Tensor | None = None,
) -> Tensor:
    """The target's own token at every row -> int64 [T].

    logits: [T, V]. params: one per row. draws: float64 [T] in [0, 1), see `uniforms`; unused at
    greedy rows. argmax: int64 [T], when already known. A greedy row takes its argmax, of equals the
    lowest. Any other row is filtered as in Hugging Face transformers and SGLang: temperature, then
    top_k, then top_p over what top_k left, then min_p relative to the top-1; candidates that tie
    with the last one kept are kept too. Then its draw is put through the inverse of the cumulative
    distribution in vocabulary order.
    """
    chosen = most_likely(logits) if argmax is None else argmax
    sampled = [row for row, p in enumerate(params) if not p.greedy]
    if not sampled:
        return chosen
    rows = torch.tensor(sampled, device=logits.device)
    drawn = _draw(logits[rows], [params[row] for row in sampled], draws.to(logits.device)[rows])
    return chosen.index_copy(0, rows, drawn)


def _draw(logits: Tensor, params: Sequence[SamplingParams], draws: Tensor) -> Tensor:
    """Sample every row of logits [T, V] -> int64 [T]; none is greedy."""
    scores = logits.float()
    scores = scores - scores.amax(-1, keepdim=True)  # top-1 at 0: no overflow at low temperatures
    scores /= _column([p.temperature for p in params], scores)
    weights = scores.exp()
    for cutoff in _cutoffs(scores, params):
        weights = torch.where(scores >= cutoff, weights, 0.0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # 1 - u is uniform on (0, 1], so a token of weight 0 is never hit, and the last one always is.
    threshold = (1 - draws.double())[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold)[:, 0]


def _cutoffs(scores: Tensor, params: Sequence[SamplingParams]) -> list[Tensor]:
    """The smallest scores [T, 1] that each active filter lets through."""
    cutoffs = []
    vocabulary = scores.shape[-1]
    top_k = [p.top_k if 0 < p.top_k < vocabulary else vocabulary for p in params]
    if min(top_k) < vocabulary:
        largest = max(k for k in top_k if k < vocabulary)
        last = torch.tensor(top_k, device=scores.device)[:, None]
        kth = scores.topk(largest).values.gather(-1, (last - 1).clamp_max(largest - 1))
        cutoffs.append(torch.where(last < vocabulary, kth, -torch.inf))
    if any(p.top_p < 1 for p in params):
        allowed = torch.where(scores >= cutoffs[0], scores, -torch.inf) if cutoffs else scores
        cutoffs.append(_nucleus(allowed, [p.top_p for p in params]))
    if any(p.min_p > 0 for p in params):
        floor = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        cutoffs.append(_column(floor, scores))
    return cutoffs


def _nucleus(scores: Tensor, top_p: Sequence[float]) -> Tensor:
    """The score [T, 1] of the last of the fewest best candidates that hold at least `top_p` of the
    probability; -inf where top_p is 1."""
    share = torch.tensor(top_p, dtype=torch.float64, device=scores.device)[:, None]
    mass = share * scores.exp().sum(-1, keepdim=True, dtype=torch.float64)
    for considered in (256, 4096, scores.shape[-1]):  # a full sort is 30 times the cost of 256
        best = scores.topk(min(considered, scores.shape[-1])).values
        held = best.exp().cumsum(-1, dtype=torch.float64)
        if bool(((held[:, -1:] >= mass) | (share == 1)).all()):
            break
    last = torch.searchsorted(held, mass).clamp_max(best.shape[-1] - 1)
    return torch.where(share < 1, best.gather(-1, last), -torch.inf)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
