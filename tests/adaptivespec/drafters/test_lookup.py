"""What `LookupDrafter` promises: smoothed counts over the continuations of earlier occurrences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.drafters.base import Extension
from adaptivespec.drafters.lookup import BACKOFF, LookupDrafter
from adaptivespec.shape import NO_DRAFT, Shape
from adaptivespec.tree import DraftTrees

CHAIN = Shape(4, 1, 5)


def drafter_of(tokens: list[int], **orders: int) -> tuple[LookupDrafter, float]:
    """A drafter whose request 0 holds `tokens`, and the confidence after the last of them."""
    drafter = LookupDrafter(**orders)
    drafter.open(0, tokens[0], 1024)
    return drafter, drafter.commit([Extension(0, tokens[1:])], None).item()


def test_one_occurrence_is_worth_a_half() -> None:
    drafter, confidence = drafter_of([1, 2, 3, 4, 5, 6, 1, 2, 3])
    trees = drafter.draft([0], [CHAIN])
    assert trees.tokens.tolist() == [[3, 4, 5, 6, 1]]
    assert trees.parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert trees.logprobs[0].tolist() == pytest.approx([0.0] + [math.log(0.5)] * 4)
    assert confidence == pytest.approx(0.5)


def test_probabilities_are_counts_with_one_escape() -> None:
    # (1, 2, 3) was followed by 7 twice and by 8 once.
    drafter, confidence = drafter_of([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 3], min_ngram=3)
    trees = drafter.draft([0], [Shape(1, 4, 4)])
    assert trees.tokens.tolist() == [[3, 7, 8, -1]]
    assert trees.logprobs[0, 1:3].exp().tolist() == pytest.approx([2 / 4, 1 / 4])
    assert trees.logprobs[0, 3] == -math.inf
    assert confidence == pytest.approx(2 / 4)


def test_shorter_matches_weigh_less() -> None:
    # (1, 2) was followed by 9 once; 2 alone by 5 once.
    drafter, _ = drafter_of([1, 2, 9, 4, 2, 5, 1, 2], max_ngram=2)
    trees = drafter.draft([0], [Shape(1, 4, 4)])
    assert trees.tokens[0].tolist() == [2, 9, 5, -1]
    whole = 1 + BACKOFF + 1
    assert trees.logprobs[0, 1:3].exp().tolist() == pytest.approx([1 / whole, BACKOFF / whole])


def test_continuations_merge_into_a_trie() -> None:
    # 1 was followed by (2, 3) and (2, 4): one child 2 with two children.
    drafter, _ = drafter_of([1, 2, 3, 1, 2, 4, 1], max_ngram=1)
    trees = drafter.draft([0], [Shape(2, 2, 4)])
    assert trees.tokens[0].tolist() == [1, 2, 4, 3]  # the newer continuation first
    assert trees.parents[0].tolist() == [-1, 0, 1, 1]


def test_nothing_to_propose() -> None:
    drafter, confidence = drafter_of([1, 2, 3, 4])
    assert confidence == 0.0
    assert drafter.draft([0], [CHAIN]).sizes.tolist() == [1]


def test_width_bounds_children_and_expansions() -> None:
    text = [9, 1, 1, 9, 2, 2, 9, 3, 3, 9]
    drafter, _ = drafter_of(text, max_ngram=1)
    trees = drafter.draft([0], [Shape(2, 2, 10)])
    assert trees.tokens[0, 1:3].tolist() == [3, 2]
    assert (trees.parents[0] == 0).sum() == 2 + (10 - int(trees.sizes[0]))  # padding points at 0


def test_requests_of_different_shapes_are_padded_to_the_largest() -> None:
    drafter, _ = drafter_of([1, 2, 3, 4, 1, 2, 3])
    drafter.open(7, 5, 16)
    trees = drafter.draft([7, 0], [NO_DRAFT, CHAIN])
    assert trees.tokens.tolist() == [[5, -1, -1, -1, -1], [3, 4, 1, 2, 3]]
    assert trees.sizes.tolist() == [1, 5]


def test_requests_do_not_see_each_other() -> None:
    drafter, _ = drafter_of([1, 2, 3, 4, 5])
    drafter.open(1, 1, 16)
    drafter.commit([Extension(1, [2, 3])], None)
    assert drafter.draft([1], [CHAIN]).sizes.tolist() == [1]


def test_opening_twice_and_unknown_requests() -> None:
    drafter, _ = drafter_of([1, 2])
    with pytest.raises(ValueError, match="already open"):
        drafter.open(0, 1, 16)
    with pytest.raises(KeyError):
        drafter.commit([Extension(5, [1])], None)
    drafter.close(0)
    drafter.close(0)
    drafter.open(0, 1, 16)
    assert drafter.draft([0], [CHAIN]).sizes.tolist() == [1]


@given(
    tokens=st.lists(st.integers(0, 3), min_size=2, max_size=60),
    split=st.integers(1, 59),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 12)),
)
def test_trees_hold_for_any_text(tokens: list[int], split: int, shape: tuple[int, ...]) -> None:
    depth, width, extra = shape
    chosen = Shape(depth, width, depth + 1 + extra)
    drafter, confidence = drafter_of(tokens)
    trees = drafter.draft([0], [chosen])
    check_tree(trees, chosen)
    root_children = trees.logprobs[0, 1:][trees.parents[0, 1:] == 0]
    assert math.isclose(confidence, root_children.exp().max().item(), abs_tol=1e-6)

    chunked = LookupDrafter()
    chunked.open(0, tokens[0], 1024)
    chunked.commit([Extension(0, tokens[1:split])], None)
    chunked.commit([Extension(0, tokens[split:])], None)
    if split < len(tokens):
        assert torch.equal(chunked.draft([0], [chosen]).tokens, trees.tokens)


def check_tree(trees: DraftTrees, shape: Shape) -> None:
    """One tree, well formed and within its shape."""
    size = int(trees.sizes[0])
    tokens, parents = trees.tokens[0, :size].tolist(), trees.parents[0, :size].tolist()
    assert trees.tokens.shape == (1, shape.nodes)
    depths = [0] * size
    for node in range(1, size):
        assert 0 <= parents[node] < node
        depths[node] = depths[parents[node]] + 1
    assert max(depths) <= shape.depth
    siblings = list(zip(parents, tokens, strict=True))
    assert len(set(siblings)) == size
    assert all(parents.count(node) <= shape.width for node in range(size))
    assert bool((trees.logprobs[0, :size] <= 0).all())
