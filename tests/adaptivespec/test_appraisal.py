"""Worth and price of nodes, against every subtree there is, and against a slow way to grow one."""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.appraisal import affordable, keep_best, market, worths
from adaptivespec.pricing import KNOTS, LIKELIHOODS, LOWEST, NODES, SPACING, UNPRICED, Curve, Prices
from adaptivespec.shape import Shape
from tests.adaptivespec.drafters.test_growth import LARGEST, distribution, planted, shapes
from tests.adaptivespec.drafters.trees import Path, assert_same, nodes_of
from tests.adaptivespec.drafters.trees import grow as grow_in_full
from tests.adaptivespec.trees import Tree, batch, fine_logprobs, trees, unbatch

KNOT_LOGITS = LOWEST + SPACING * np.arange(KNOTS)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


CURVE = Curve(sigmoid(0.5 + KNOT_LOGITS).tolist(), sigmoid(KNOT_LOGITS - 1).tolist())
"""Best children are accepted more often than q, others less."""

ONWARD = [0.3, 0.5, 0.7, 0.6, 0.9]


def onward(value: float) -> float:
    """What expanding a node of this worth is said to bring, per unit of it."""
    return float(np.interp(value, np.linspace(0, 1, LIKELIHOODS), ONWARD))


def worth(logprob: float, first: bool) -> float:
    """P(accepted | parent accepted), by the definition of a curve."""
    q = math.exp(logprob)
    logit = math.log(q) - math.log1p(-q) if q < 1 else math.inf
    return float(np.interp(logit, KNOT_LOGITS, CURVE.first if first else CURVE.other))


def priced(
    node: float, level: float = 0.0, expansion: float = 0.0, of: Sequence[int] = (0,)
) -> Prices:
    """Every node has the same price."""
    return Prices(level, expansion, [node * n for n in NODES], ONWARD, [CURVE], list(of))


def node_price(prices: Prices) -> float:
    return prices.nodes[1]


def slow_worths(tree: Tree) -> list[float]:
    """P(accepted) of every node; 1 for the root."""
    found = [1.0]
    for node in range(1, len(tree.tokens)):
        parent = tree.parents[node]
        first = tree.children(parent)[0] == node
        found.append(found[parent] * worth(tree.logprobs[node], first))
    return found


def subtrees(tree: Tree, nodes: int) -> Iterator[set[int]]:
    """Every subtree with the root and at most `nodes` nodes."""
    below = range(1, len(tree.tokens))
    for count in range(min(nodes, len(tree.tokens))):
        for chosen in combinations(below, count):
            kept = {0, *chosen}
            if all(tree.parents[node] in kept for node in chosen):
                yield kept


def best_first(tree: Tree) -> Tree:
    """The same shape, siblings in the order in which a drafter lists them."""
    logprobs = list(tree.logprobs)
    for node in range(len(tree.tokens)):
        children = tree.children(node)
        for child, value in zip(
            children, sorted((logprobs[c] for c in children), reverse=True), strict=True
        ):
            logprobs[child] = value
    return Tree(tree.tokens, tree.parents, logprobs)


@settings(max_examples=150)
@given(
    st.lists(trees(7, fine_logprobs), min_size=1, max_size=2),
    st.lists(st.sampled_from([0.0, 0.01, 0.2, 0.5]), min_size=8, max_size=8),
    st.integers(1, 9),
)
def test_no_subtrees_are_worth_more_than_what_is_kept(
    forest: list[Tree], steps: list[float], nodes: int
) -> None:
    forest = [best_first(tree) for tree in forest]
    costs = np.concatenate([[0], np.cumsum(steps)])
    beyond = [float(costs[-1]) + n for n in NODES[len(costs) :]]
    prices = Prices(0.0, 0.0, [*costs.tolist(), *beyond], ONWARD, [CURVE], [0] * len(forest))
    kept = list(unbatch(affordable(batch(forest), prices, [9] * len(forest))))
    values = [slow_worths(tree) for tree in forest]

    def objective(chosen: Sequence[set[int]]) -> float:
        brought = sum(value[i] for value, own in zip(values, chosen, strict=True) for i in own if i)
        count = sum(len(own) - 1 for own in chosen)
        return brought - float(np.interp(count, NODES, prices.nodes))

    best = max(objective(chosen) for chosen in product(*(subtrees(tree, 9) for tree in forest)))
    ours = []
    for tree, own in zip(forest, kept, strict=True):
        places = {tuple(tree.tokens[i] for i in tree.path(n)): n for n in range(len(tree.tokens))}
        ours.append(
            {places[tuple(own.tokens[i] for i in own.path(n))] for n in range(len(own.tokens))}
        )
    assert objective(ours) == pytest.approx(best, abs=1e-4)
    for tree in unbatch(affordable(batch(forest), prices, [nodes] * len(forest))):
        assert len(tree.tokens) <= nodes


@given(fine_logprobs, fine_logprobs)
def test_a_curve_is_linear_between_its_knots(one: float, other: float) -> None:
    tree = Tree([0, 1, 2], [-1, 0, 0], [0.0, max(one, other), min(one, other)])
    found = np.exp(worths(batch([tree]), market(priced(0.0), 1)))
    assert found[0] == pytest.approx(slow_worths(tree), rel=1e-2, abs=1e-6)


def test_nothing_is_still_nothing_and_trees_without_a_price_keep_their_own_values() -> None:
    prices = priced(0.5, of=[0, UNPRICED])
    tree = Tree([0, 1, 2], [-1, 0, 0], [0.0, -9.0, -math.inf])
    found = worths(batch([tree, tree]), market(prices, 2))
    assert found[0, 1:].tolist() == [
        pytest.approx(math.log(worth(-9.0, True)), rel=1e-3),
        -math.inf,
    ]
    assert found[1].tolist() == [0.0, -9.0, -math.inf]
    kept = affordable(batch([tree, tree]), prices, [3, 3])
    assert kept.sizes.tolist() == [1, 2]


def totals(pool: Tree) -> list[float]:
    """Log-probability of every node's path."""
    return [sum(pool.logprobs[j] for j in pool.path(i)) for i in range(len(pool.tokens))]


def reachable_first(pool: Tree, nodes: int) -> list[int]:
    """What is kept by growing from the root, the best reachable candidate at a time."""
    kept, total = [0], totals(pool)
    while len(kept) < nodes:
        reachable = [i for i, p in enumerate(pool.parents) if p in kept and i not in kept]
        if not reachable:
            break
        kept.append(max(reachable, key=lambda i: (total[i], -i)))
    return sorted(kept)


@given(st.lists(st.tuples(trees(max_nodes=20), st.integers(1, 24)), min_size=1, max_size=4))
def test_the_best_of_all_levels_are_kept(rows: list[tuple[Tree, int]]) -> None:
    pools, budgets = zip(*rows, strict=True)
    pool = batch(pools)
    scores = np.full(pool.tokens.shape, -np.inf, np.float32)
    for score, each in zip(scores, pools, strict=True):
        score[: len(each.tokens)] = totals(each)
    columns = [each.numpy() for each in (pool.tokens, pool.parents, pool.logprobs)]
    kept = keep_best(pool.sizes.numpy(), [*columns, scores], budgets, market(None, len(pools)))
    assert kept.tokens.shape[1] == max(budgets)
    for each, budget, tree in zip(pools, budgets, unbatch(kept), strict=True):
        expected = reachable_first(each, budget)
        assert tree.tokens == [each.tokens[i] for i in expected]
        assert tree.logprobs == [each.logprobs[i] for i in expected]
        assert tree.parents[1:] == [expected.index(each.parents[i]) for i in expected[1:]]


def test_impossible_candidates_are_not_kept() -> None:
    pool = batch([Tree([1, 2, 3, 4], [-1, 0, 0, 1], [0.0, -math.inf, -1.0, -0.5])])
    columns = [each.numpy() for each in (pool.tokens, pool.parents, pool.logprobs)]
    scores = np.array([[0.0, -np.inf, -1.0, -np.inf]], np.float32)
    (tree,) = unbatch(keep_best(pool.sizes.numpy(), [*columns, scores], [4], market(None, 1)))
    assert tree == Tree([1, 3], [-1, 0], [0.0, -1.0])


def grow(texts: Sequence[Path], shape: Shape, prices: Prices) -> list[dict[Path, float]]:
    """The slow way: every tree of a batch level by level, nodes in dictionaries."""
    own: list[dict[Path, float]] = [{} for _ in texts]
    value: list[dict[Path, float]] = [{(): 1.0} for _ in texts]
    frontiers: list[list[Path]] = [[()] for _ in texts]
    for depth in range(1, shape.depth + 1):
        gains = 0.0
        for text, drafted, worth_of, frontier in zip(texts, own, value, frontiers, strict=True):
            level = []
            for path in frontier:
                best = distribution(text + path).topk(shape.width)
                for rank, (logprob, token) in enumerate(
                    zip(best.values.tolist(), best.indices.tolist(), strict=True)
                ):
                    total = worth_of[path] * worth(logprob, rank == 0)
                    if total >= node_price(prices):
                        child = (*path, token)
                        drafted[child], worth_of[child] = logprob, total
                        level.append(child)
            level.sort(key=lambda path: -worth_of[path])
            gain = [worth_of[path] * onward(worth_of[path]) - prices.expansion for path in level]
            frontier[:] = [path for path, each in zip(level, gain, strict=True) if each > 0][
                : shape.width
            ]
            gains += sum(
                worth_of[path] * onward(worth_of[path]) - prices.expansion for path in frontier
            )
        if gains < prices.level or not any(frontiers) or depth == shape.depth:
            break
    kept = []
    for drafted, worth_of in zip(own, value, strict=True):
        best_nodes = sorted(drafted, key=lambda path: -worth_of[path])[: shape.nodes - 1]
        kept.append({path: drafted[path] for path in best_nodes})
    return kept


@settings(max_examples=150, deadline=None)
@given(
    shapes,
    st.lists(st.integers(0, 500), min_size=1, max_size=3),
    st.floats(0.005, 0.4),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.1),
)
def test_growing_ends_where_a_level_or_a_node_costs_more_than_it_brings(
    shape: Shape, seeds: list[int], node: float, level: float, expansion: float
) -> None:
    texts = [(seed, request) for request, seed in enumerate(seeds)]
    prices = priced(node, level, expansion, [0] * len(texts))
    grower, model = planted(texts)
    drafted = grower.draft(range(len(texts)), [shape] * len(texts), model, prices)
    expected = grow(texts, shape, prices)
    for index, each in enumerate(expected):
        assert_same(nodes_of(drafted, index), each)
    assert grower.growth.passes == model.calls
    assert grower.growth.expanded == len(model.expanded)


def test_growth_says_what_expanding_brought() -> None:
    grower, model = planted([(7,)])
    prices = priced(0.02)
    grower.draft([0], [LARGEST], model, prices)
    tree = grow([(7,)], LARGEST._replace(nodes=1000), prices)[0]
    value: dict[Path, float] = {(): 1.0}
    for path in sorted(tree, key=len):
        first = int(distribution((7, *path[:-1])).argmax()) == path[-1]
        value[path] = value[path[:-1]] * worth(tree[path], first)
    expanded = [path[1:] for path in model.expanded]
    assert sum(grower.growth.worth) == pytest.approx(sum(value[p] for p in expanded), abs=1e-4)
    below = sum(value[path] - node_price(prices) for path in tree if len(path) > 1)
    assert sum(grower.growth.gained) == pytest.approx(below, abs=1e-4)
    likely = [value[path] for path in expanded if value[path] >= 1 - 1 / (LIKELIHOODS - 1)]
    assert grower.growth.worth[-1] <= sum(likely) + 1e-4


def test_a_tree_without_a_price_grows_in_full_and_its_passes_are_free_for_others() -> None:
    texts = [(3, 0), (4, 1)]
    dear = priced(0.05, 1000.0, of=[0, UNPRICED])
    shape = Shape(4, 3, 12)
    grower, model = planted(texts)
    drafted = grower.draft([0, 1], [shape] * 2, model, dear)
    in_full = grow_in_full(lambda path, width: distribution(texts[1] + path).topk(width), shape)
    assert_same(nodes_of(drafted, 1), in_full)
    free = priced(0.05)
    assert_same(nodes_of(drafted, 0), grow(texts[:1], shape, free)[0])
    alone, model = planted(texts[:1])
    tree = nodes_of(alone.draft([0], [shape], model, priced(0.05, 1000.0)), 0)
    assert max(map(len, tree)) == 1
    assert model.calls == 0
