"""Tree operations against slow versions over plain lists."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from adaptivespec.tree import ancestor_mask, build, depths, fold_paths, pad, reroot, roots
from tests.adaptivespec.trees import VOCABULARY, Tree, batch, fine_logprobs, trees, unbatch

batches = st.lists(trees(), min_size=1, max_size=4)


def best_first(pool: Tree, nodes: int) -> list[int]:
    """Pool indices kept by growing from the root, the best reachable candidate at a time."""
    kept = [0]
    while len(kept) < nodes:
        reachable = [i for i, p in enumerate(pool.parents) if p in kept and i not in kept]
        if not reachable:
            break
        kept.append(max(reachable, key=lambda i: (sum(pool.logprobs[j] for j in pool.path(i)), -i)))
    return sorted(kept)


def branches(tree: Tree) -> dict[tuple[int, ...], float]:
    """Log-probability of every node but the root, by the tokens that lead to it."""
    return {
        tuple(tree.tokens[j] for j in tree.path(i)[1:]): tree.logprobs[i]
        for i in range(1, len(tree.tokens))
    }


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


@given(st.lists(st.tuples(trees(max_nodes=20), st.integers(1, 24)), min_size=1, max_size=4))
def test_build_keeps_the_best_of_all_levels(rows: list[tuple[Tree, int]]) -> None:
    pools, budgets = zip(*rows, strict=True)
    built, kept = build(batch(pools), budgets)
    assert built.tokens.shape[1] == kept.shape[1] == max(budgets)
    for pool, budget, tree, old in zip(pools, budgets, unbatch(built), kept.tolist(), strict=True):
        expected = best_first(pool, budget)
        assert old == expected + [-1] * (max(budgets) - len(expected))
        assert tree.tokens == [pool.tokens[i] for i in expected]
        assert tree.logprobs == [pool.logprobs[i] for i in expected]
        assert tree.parents[1:] == [expected.index(pool.parents[i]) for i in expected[1:]]


@given(trees(max_nodes=20, logprobs=fine_logprobs), st.integers(1, 20))
# The third level sums to just below -1, the fourth to -1: float32 addition is not associative.
@example(Tree([0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], [0.0, -1.0, -4e-8, -4e-8, 0.0]), 4)
def test_build_never_orphans_a_node_by_rounding(pool: Tree, budget: int) -> None:
    built, kept = build(batch([pool]), [budget])
    (tree,) = unbatch(built)
    assert len(tree.tokens) == min(budget, len(pool.tokens))
    old = kept[0].tolist()
    for new in range(1, len(tree.tokens)):
        assert old[tree.parents[new]] == pool.parents[old[new]]


def test_build_drops_impossible_candidates_and_their_descendants() -> None:
    pool = Tree([1, 2, 3, 4], [-1, 0, 0, 1], [0.0, -torch.inf, -1.0, -0.5])
    (tree,) = unbatch(build(batch([pool]), [4])[0])
    assert tree == Tree([1, 3], [-1, 0], [0.0, -1.0])


@given(
    st.lists(
        st.tuples(trees(), st.lists(st.integers(0, VOCABULARY - 1), max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_reroot_keeps_what_is_below_the_committed_path(rows: list[tuple[Tree, list[int]]]) -> None:
    before, commits = zip(*rows, strict=True)
    longest = max(len(run) for run in commits)
    committed = torch.tensor([run + [-1] * (longest - len(run)) for run in commits])
    moved_trees, moved = reroot(batch(before), committed)

    assert moved.shape == moved_trees.tokens.shape
    for tree, run, after, new in zip(before, commits, unbatch(moved_trees), moved, strict=True):
        prefix = tuple(run)
        below = branches(tree)
        assert after.tokens[0] == [tree.tokens[0], *run][-1]
        assert branches(after) == {
            path[len(prefix) :]: logprob
            for path, logprob in below.items()
            if path[: len(prefix)] == prefix and len(path) > len(prefix)
        }
        survivors = [i for i in range(len(tree.tokens)) if new[i] >= 0]
        if prefix in below or not prefix:
            assert new[survivors].tolist() == list(range(len(after.tokens)))
            assert [tree.tokens[i] for i in survivors] == after.tokens
        else:
            assert survivors == []
        assert set(new[len(tree.tokens) :].tolist()) <= {-1}
