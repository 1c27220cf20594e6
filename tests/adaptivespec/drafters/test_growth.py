"""Growing trees: against a slow reference that holds whole distributions in dictionaries."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptivespec.drafters.growth import GrowingTrees, Level
from adaptivespec.errors import CacheFull
from adaptivespec.shape import NO_DRAFT, Shape
from tests.adaptivespec.drafters.trees import Path, assert_same, grow, nodes_of

LARGEST = Shape(5, 4, 24)
ROOMY = Shape(17, 4, 24)  # holds two trees of any shape up to LARGEST
VOCAB = 12

shapes = st.integers(1, LARGEST.depth).flatmap(
    lambda depth: st.builds(
        Shape, st.just(depth), st.integers(1, LARGEST.width), st.integers(depth + 1, LARGEST.nodes)
    )
)


@cache
def distribution(text: Path) -> Tensor:
    """A language model: float32 [VOCAB] log-probabilities after `text`, all different."""
    generator = torch.Generator().manual_seed(hash(text) % 2**31)
    return (2 * torch.randn(VOCAB, generator=generator)).log_softmax(-1)


@dataclass
class TableModel:
    """`distribution` behind `Expand`. Like a real model it knows a node by its row alone."""

    texts: dict[tuple[int, int], Path] = field(default_factory=dict)  # by slot and row
    expanded: list[Path] = field(default_factory=list)
    calls: int = 0

    def plant(self, trees: GrowingTrees, request: int, text: Path) -> None:
        """Make `text`, whose last token is the root, the request's committed text."""
        values, children = distribution(text).topk(trees.width)
        trees.plant([request], [text[-1]], values[None], children[None])
        self.texts[int(trees.slots([request])), 0] = text

    def __call__(self, level: Level) -> tuple[Tensor, Tensor]:
        self.calls += 1
        packed = zip(
            level.slots.tolist(),
            level.rows.tolist(),
            level.parents.tolist(),
            level.tokens.tolist(),
            level.depths.tolist(),
            strict=True,
        )
        texts = []
        for slot, row, parent, token, depth in packed:
            text = self.texts[slot, row] = (*self.texts[slot, parent], token)
            assert depth == len(text) - len(self.texts[slot, 0])
            texts.append(text)
        self._check_masks(level, texts)
        self.expanded += texts
        best = torch.stack([distribution(text) for text in texts]).topk(LARGEST.width)
        return best.values, best.indices

    def _check_masks(self, level: Level, texts: list[Path]) -> None:
        """What a node sees spells its text."""
        first = 0
        for start, size, mask in zip(level.starts, level.sizes, level.masks, strict=True):
            assert mask.shape == (size, start + size)
            for offset in range(size):
                slot = int(level.slots[first + offset])
                seen = mask[offset].nonzero()[:, 0].tolist()
                spelt = [self.texts[slot, row][-1] for row in seen]
                root = self.texts[slot, 0]
                assert (*root[:-1], *spelt) == texts[first + offset]
            first += size


def reference(text: Path, shape: Shape) -> dict[Path, float]:
    """The tree below `text`."""

    def children(path: Path, width: int) -> tuple[Tensor, Tensor]:
        best = distribution(text + path).topk(width)
        return best.values, best.indices

    return grow(children, shape)


def planted(texts: Sequence[Path], largest: Shape = LARGEST) -> tuple[GrowingTrees, TableModel]:
    trees, model = GrowingTrees(largest, 20, torch.device("cpu")), TableModel()
    for request, text in enumerate(texts):
        trees.open(request, text[-1])
        model.plant(trees, request, text)
    return trees, model


@settings(max_examples=60, deadline=None)
@given(chosen=st.lists(shapes, min_size=1, max_size=4), seed=st.integers(0, 1000))
def test_different_shapes_in_one_call_match_the_reference(chosen: list[Shape], seed: int) -> None:
    texts = [(seed, request) for request in range(len(chosen))]
    trees, model = planted(texts)
    drafted = trees.draft(range(len(chosen)), chosen, model)
    assert drafted.tokens.shape == (len(chosen), max(shape.nodes for shape in chosen))
    for index, (text, shape) in enumerate(zip(texts, chosen, strict=True)):
        assert_same(nodes_of(drafted, index), reference(text, shape))
    assert model.calls <= max(shape.depth for shape in chosen) - 1


@settings(max_examples=60, deadline=None)
@given(first=shapes, second=shapes, seed=st.integers(0, 1000))
def test_a_second_draft_goes_on_where_the_first_stopped(
    first: Shape, second: Shape, seed: int
) -> None:
    trees, model = planted([(seed,)], ROOMY)
    trees.draft([0], [first], model)
    drafted = trees.draft([0], [second], model)
    assert_same(nodes_of(drafted, 0), reference((seed,), second))
    assert len(set(model.expanded)) == len(model.expanded)


@settings(max_examples=100, deadline=None)
@given(
    first=shapes,
    second=shapes,
    seed=st.integers(0, 1000),
    ranks=st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
def test_advancing_keeps_what_was_expanded(
    first: Shape, second: Shape, seed: int, ranks: list[int]
) -> None:
    trees, model = planted([(seed,), (2000, seed)], ROOMY)
    trees.draft([0, 1], [first, first], model)
    text: Path = (seed,)
    for rank in ranks:  # commit likely tokens, so that some are in the tree
        text = (*text, int(distribution(text).topk(3).indices[rank]))
    committed = list(text[1:])

    expanded = [path for path in model.expanded if path == text[: len(path)]]
    known = max((len(path) - 1 for path in expanded), default=0)
    slot = int(trees.slots([0]))
    before = dict(model.texts)
    (advance,) = trees.advance([0], [committed])
    assert [before[slot, row] for row in advance.path] == [
        text[: 2 + i] for i in range(min(known, len(committed)))
    ]
    if len(advance.path) < len(committed):
        assert advance.below == []
        model.plant(trees, 0, text)
    else:
        assert all(before[slot, row][: len(text)] == text for row in advance.below)
        for new, old in enumerate([advance.path[-1], *advance.below]):
            model.texts[slot, new] = before[slot, old]

    drafted = trees.draft([1, 0], [first, second], model)
    assert_same(nodes_of(drafted, 0), reference((2000, seed), first))
    assert_same(nodes_of(drafted, 1), reference(text, second))
    if len(advance.path) == len(committed):
        assert len(set(model.expanded)) == len(model.expanded)


def test_no_more_rows_than_there_is_room_for() -> None:
    trees, model = planted([(7,)])
    for width in (1, 2, 3, 4, 3, 4):
        for depth in (5, 2):
            shape = Shape(depth, width, 20)
            assert_same(nodes_of(trees.draft([0], [shape], model), 0), reference((7,), shape))
    assert all(row < trees.rows for _, row in model.texts)
    assert len(model.expanded) > len(set(model.expanded)), "some were forgotten on the way"


def test_a_root_without_known_children_drafts_nothing() -> None:
    trees, model = planted([(3,)])
    trees.open(1, 5)
    drafted = trees.draft([1, 0], [Shape(3, 2, 6)] * 2, model)
    assert drafted.tokens[0].tolist() == [5] + [-1] * 5
    assert_same(nodes_of(drafted, 1), reference((3,), Shape(3, 2, 6)))


def test_no_draft_beside_a_draft() -> None:
    trees, model = planted([(3,), (4,)])
    drafted = trees.draft([0, 1], [NO_DRAFT, Shape(2, 2, 4)], model)
    assert drafted.sizes.tolist() == [1, 4]
    assert trees.draft([0, 1], [NO_DRAFT, NO_DRAFT], model).tokens.tolist() == [[3], [4]]


def test_slots_are_reused_clean() -> None:
    trees, model = planted([(request,) for request in range(20)])
    trees.draft(range(20), [Shape(4, 3, 12)] * 20, model)
    trees.close(11)
    trees.close(11)
    trees.open(99, 2)
    with pytest.raises(CacheFull):
        trees.open(100, 2)
    assert trees.draft([99], [Shape(4, 3, 12)], model).sizes.tolist() == [1]
    with pytest.raises(ValueError, match="already open"):
        trees.open(99, 2)
    with pytest.raises(KeyError):
        trees.draft([11], [Shape(4, 3, 12)], model)


def test_a_shape_beyond_the_largest_is_refused() -> None:
    trees, model = planted([(3,)])
    with pytest.raises(ValueError, match="does not fit"):
        trees.draft([0], [Shape(2, LARGEST.width + 1, 8)], model)
    with pytest.raises(ValueError, match="does not fit"):
        trees.draft([0], [Shape(20, 4, 40)], model)
