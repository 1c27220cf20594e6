"""Tree operations against slow versions over plain lists."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.tree import ancestor_mask, depths, fold_paths, pad, roots
from tests.adaptivespec.trees import Tree, batch, trees, unbatch

batches = st.lists(trees(), min_size=1, max_size=4)


@given(batches)
def test_mask_and_depths_follow_the_parents(rows: list[Tree]) -> None:
    forest = batch(rows)
    mask, depth = ancestor_mask(forest.parents), depths(forest.parents)
    for b, tree in enumerate(rows):
        for i in range(len(tree.tokens)):
            assert mask[b, i].nonzero()[:, 0].tolist() == tree.path(i)
            assert depth[b, i] == len(tree.path(i)) - 1
        for i in range(len(tree.tokens), mask.shape[1]):
            assert mask[b, i].nonzero()[:, 0].tolist() == [0, i]


@given(batches)
def test_fold_paths_combines_from_the_root_down(rows: list[Tree]) -> None:
    forest = batch(rows)
    total = fold_paths(forest.logprobs, forest.parents, torch.add)
    lowest = fold_paths(forest.tokens, forest.parents, torch.minimum)
    for b, tree in enumerate(rows):
        for i in range(len(tree.tokens)):
            assert total[b, i] == sum(tree.logprobs[j] for j in tree.path(i))
            assert lowest[b, i] == min(tree.tokens[j] for j in tree.path(i))


def test_pad_joins_batches_of_different_width() -> None:
    chain = Tree([1, 2, 3], [-1, 0, 1], [0.0, -1.0, -2.0])
    joined = pad(batch([chain, chain]), roots([7]))
    assert list(unbatch(joined)) == [chain, chain, Tree([7], [-1], [0.0])]
