"""The small-model drafter grows the tree that the model alone would, and computes nothing twice."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adaptivespec.drafters.base import Extension
from adaptivespec.drafters.lm import LMDrafter
from adaptivespec.engine.cache import KVCache
from adaptivespec.models.attention import Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.decoder import Decoder, Hidden
from adaptivespec.shape import NO_DRAFT, Shape
from tests.adaptivespec.drafters.trees import Path, assert_same, grow, nodes_of
from tests.decoders import prefill, tiny_decoder
from tests.factories import tiny_model

LARGEST = Shape(4, 3, 12)

shapes = st.builds(
    Shape, st.integers(1, 4), st.integers(1, LARGEST.width), st.integers(5, LARGEST.nodes)
)
texts = st.lists(st.integers(0, 383), min_size=1, max_size=12)


class CountingDecoder(Decoder):
    """Counts the rows that it computes."""

    rows = 0

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        aux_layers: Sequence[int] = (),
    ) -> Hidden:
        self.rows += len(tokens)
        return super().forward(tokens, positions, cache, segments, aux_layers)


@pytest.fixture(scope="module")
def model() -> CountingDecoder:
    hf = tiny_model()
    config = DecoderConfig.from_hf(hf.config.to_dict())
    return CountingDecoder(config, dict(hf.state_dict()), torch.float32)


@pytest.fixture(scope="module")
def slow() -> Decoder:
    return tiny_decoder()


def distribution(slow: Decoder, text: Sequence[int]) -> Tensor:
    """Log-probabilities after `text`, computed from nothing."""
    cache = slow.new_cache(len(text))
    cache.open(0, len(text))
    return prefill(slow, cache, 0, list(text))[-1].log_softmax(-1)


def tree(slow: Decoder, text: Sequence[int], shape: Shape) -> dict[Path, float]:
    def children(path: Path, width: int) -> tuple[Tensor, Tensor]:
        best = distribution(slow, (*text, *path)).topk(width)
        return best.values, best.indices

    return grow(children, shape)


def drafter_for(model: Decoder) -> LMDrafter:
    return LMDrafter(model, 512, 4, LARGEST)


@settings(max_examples=25, deadline=None)
@given(batch=st.lists(st.tuples(texts, shapes), min_size=1, max_size=4))
def test_many_requests_and_shapes_at_once(
    model: CountingDecoder, slow: Decoder, batch: list[tuple[list[int], Shape]]
) -> None:
    drafter = drafter_for(model)
    for request, (text, _) in enumerate(batch):
        drafter.open(request, text[0], 32)
    longer = [Extension(i, text[1:]) for i, (text, _) in enumerate(batch) if len(text) > 1]
    confidence = drafter.commit(longer, None) if longer else torch.empty(0)
    for (request, _), value in zip(longer, confidence.tolist(), strict=True):
        best = distribution(slow, batch[request][0]).max().exp().item()
        assert value == pytest.approx(best, abs=1e-4)
    trees = drafter.draft(range(len(batch)), [shape for _, shape in batch])
    for i, (text, shape) in enumerate(batch):
        assert_same(nodes_of(trees, i), tree(slow, text, shape))


@settings(max_examples=50, deadline=None)
@given(
    text=texts,
    first=shapes,
    second=shapes,
    ranks=st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
def test_commit_after_draft_equals_a_fresh_start(
    model: CountingDecoder,
    slow: Decoder,
    text: list[int],
    first: Shape,
    second: Shape,
    ranks: list[int],
) -> None:
    drafter = drafter_for(model)
    drafter.open(0, text[0], 32)
    drafter.open(1, text[-1], 32)
    committed = list(text)
    if len(text) > 1:
        drafter.commit([Extension(0, text[1:])], None)
    drafter.draft([0, 1], [first, second])
    for rank in ranks:  # likely tokens, so that some have been expanded
        committed.append(int(distribution(slow, committed).topk(3).indices[rank]))
    (confidence,) = drafter.commit([Extension(0, committed[len(text) :])], None).tolist()
    best = distribution(slow, committed).max().exp().item()
    assert confidence == pytest.approx(best, abs=1e-4)
    trees = drafter.draft([1, 0], [first, second])
    assert_same(nodes_of(trees, 0), tree(slow, text[-1:], first))
    assert_same(nodes_of(trees, 1), tree(slow, committed, second))


def test_expanded_tokens_are_not_computed_again(model: CountingDecoder, slow: Decoder) -> None:
    text = [5, 6, 7]
    drafter = drafter_for(model)
    drafter.open(0, text[0], 64)
    drafter.commit([Extension(0, text[1:])], None)
    drafter.draft([0], [Shape(4, 1, 5)])  # a chain: three of its four tokens are expanded
    chain: list[int] = []
    for _ in range(4):
        chain.append(int(distribution(slow, text + chain).argmax()))

    before = model.rows
    drafter.commit([Extension(0, chain[:2])], None)
    assert model.rows == before, "both tokens and what follows them were known"
    drafter.draft([0], [Shape(2, 1, 3)])
    assert model.rows == before, "the third token was expanded too, and survived the commit"
    drafter.commit([Extension(0, [chain[2], chain[3]])], None)
    assert model.rows == before + 1, "only the fourth was not"
    trees = drafter.draft([0], [LARGEST])
    assert_same(nodes_of(trees, 0), tree(slow, text + chain, LARGEST))


def test_a_long_answer_in_small_steps(model: CountingDecoder, slow: Decoder) -> None:
    text = [9, 8, 7, 6]
    drafter = drafter_for(model)
    drafter.open(3, text[0], 64)
    drafter.commit([Extension(3, text[1:])], None)
    for step in range(8):
        trees = drafter.draft([3], [LARGEST])
        assert_same(nodes_of(trees, 0), tree(slow, text, LARGEST))
        deepest: Path = max(nodes_of(trees, 0), key=lambda path: len(path))
        accepted = deepest[: 1 + step % 3]
        new = [*accepted, (31 * step) % 384]
        drafter.commit([Extension(3, new)], None)
        text += new


def test_no_draft_and_closed_requests(model: CountingDecoder) -> None:
    drafter = drafter_for(model)
    drafter.open(0, 4, 16)
    assert drafter.draft([0], [NO_DRAFT]).tokens.tolist() == [[4]]
    drafter.close(0)
    drafter.close(0)
    with pytest.raises(KeyError):
        drafter.commit([Extension(0, [1])], None)
    with pytest.raises(KeyError):
        drafter.draft([0], [LARGEST])
