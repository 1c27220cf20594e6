"""Unrolled training computes what the drafter computes, chain by chain, when it drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from adaptivespec.models.attention import Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.eagle3 import Eagle3Head, StateProjector
from adaptivespec.models.eagle3_config import HeadConfig
from adaptivespec.training.batches import collate
from adaptivespec.training.corpus import Conversation
from adaptivespec.training.loss import SoftTargets
from adaptivespec.training.model import TrainableHead, Unrolled
from adaptivespec.training.warm_start import head_config
from tests.adaptivespec.drafters.heads import HIDDEN, VOCAB, Weights, tiny_head
from tests.adaptivespec.training.conversations import conversation
from tests.factories import tiny_model

DRAFT_VOCAB = 8
DECAY = 0.8
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass
class Setting:
    """A head with random weights, and the target's output rows of its draft vocabulary."""

    config: HeadConfig
    weights: Weights
    embedding: Tensor
    target_ids: Tensor
    target_head: Tensor

    def trainable(self) -> TrainableHead:
        return TrainableHead(self.config, self.weights, self.embedding, self.target_ids)

    def unroll(self, texts: Sequence[Conversation], steps: int, stride: int, seed: int) -> Unrolled:
        torch.manual_seed(seed)
        scratch = SoftTargets(self.target_head)
        return self.trainable().unroll(collate(texts, "cpu"), scratch, steps, stride, DECAY)


def setting(**target: Any) -> Setting:
    tiny = tiny_head()
    config = DecoderConfig.from_hf(tiny_model(**target).config.to_dict())
    generator = torch.Generator().manual_seed(1)
    weights = tiny.without("d2t", "t2d").weights
    return Setting(
        head_config(config, DRAFT_VOCAB),
        weights | {"lm_head.weight": weights["lm_head.weight"][:DRAFT_VOCAB]},
        torch.randn(VOCAB, HIDDEN, generator=generator),
        tiny.target_ids[:DRAFT_VOCAB],
        torch.randn(DRAFT_VOCAB, HIDDEN, generator=generator) * 0.5,
    )


def texts(given: Setting, lengths: Sequence[tuple[int, int]]) -> list[Conversation]:
    """Conversations of (prompt, answer) tokens; every fourth answer token or so is not in the draft
    vocabulary."""
    generator = torch.Generator().manual_seed(2)
    known = given.target_ids.tolist()
    unknown = sorted(set(range(VOCAB)) - set(known))

    def draw(choices: list[int]) -> int:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    made = []
    for number, (prompt, answer) in enumerate(lengths):
        rare = (torch.rand(answer, generator=generator) < 0.25).tolist()
        made.append(
            conversation(
                [draw(list(range(VOCAB))) for _ in range(prompt)],
                [draw(unknown if outside else known) for outside in rare],
                HIDDEN,
                number=number,
            )
        )
    return made


class Reference:
    """One chain at a time through the inference classes, with a cache of its own."""

    def __init__(self, given: Setting) -> None:
        self._given = given
        self._head = Eagle3Head(given.config, given.weights, given.embedding)
        self._project = StateProjector(given.config, given.weights)
        self._drafts = {token: i for i, token in enumerate(given.target_ids.tolist())}

    def unroll(self, texts: Sequence[Conversation], steps: int, stride: int, seed: int) -> Unrolled:
        torch.manual_seed(seed)
        longest = max(len(text.tokens) - text.prompt for text in texts) - 1
        first = int(torch.randint(stride, ())) if longest > stride else 0
        loss, weight = torch.zeros(()), 0.0
        hits, rows = torch.zeros(steps, dtype=torch.int64), torch.zeros(steps, dtype=torch.int64)
        for text in texts:
            for anchor in range(len(text.tokens) - text.prompt - 1):
                goes_on = anchor >= first and (anchor - first) % stride == 0
                chain = self._chain(text, anchor, steps if goes_on else 1)
                for step, (entropy, hit) in enumerate(chain):
                    counted = DECAY**step * (stride if step else 1)
                    loss += counted * entropy
                    weight += counted
                    hits[step] += hit
                    rows[step] += 1
        return Unrolled(loss / weight, hits, rows)

    def _chain(self, text: Conversation, anchor: int, steps: int) -> list[tuple[Tensor, bool]]:
        """Cross-entropy and hit of every draft, from the `anchor`-th answer token on, until the
        text ends or has a token that cannot be drafted."""
        tokens = text.tokens.long()
        row = text.prompt - 1 + anchor
        cache = self._head.new_cache(row + 1 + steps)
        cache.open(0, row + 1 + steps)

        def extend(start: int, states: Tensor) -> tuple[Tensor, Tensor]:
            count = len(states)
            positions = torch.arange(start, start + count)
            segments = [Segment(0, 0, count)]
            after, logits = self._head.forward(
                tokens[positions + 1], states, positions, cache, segments, [count - 1]
            )
            cache.commit(0, range(count))
            return after[-1:], logits[0]

        state, logits = extend(0, self._project(text.aux[: row + 1]))
        drafted: list[tuple[Tensor, bool]] = []
        for place in range(row, row + steps):
            if place > row:
                state, logits = extend(place, state)
            if place + 2 >= len(tokens) or (token := int(tokens[place + 2])) not in self._drafts:
                break
            wanted = (text.final[place + 1] @ self._given.target_head.T).softmax(-1)
            logprobs = logits.log_softmax(-1)
            hit = int(logprobs.argmax()) == self._drafts[token]
            drafted.append((-(wanted * logprobs).sum(), hit))
        return drafted


def assert_equal(ours: Unrolled, theirs: Unrolled) -> None:
    torch.testing.assert_close(ours.loss.detach(), theirs.loss, rtol=1e-5, atol=1e-5)
    assert ours.hits.tolist() == theirs.hits.tolist()
    assert ours.rows.tolist() == theirs.rows.tolist()


LENGTHS = [(9, 30), (1, 12), (20, 2), (4, 21)]


@pytest.mark.parametrize("rope", [None, YARN], ids=["plain rope", "yarn"])
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize("steps", [1, 5])
def test_is_what_the_drafter_computes(steps: int, stride: int, rope: dict[str, Any] | None) -> None:
    given = setting(rope_parameters=rope)
    some = texts(given, LENGTHS)
    ours = given.unroll(some, steps, stride, seed=0)
    assert_equal(ours, Reference(given).unroll(some, steps, stride, seed=0))
    rows = ours.rows.tolist()
    assert 0 < rows[-1] <= rows[0] < sum(answer - 1 for _, answer in LENGTHS)
    assert ours.hits.sum() > 0


@pytest.mark.parametrize("seed", range(4))
def test_which_chains_go_on_is_left_to_chance(seed: int) -> None:
    given = setting()
    some = texts(given, LENGTHS)
    assert_equal(given.unroll(some, 3, 4, seed), Reference(given).unroll(some, 3, 4, seed))


def test_padding_counts_nothing() -> None:
    """Each text alone, weighted by what counts of it, gives what the batch gives."""
    given = setting()
    some = texts(given, LENGTHS)
    together = given.unroll(some, 4, 1, seed=0)
    alone = [given.unroll([text], 4, 1, seed=0) for text in some]
    decays = DECAY ** torch.arange(4.0)
    weights = torch.stack([(part.rows * decays).sum() for part in alone])
    losses = torch.stack([part.loss for part in alone])
    torch.testing.assert_close((losses * weights).sum() / weights.sum(), together.loss)
    assert torch.equal(sum((part.hits for part in alone), torch.zeros(4).long()), together.hits)
    assert torch.equal(sum((part.rows for part in alone), torch.zeros(4).long()), together.rows)


def test_answers_shorter_than_the_stride_and_the_steps() -> None:
    given = setting()
    some = [conversation([1, 2, 3], given.target_ids[:3].tolist(), HIDDEN)]
    ours = given.unroll(some, 5, 8, seed=0)
    assert_equal(ours, Reference(given).unroll(some, 5, 8, seed=0))
    assert ours.rows.tolist() == [2, 1, 0, 0, 0]


def test_a_text_of_unknown_tokens_teaches_nothing() -> None:
    given = setting()
    unknown = sorted(set(range(VOCAB)) - set(given.target_ids.tolist()))
    head = given.trainable()
    batch = collate([conversation([1, 2], unknown[:6], HIDDEN)], "cpu")
    unrolled = head.unroll(batch, SoftTargets(given.target_head), 3, 1, DECAY)
    unrolled.loss.backward()
    assert unrolled.loss == 0
    assert unrolled.rows.tolist() == [0, 0, 0]
    assert not any(p.grad is None or p.grad.any() for p in head.parameters())


@pytest.mark.parametrize("name", sorted(tiny_head().without("d2t", "t2d").weights))
def test_gradients_are_the_slopes_of_the_loss(name: str) -> None:
    """Of every parameter: along its gradient, the loss rises as the gradient says."""
    given = setting()
    batch = collate(texts(given, LENGTHS), "cpu")
    head = given.trainable()
    weight = head.weights[name.replace(".", "/")]

    def loss() -> Tensor:
        torch.manual_seed(0)
        scratch = SoftTargets(given.target_head)
        return head.unroll(batch, scratch, steps=3, stride=2, decay=DECAY).loss

    loss().backward()
    gradient = weight.grad
    assert gradient is not None
    assert gradient.any()
    direction, step = gradient / gradient.norm(), 1e-2
    with torch.no_grad():
        start = weight.clone()
        weight.copy_(start + step * direction)
        above = loss()
        weight.copy_(start - step * direction)
        below = loss()
    torch.testing.assert_close((above - below) / (2 * step), gradient.norm(), rtol=2e-2, atol=1e-4)


def test_the_targets_embedding_is_not_trained() -> None:
    head = setting().trainable()
    assert "embedding" not in dict(head.named_parameters())
    assert "embedding" not in head.state_dict()
