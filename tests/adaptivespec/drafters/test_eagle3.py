"""The EAGLE-3 drafter grows the tree that a head without cache, batch or packing would grow."""

from collections.abc import Sequence
from pathlib import Path as File

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptivespec.drafters.base import Extension
from adaptivespec.drafters.eagle3 import Eagle3Drafter
from adaptivespec.models.eagle3 import Eagle3Head, load_head
from adaptivespec.models.eagle3_weights import EMBEDDING
from adaptivespec.models.loading import load_model
from adaptivespec.shape import NO_DRAFT, Shape
from tests.adaptivespec.drafters.heads import HIDDEN, VOCAB, Flags, Reference, TinyHead, tiny_head
from tests.adaptivespec.drafters.trees import Path, assert_same, grow, nodes_of
from tests.factories import write_hf_folder

LARGEST = Shape(4, 3, 12)
KV_TOKENS, MAX_RUNNING = 256, 4

shapes = st.builds(
    Shape, st.integers(1, 4), st.integers(1, LARGEST.width), st.integers(5, LARGEST.nodes)
)
texts = st.builds(
    lambda length, seed: random_text(length, seed), st.integers(2, 12), st.integers(0, 99)
)


class Text:
    """Committed tokens, and the target's states: states[i] is the one before tokens[i + 1]."""

    def __init__(self, tokens: list[int], states: Tensor) -> None:
        self.tokens, self.states = tokens, states


def random_text(length: int, seed: int) -> Text:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (length,), generator=generator).tolist()
    return Text(tokens, torch.randn(length - 1, HIDDEN, generator=generator))


@pytest.fixture(scope="module", params=[Flags(), Flags(norm_output=True)])
def tiny(request: pytest.FixtureRequest) -> TinyHead:
    return tiny_head(flags=request.param)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> File:
    return write_hf_folder(tmp_path_factory.mktemp("target"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def head(tiny: TinyHead, target: File, tmp_path_factory: pytest.TempPathFactory) -> Eagle3Head:
    return load_head(tiny.write(tmp_path_factory.mktemp("head")), str(target), torch.float32)


@pytest.fixture(scope="module")
def slow(tiny: TinyHead, target: File) -> "SlowDrafter":
    embedding = load_model(str(target), torch.float32, only=[EMBEDDING])[1][EMBEDDING]
    return SlowDrafter(tiny, embedding)


class SlowDrafter:
    """Recomputes the whole text for every node."""

    def __init__(self, tiny: TinyHead, embedding: Tensor) -> None:
        self._reference = Reference(tiny, embedding)
        self._ids = tiny.target_ids

    def tree(self, text: Text, shape: Shape) -> dict[Path, float]:
        def children(path: Path, width: int) -> tuple[Tensor, Tensor]:
            best = self.distribution(text, path).topk(width)
            return best.values, self._ids[best.indices]

        return grow(children, shape)

    def distribution(self, text: Text, path: Path = ()) -> Tensor:
        """Log-probabilities over the draft vocabulary after `path` below the text."""
        tokens, states = text.tokens[1:], text.states
        for token in path:
            after, _ = self._reference.forward(torch.tensor(tokens), states)
            tokens, states = [*tokens, token], torch.cat((states, after[-1:]))
        return self._reference.forward(torch.tensor(tokens), states)[1][-1]


def drafter_for(head: Eagle3Head) -> Eagle3Drafter:
    return Eagle3Drafter(head, KV_TOKENS, MAX_RUNNING, LARGEST)


def feed(drafter: Eagle3Drafter, requests: Sequence[int], parts: Sequence[Text]) -> Tensor:
    """Commit each part's tokens but the first, which is the last one of what came before."""
    extensions = [
        Extension(request, part.tokens[1:]) for request, part in zip(requests, parts, strict=True)
    ]
    return drafter.commit(extensions, torch.cat([part.states for part in parts]))


def part(text: Text, start: int, stop: int) -> Text:
    """Tokens start:stop after the one at start - 1."""
    return Text(text.tokens[start - 1 : stop], text.states[start - 1 : stop - 1])


@settings(max_examples=25, deadline=None)
@given(batch=st.lists(st.tuples(texts, shapes), min_size=1, max_size=MAX_RUNNING))
def test_many_requests_and_shapes_at_once(
    head: Eagle3Head, slow: SlowDrafter, batch: list[tuple[Text, Shape]]
) -> None:
    drafter = drafter_for(head)
    requests = [10 + i for i in range(len(batch))]
    for request, (text, _) in zip(requests, batch, strict=True):
        drafter.open(request, text.tokens[0], 32)
    confidence = feed(drafter, requests, [text for text, _ in batch])
    trees = drafter.draft(requests, [shape for _, shape in batch])
    for i, (text, shape) in enumerate(batch):
        assert trees.tokens[i, 0] == text.tokens[-1]
        assert_same(nodes_of(trees, i), slow.tree(text, shape))
        best = slow.distribution(text).max().exp().item()
        assert confidence[i].item() == pytest.approx(best, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(text=texts, first=shapes, second=shapes, data=st.data())
def test_commits_in_pieces_with_drafts_between(
    head: Eagle3Head,
    slow: SlowDrafter,
    text: Text,
    first: Shape,
    second: Shape,
    data: st.DataObject,
) -> None:
    drafter, other = drafter_for(head), random_text(5, 1)
    drafter.open(0, text.tokens[0], 32)
    drafter.open(1, other.tokens[0], 32)
    feed(drafter, [1], [other])
    done = 1
    while done < len(text.tokens):
        step = data.draw(st.integers(1, len(text.tokens) - done))
        feed(drafter, [0], [part(text, done, done + step)])
        done += step
        drafter.draft([1, 0], [second, first])
    trees = drafter.draft([0, 1], [second, first])
    assert_same(nodes_of(trees, 0), slow.tree(text, second))
    assert_same(nodes_of(trees, 1), slow.tree(other, first))


@settings(max_examples=25, deadline=None)
@given(text=texts, chosen=st.lists(shapes, min_size=2, max_size=8))
def test_drafting_again_without_a_commit(
    head: Eagle3Head, slow: SlowDrafter, text: Text, chosen: list[Shape]
) -> None:
    drafter = drafter_for(head)
    drafter.open(0, text.tokens[0], 32)
    feed(drafter, [0], [text])
    for shape in chosen:  # more nodes in all than there are rows: some trees are forgotten
        assert_same(nodes_of(drafter.draft([0], [shape]), 0), slow.tree(text, shape))


def test_nothing_to_propose_before_the_first_state(head: Eagle3Head) -> None:
    drafter = drafter_for(head)
    drafter.open(0, 17, 32)
    assert drafter.draft([0], [LARGEST]).tokens[0].tolist() == [17] + [-1] * 11
    assert drafter.draft([0], [NO_DRAFT]).tokens.tolist() == [[17]]


def test_a_full_span_still_holds_the_largest_tree(head: Eagle3Head, slow: SlowDrafter) -> None:
    drafter, text = drafter_for(head), random_text(12, 5)
    drafter.open(0, text.tokens[0], 12)
    feed(drafter, [0], [text])
    assert_same(nodes_of(drafter.draft([0], [LARGEST]), 0), slow.tree(text, LARGEST))


def test_closing_makes_room(head: Eagle3Head, slow: SlowDrafter) -> None:
    drafter, text = drafter_for(head), random_text(9, 8)
    for request in range(3 * MAX_RUNNING):
        drafter.open(request, text.tokens[0], KV_TOKENS // 2)
        feed(drafter, [request], [text])
        assert_same(nodes_of(drafter.draft([request], [LARGEST]), 0), slow.tree(text, LARGEST))
        drafter.close(request - 1)
    with pytest.raises(KeyError):
        drafter.draft([0], [LARGEST])
    with pytest.raises(ValueError, match="already open"):
        drafter.open(3 * MAX_RUNNING - 1, 1, 8)
