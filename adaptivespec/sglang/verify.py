"""Trees as SGLang verifies them, and what its target makes of every node."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from sglang.kernels.ops.speculative.cache_locs import assign_extend_cache_locs_uniform_func
from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_func
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from torch import Tensor

from adaptivespec.margin import Walk
from adaptivespec.sampling import SamplingParams, gaps, target_tokens, uniforms
from adaptivespec.tree import DraftTrees, ancestor_mask, depths

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch


class Links(NamedTuple):
    """SGLang's form of a tree, int64 [B, N]: each node's first child and its next sibling, -1 where
    there is none; padding hangs nowhere."""

    first_child: Tensor
    next_sibling: Tensor


class Walked(NamedTuple):
    """What a walk accepted.

    predict      int32 [B * N]: the token after every node on the path
    accept_index int32 [B, N]: rows of the accepted nodes, the root first; padded with -1
    accept_lens  int32 [B]: their number, the root for the bonus token included
    """

    predict: Tensor
    accept_index: Tensor
    accept_lens: Tensor

    def plain(self) -> Walk:
        """The same with rows counted within each tree."""
        rows, size = self.accept_index.shape
        first = torch.arange(0, rows * size, size, device=self.accept_index.device)[:, None]
        path = torch.where(self.accept_index >= 0, self.accept_index - first, -1)
        accepted = (self.accept_lens - 1).long()
        last = self.accept_index.gather(-1, accepted[:, None])
        return Walk(path, accepted, self.predict[last[:, 0].long()])


def links(trees: DraftTrees) -> Links:
    """From parents to SGLang's links, for trees [B, N]."""
    size = trees.tokens.shape[1]
    index = torch.arange(size, device=trees.tokens.device)
    parents = torch.where(trees.tokens >= 0, trees.parents, -2).long()
    child = parents[:, None, :] == index[:, None]  # [b, i, j]: j is a child of i
    sibling = (parents[:, :, None] == parents[:, None, :]) & (parents[:, :, None] >= 0)
    sibling &= index > index[:, None]
    return Links(_first(child), _first(sibling))


def _first(mask: Tensor) -> Tensor:
    """The first true column of each row of [B, N, N], -1 where there is none: int64 [B, N]."""
    return torch.where(mask.any(-1), mask.int().argmax(-1), -1)


def verify_input(trees: DraftTrees, batch: "ScheduleBatch", full_mask: bool) -> NgramVerifyInput:
    """What TARGET_VERIFY needs of trees [B, N]. `full_mask`: the mask also covers the cached
    tokens, as SGLang's GPU kernels read it; its CPU kernel reads the tree's part alone."""
    rows, size = trees.tokens.shape
    real = trees.tokens >= 0
    depth = torch.where(real, depths(trees.parents), 0)
    mask = ancestor_mask(trees.parents)
    first_child, next_sibling = links(trees)
    return NgramVerifyInput(
        draft_token=trees.tokens.clamp_min(0).long().flatten(),
        custom_mask=_with_prefix(mask, batch) if full_mask else mask.flatten(),
        positions=(batch.seq_lens[:, None] + depth).flatten(),
        retrieve_index=torch.arange(rows * size, device=real.device).view(rows, size),
        retrieve_next_token=first_child,
        retrieve_next_sibling=next_sibling,
        draft_token_num=size,
    )


def _with_prefix(mask: Tensor, batch: "ScheduleBatch") -> Tensor:
    """bool [sum over b of N * (seq_len[b] + N)]: row by row, every cached token and then the tree's
    own part [B, N, N]."""
    size = mask.shape[1]
    width = batch.seq_lens.long() + size
    start = size * (width.cumsum(0) - width)
    total = size * (int(batch.seq_lens_cpu.sum()) + len(width) * size)
    node = torch.arange(size, device=mask.device)
    at = (start + batch.seq_lens)[:, None, None] + width[:, None, None] * node[:, None] + node
    full = torch.ones(total, dtype=torch.bool, device=mask.device)
    full[at.flatten()] = mask.flatten()
    return full


def prepare(batch: "ScheduleBatch", trees: DraftTrees, device: torch.device) -> NgramVerifyInput:
    """Turn a decode batch into one that verifies trees [B, N]; SGLang restores it later."""
    spec = verify_input(trees, batch, full_mask=device.type != "cpu")
    batch.forward_mode = ForwardMode.TARGET_VERIFY
    batch.input_ids = spec.draft_token
    batch.spec_info = spec
    batch.out_cache_loc = assign_extend_cache_locs_uniform_func(
        req_pool_indices=batch.req_pool_indices,
        req_to_token=batch.req_to_token_pool.req_to_token,
        start_offset=batch.seq_lens,
        batch_size=len(batch.reqs),
        draft_token_num=spec.draft_token_num,
        device=device,
    )
    return spec


def nothing_carried(seq_lens: Tensor, accept_lens: Tensor) -> NgramVerifyInput:
    """What SGLang carries from a step to the next. It has a form to keep, and no content: the
    tokens are read from the requests."""
    return NgramVerifyInput(
        draft_token_num=1,
        new_seq_lens=seq_lens,
        accept_tokens=torch.zeros_like(accept_lens),
        accept_lens=accept_lens,
    )


def choose(
    logits: Tensor, trees: DraftTrees, sampling: Sequence[SamplingParams], starts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The target's own token at every node, int64 [B, N], and each node's gap to its parent's
    top-1, float32 [B, N] as in `margin.promote`.

    logits [B * N, V]. sampling, starts: per request, and the position of its root.
    """
    rows, size = trees.tokens.shape
    first = torch.arange(0, rows * size, size, device=logits.device)[:, None]
    parents = torch.where(trees.parents < 0, -1, trees.parents + first)
    gap, argmax = gaps(logits, trees.tokens.flatten(), parents.flatten())
    if all(params.greedy for params in sampling):
        return argmax.view(rows, size), gap.view(rows, size)
    draws = torch.zeros((rows, size), dtype=torch.float64)
    depth = depths(trees.parents).cpu()
    for row, (params, start) in enumerate(zip(sampling, starts, strict=True)):
        if not params.greedy:
            draws[row] = torch.from_numpy(uniforms(params.seed, start + 1, size))[depth[row]]
    each = [params for params in sampling for _ in range(size)]
    return target_tokens(logits, each, draws.flatten(), argmax).view(rows, size), gap.view(
        rows, size
    )


def walk(spec: NgramVerifyInput, predict: Tensor) -> Walked:
    """SGLang's own walk: from each root, follow the child that is `predict` [B, N], int64."""
    rows, size = predict.shape
    tokens = torch.zeros(rows * size, dtype=torch.int32, device=predict.device)
    index = torch.full((rows, size), -1, dtype=torch.int32, device=predict.device)
    accepted = torch.empty(rows, dtype=torch.int32, device=predict.device)
    tokens, index, accepted = verify_tree_greedy_func(
        predicts=tokens,
        accept_index=index,
        accept_token_num=accepted,
        candidates=spec.draft_token.view(rows, size),
        retrieve_index=spec.retrieve_index,
        retrieve_next_token=spec.retrieve_next_token,
        retrieve_next_sibling=spec.retrieve_next_sibling,
        target_predict=predict,
    )
    return Walked(tokens, index, accepted + 1)
