"""Draft trees as dictionaries, and the slow way to grow one."""

from collections.abc import Callable

import pytest
from torch import Tensor

from adaptivespec.shape import Shape
from adaptivespec.tree import DraftTrees

Path = tuple[int, ...]


def grow(children: Callable[[Path, int], tuple[Tensor, Tensor]], shape: Shape) -> dict[Path, float]:
    """The nodes of a tree of `shape`, by path below the root, with their own log-probabilities.
    `children(path, width)` are the log-probabilities and tokens of a node's best, best first."""
    scores: dict[Path, float] = {(): 0.0}
    own: dict[Path, float] = {}
    frontier: list[Path] = [()]
    for _ in range(shape.depth):
        level = []
        for path in frontier:
            values, tokens = children(path, shape.width)
            for value, token in zip(values.tolist(), tokens.tolist(), strict=True):
                child = (*path, token)
                own[child], scores[child] = value, scores[path] + value
                level.append(child)
        frontier = sorted(level, key=lambda path: -scores[path])[: shape.width]
    kept = sorted(own, key=lambda path: -scores[path])[: shape.nodes - 1]
    return {path: own[path] for path in kept}


def nodes_of(trees: DraftTrees, index: int) -> dict[Path, float]:
    """The nodes of one tree of a batch, as `grow` gives them."""
    size = int(trees.sizes[index])
    tokens, parents = trees.tokens[index].tolist(), trees.parents[index].tolist()
    paths: list[Path] = [()]
    for node in range(1, size):
        assert 0 <= parents[node] < node
        paths.append((*paths[parents[node]], tokens[node]))
    assert len(set(paths)) == size
    return dict(zip(paths[1:], trees.logprobs[index, 1:size].tolist(), strict=True))


def assert_same(found: dict[Path, float], expected: dict[Path, float]) -> None:
    """Equal nodes, log-probabilities to float32 rounding."""
    assert found == pytest.approx(expected, abs=1e-4)
