"""The stand-in for SGLang's CPU kernels does what upstream's own Triton kernels do, which Triton
interprets here."""

from collections.abc import Callable
from typing import Any

import pytest
import sgl_kernel
import sgl_kernel.speculative
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.kernels.ops.speculative import cache_locs, eagle, reconstruct_tree, spec_tree
from sglang.srt.mem_cache.allocation import assign_req_to_token_pool
from sglang.srt.speculative.eagle_utils import (
    organize_draft_results,
    per_step_draft_out_cache_loc,
)
from sglang.srt.speculative.spec_utils import select_top_k_tokens
from torch import Tensor

from tests.sglang.strategies import POOL_LEN, Pool, seeds, tree_batches

few = settings(max_examples=40)  # an interpreted kernel takes some 20 ms


def expect_same(
    ours: Callable[..., Any], theirs: Callable[..., Any], outputs: dict[str, Tensor], **inputs: Any
) -> None:
    """Both write the same into fresh copies of `outputs`, given the same `inputs`."""
    got, want = ({k: v.clone() for k, v in outputs.items()} for _ in range(2))
    ours(**inputs, **got)
    theirs(**inputs, **want)
    assert {k: v.tolist() for k, v in got.items()} == {k: v.tolist() for k, v in want.items()}


def links(bs: int, n: int) -> dict[str, Tensor]:
    names = ("retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
    return {name: torch.full((bs, n), -1) for name in names}


def spelled_as_upstream(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in's kernels say retrive, as the compiled ones do."""
    return lambda **kw: kernel(**{k.replace("retrieve", "retrive"): v for k, v in kw.items()})


def lengths(bs: int, generator: torch.Generator, most: int = 20) -> Tensor:
    return torch.randint(1, most, (bs,), generator=generator)


@few
@given(masks=tree_batches(), generator=seeds)
def test_links_of_a_tree_given_by_its_mask(masks: Tensor, generator: torch.Generator) -> None:
    bs, n, _ = masks.shape
    expect_same(
        spelled_as_upstream(sgl_kernel.speculative.reconstruct_indices_from_tree_mask),
        reconstruct_tree.reconstruct_indices_from_tree_mask_triton,
        {"positions": torch.zeros(bs * n, dtype=torch.long), **links(bs, n)},
        tree_mask=masks.flatten(),
        verified_seq_len=lengths(bs, generator),
        batch_size=bs,
        draft_token_num=n,
    )


@few
@given(masks=tree_batches(), most=st.integers(1, 6), generator=seeds)
def test_the_accepted_path(masks: Tensor, most: int, generator: torch.Generator) -> None:
    bs, n, _ = masks.shape
    tree = {"positions": torch.zeros(bs * n, dtype=torch.long), **links(bs, n)}
    reconstruct_tree.reconstruct_indices_from_tree_mask_triton(
        masks.flatten(),
        torch.ones(bs, dtype=torch.long),
        **tree,
        batch_size=bs,
        draft_token_num=n,
    )
    del tree["positions"]
    tokens = torch.randint(0, 3, (2, bs, n), generator=generator)  # few, so that many agree
    expect_same(
        spelled_as_upstream(sgl_kernel.verify_tree_greedy_cpu),
        spec_tree.verify_tree_greedy_triton,
        {
            "predicts": torch.zeros(bs * n, dtype=torch.int32),
            "accept_index": torch.full((bs, most), -1, dtype=torch.int32),
            "accept_token_num": torch.zeros(bs, dtype=torch.int32),
        },
        candidates=tokens[0],
        target_predict=tokens[1],
        **tree,
    )


@few
@given(
    bs=st.integers(1, 3),
    topk=st.integers(1, 3),
    steps=st.integers(1, 3),
    generator=seeds,
    data=st.data(),
)
def test_trees_that_a_draft_model_grew(
    bs: int, topk: int, steps: int, generator: torch.Generator, data: st.DataObject
) -> None:
    """As SGLang's draft workers grow them, from a draft model's topk tokens after each branch."""
    scores, hidden = None, torch.empty(0)
    grown = []
    for step in range(steps):
        shape = (bs * topk if step else bs, topk)
        probs, tokens = torch.rand(shape, generator=generator), torch.zeros(shape).long()
        hidden = torch.zeros(shape[0], 1)
        _, _, scores, tree = select_top_k_tokens(step, probs, tokens, hidden, scores, topk)
        grown.append(tree)
    n = 1 + data.draw(st.integers(1, topk + (steps - 1) * topk**2))
    parent_list, selected, _ = organize_draft_results(*map(list, zip(*grown, strict=True)), n)
    expect_same(
        spelled_as_upstream(sgl_kernel.build_tree_kernel_efficient_cpu),
        spec_tree.sgl_build_tree_kernel_triton,
        {
            "tree_mask": torch.ones(bs * n * n, dtype=torch.bool),
            "positions": torch.zeros(bs * n, dtype=torch.long),
            **links(bs, n),
        },
        parent_list=parent_list,
        selected_index=selected,
        verified_seq_len=lengths(bs, generator),
        topk=topk,
        depth=steps,
        draft_token_num=n,
        tree_mask_mode=spec_tree.TreeMaskMode.QLEN_ONLY,
    )


def launched(kernel: Any, grid: int, **constants: Any) -> Callable[..., Any]:
    return lambda **kwargs: kernel[(grid,)](**kwargs, **constants)


@given(bs=st.integers(1, 4), generator=seeds)
def test_slots_to_positions_and_back(bs: int, generator: torch.Generator) -> None:
    pool = Pool(bs, generator)
    slots = torch.randperm(1000, generator=generator)[: int((pool.end - pool.start).sum())]
    expect_same(
        sgl_kernel.assign_req_to_token_pool_cpu,
        launched(assign_req_to_token_pool, bs, bs_upper=4),
        {"req_to_token": pool.req_to_token},
        out_cache_loc=slots,
        **pool.spans(),
    )
    expect_same(
        sgl_kernel.assign_extend_cache_locs_cpu,
        launched(cache_locs.assign_extend_cache_locs, bs, bs_upper=4),
        {"out_cache_loc": torch.zeros_like(slots)},
        req_to_token=pool.req_to_token,
        **pool.spans(),
    )


@given(bs=st.integers(1, 3), topk=st.integers(1, 3), steps=st.integers(1, 4), generator=seeds)
def test_slots_of_the_branches_of_a_draft(
    bs: int, topk: int, steps: int, generator: torch.Generator
) -> None:
    pool = Pool(bs, generator)
    common = (pool.rows, pool.req_to_token, pool.start)
    slots, theirs = torch.zeros(2, bs * topk * steps, dtype=torch.long)
    sgl_kernel.assign_draft_cache_locs_contiguous_cpu(*common, slots, POOL_LEN, topk, steps)
    cache_locs.assign_draft_cache_locs_contiguous[(bs,)](*common, theirs, POOL_LEN, topk, steps)
    assert slots.tolist() == theirs.tolist()

    table = sgl_kernel.build_draft_decode_metadata_cpu(
        pool.req_to_token, pool.rows, pool.start, topk, steps, POOL_LEN
    )
    by_step = per_step_draft_out_cache_loc(slots, bs, topk, steps)
    for branch, row in enumerate(table):
        request = branch // topk
        length = int(pool.start[request])
        assert row[:length].equal(pool.req_to_token[pool.rows[request], :length])
        assert row[length : length + steps].tolist() == by_step[:, branch].tolist()


@given(bs=st.integers(1, 4), most=st.integers(1, 5), generator=seeds)
def test_what_was_accepted_is_gathered(bs: int, most: int, generator: torch.Generator) -> None:
    lens = lengths(bs, generator, most + 1).int()
    index = torch.randint(0, 50, (bs, most), generator=generator, dtype=torch.int32)
    index[torch.arange(most) >= lens.unsqueeze(1)] = -1
    size = bs * most
    expect_same(
        sgl_kernel.fill_accept_out_cache_loc_cpu,
        launched(eagle.fill_accept_out_cache_loc, size, size_upper=32),
        {"accept_out_cache_loc": torch.zeros(size, dtype=torch.long)},
        accept_index=index,
        out_cache_loc=torch.randperm(50, generator=generator),
    )
    bonus, theirs = torch.zeros(2, bs, dtype=torch.int32)
    sgl_kernel.fill_bonus_tokens_cpu(index.flatten(), lens, bonus, most)
    eagle.fill_bonus_tokens[(bs,)](index.flatten(), lens, theirs, most)
    assert bonus.tolist() == theirs.tolist()


@given(moved=st.integers(1, 12), generator=seeds)
def test_slots_move_in_every_buffer_at_once(moved: int, generator: torch.Generator) -> None:
    """Sources are targets too, as when a path moves to the front of its tree."""
    before = [torch.rand(16, width, generator=generator) for width in (3, 8)]
    after = [buffer.clone() for buffer in before]
    targets, sources = (torch.randperm(16, generator=generator)[:moved] for _ in range(2))
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([buffer.data_ptr() for buffer in after], dtype=torch.uint64),
        torch.tensor([buffer.stride(0) * buffer.itemsize for buffer in after]),
        targets,
        sources,
    )
    for old, new in zip(before, after, strict=True):
        assert new.equal(old.index_copy(0, targets, old[sources]))


def test_any_other_kernel_says_its_name() -> None:
    with pytest.raises(NotImplementedError, match="rotate_input_ids_cpu"):
        sgl_kernel.rotate_input_ids_cpu()
    with pytest.raises(AttributeError, match="rmsnorm_cpu"):
        torch.ops.sgl_kernel.rmsnorm_cpu()
