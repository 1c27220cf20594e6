"""Trees in SGLang's own form, and its walk over them."""

from types import SimpleNamespace
from typing import Any

import tests.sglang.engine  # isort: skip  # noqa: F401  the shims, before SGLang

import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.sampling import SamplingParams
from adaptivespec.sglang.verify import choose, links, verify_input, walk
from adaptivespec.tree import ancestor_mask, depths
from tests.adaptivespec.trees import VOCABULARY, Tree, batch, trees
from tests.adaptivespec.trees import walk as slow_walk

forests = st.lists(trees(), min_size=1, max_size=3)


def schedule_batch(lengths: list[int]) -> Any:
    """What `verify_input` reads of SGLang's batch: how much of each request is cached."""
    seq_lens = torch.tensor(lengths)
    return SimpleNamespace(seq_lens=seq_lens, seq_lens_cpu=seq_lens)


@given(forests)
def test_links_lead_from_each_node_to_its_children_in_order(forest: list[Tree]) -> None:
    first_child, next_sibling = links(batch(forest))
    for row, tree in enumerate(forest):
        for node in range(len(tree.tokens)):
            found, child = [], int(first_child[row, node])
            while child >= 0:
                found.append(child)
                child = int(next_sibling[row, child])
            assert found == tree.children(node)
        for padding in range(len(tree.tokens), first_child.shape[1]):
            assert int(first_child[row, padding]) == -1
            assert padding not in first_child[row].tolist() + next_sibling[row].tolist()


@given(forests, st.data())
def test_the_full_mask_is_every_cached_token_and_then_the_tree(
    forest: list[Tree], data: st.DataObject
) -> None:
    drafted = batch(forest)
    lengths = data.draw(
        st.lists(st.integers(0, 5), min_size=len(forest), max_size=len(forest)), label="lengths"
    )
    spec = verify_input(drafted, schedule_batch(lengths), full_mask=True)
    below = ancestor_mask(drafted.parents)
    expected = [
        torch.cat([torch.ones(below.shape[1], length, dtype=torch.bool), below[row]], 1).flatten()
        for row, length in enumerate(lengths)
    ]
    assert torch.equal(spec.custom_mask, torch.cat(expected))


@given(forests)
def test_positions_follow_depth_and_padding_stays_within_the_context(forest: list[Tree]) -> None:
    drafted = batch(forest)
    lengths = list(range(3, 3 + len(forest)))
    spec = verify_input(drafted, schedule_batch(lengths), full_mask=False)
    below = spec.positions.view(drafted.tokens.shape) - torch.tensor(lengths)[:, None]
    real = drafted.tokens >= 0
    assert torch.equal(below[real], depths(drafted.parents)[real])
    assert not below[~real].any()


@given(forests, st.data())
def test_sglangs_walk_follows_what_is_predicted(forest: list[Tree], data: st.DataObject) -> None:
    """Its kernel decides in production; the margin rule only prepares what it follows."""
    drafted = batch(forest)
    predict = torch.tensor(
        [
            [data.draw(st.integers(0, VOCABULARY - 1)) for _ in range(drafted.tokens.shape[1])]
            for _ in forest
        ]
    )
    spec = verify_input(drafted, schedule_batch([2] * len(forest)), full_mask=False)
    theirs = walk(spec, predict).plain()
    for row, (path, bonus) in enumerate(slow_walk(drafted, predict)):
        padding = [-1] * (theirs.path.shape[1] - len(path))
        assert theirs.path[row].tolist() == path + padding
        assert int(theirs.accepted[row]) == len(path) - 1
        assert int(theirs.bonus[row]) == bonus


@given(trees(), st.integers(0, 2**32 - 1))
def test_gaps_are_to_the_parents_top_1(tree: Tree, seed: int) -> None:
    drafted = batch([tree, tree])
    size = drafted.tokens.shape[1]
    logits = torch.randn(2 * size, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    target, gap = choose(logits, drafted, [SamplingParams()] * 2, [7, 9])
    assert torch.equal(target, logits.argmax(-1).view(2, size))
    for row in range(2):
        at = logits[row * size : (row + 1) * size].log_softmax(-1)
        for node, parent in enumerate(tree.parents):
            expected = at[parent, tree.tokens[node]] - at[parent].max() if node else -torch.inf
            assert torch.isclose(gap[row, node], torch.as_tensor(expected), atol=1e-6)
