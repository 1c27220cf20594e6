"""Small trees as plain lists, for slow reference versions and hypothesis."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from adaptivespec.tree import DraftTrees, pad

VOCABULARY = 5


class Tree(NamedTuple):
    """One tree: lists as long as it has nodes, laid out as a row of DraftTrees."""

    tokens: list[int]
    parents: list[int]
    logprobs: list[float]

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Nodes from the root to `node`, both included."""
        above = self.path(self.parents[node]) if node else []
        return [*above, node]


# Multiples of 1/8: sums are exact in any order, and ties are common.
coarse_logprobs = st.integers(-24, 0).map(lambda eighths: eighths / 8)
fine_logprobs = st.floats(-20, 0, width=32)


@st.composite
def trees(
    draw: st.DrawFn, max_nodes: int = 12, logprobs: st.SearchStrategy[float] = coarse_logprobs
) -> Tree:
    """Any tree over the vocabulary, siblings with different tokens."""
    tree = Tree([draw(st.integers(0, VOCABULARY - 1))], [-1], [0.0])
    taken = set()
    for _ in range(draw(st.integers(0, max_nodes - 1))):
        parent = draw(st.integers(0, len(tree.tokens) - 1))
        token = draw(st.integers(0, VOCABULARY - 1))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tree.tokens.append(token)
            tree.parents.append(parent)
            tree.logprobs.append(draw(logprobs))
    return tree


def batch(rows: Sequence[Tree]) -> DraftTrees:
    """The trees as one padded batch."""
    return pad(
        *(
            DraftTrees(
                torch.tensor([row.tokens], dtype=torch.int32),
                torch.tensor([row.parents], dtype=torch.int32),
                torch.tensor([row.logprobs], dtype=torch.float32),
            )
            for row in rows
        )
    )


def unbatch(trees: DraftTrees) -> Iterator[Tree]:
    """The trees without padding, after checking every promise of DraftTrees."""
    assert trees.tokens.dtype == trees.parents.dtype == torch.int32
    assert trees.logprobs.dtype == torch.float32
    rows = (trees.tokens.tolist(), trees.parents.tolist(), trees.logprobs.tolist())
    for size, tokens, parents, logprobs in zip(trees.sizes.tolist(), *rows, strict=True):
        assert min(tokens[:size]) >= 0
        assert set(tokens[size:]) <= {-1}
        assert set(parents[size:]) <= {0}
        assert set(logprobs[size:]) <= {-torch.inf}
        assert parents[0] == -1
        assert logprobs[0] == 0
        assert all(0 <= parent < i for i, parent in enumerate(parents[1:size], start=1))
        edges = list(zip(parents[:size], tokens[:size], strict=True))
        assert len(set(edges)) == size
        yield Tree(tokens[:size], parents[:size], logprobs[:size])


def walk(trees: DraftTrees, predict: torch.Tensor) -> list[tuple[list[int], int]]:
    """From each root, the children equal to `predict` [B, N]: the accepted nodes, the root first,
    and the token after the last."""
    walks = []
    for tree, wanted in zip(unbatch(trees), predict.tolist(), strict=True):
        path = [0]
        while True:
            exact = [c for c in tree.children(path[-1]) if tree.tokens[c] == wanted[path[-1]]]
            if not exact:
                break
            path += exact
        walks.append((path, wanted[path[-1]]))
    return walks
