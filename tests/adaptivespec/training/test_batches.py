"""Batches: what a row reads and predicts, and in which order all conversations come."""

from collections import Counter
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptivespec.training.batches import _WINDOW, HELD_OUT, Plan, collate, held_out
from adaptivespec.training.corpus import Corpus, Entry, write_shard
from tests.adaptivespec.training.conversations import conversation

PAD = 0


def test_a_batch_pairs_states_with_the_tokens_behind_them() -> None:
    """Row i: the state at i, token i + 1, prediction of token i + 2."""
    long = conversation([10, 11, 12], [20, 21, 22], hidden=2, number=1)
    short = conversation([13], [30, 31], hidden=2, number=2)
    batch = collate([long, short], "cpu")

    assert batch.tokens.tolist() == [[11, 12, 20, 21], [30, PAD, PAD, PAD]]
    assert batch.positions.tolist() == [[0, 1, 2, 3]] * 2
    # the first answer tokens, 20 and 30, are the target's own
    assert batch.answers.tolist() == [[21, 22], [31, PAD]]
    assert batch.answer_mask.tolist() == [[True, True], [True, False]]
    assert batch.answer_rows[0].tolist() == [2, 3]
    assert batch.answer_rows[1, 0] == 0
    assert 0 <= batch.answer_rows[1, 1] < 4  # of no meaning, but a row

    assert torch.equal(batch.aux[0], long.aux[:4])
    assert torch.equal(batch.aux[1, 0], short.aux[0])
    assert not batch.aux[1, 1:].any()
    # the states whose logits are the target's predictions of 21, 22 and 31
    assert torch.equal(batch.final, torch.cat((long.final[3:5], short.final[1:2])))


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(2, 9)), min_size=1, max_size=5))
def test_every_answer_row_predicts_its_answer(lengths: list[tuple[int, int]]) -> None:
    texts = [
        conversation(range(100, 100 + prompt), range(200, 200 + answer), hidden=1, number=i)
        for i, (prompt, answer) in enumerate(lengths)
    ]
    batch = collate(texts, "cpu")
    final = iter(batch.final)
    for i, text in enumerate(texts):
        tokens = text.tokens.tolist()
        predicted = []
        for row, answer, counts in zip(
            batch.answer_rows[i].tolist(),
            batch.answers[i].tolist(),
            batch.answer_mask[i],
            strict=True,
        ):
            if counts:
                assert tokens[row + 2] == answer
                assert batch.tokens[i, row] == tokens[row + 1]
                assert torch.equal(batch.aux[i, row], text.aux[row])
                assert torch.equal(next(final), text.final[row + 1])
                predicted.append(answer)
        assert predicted == tokens[text.prompt + 1 :]
    assert next(final, None) is None


# -- the order ------------------------------------------------------------------------------------


def entry(number: int, length: int, prompt: int = 1) -> Entry:
    return Entry(Path("shard"), number, 0, length, prompt, 0)


def entries(count: int, seed: int) -> list[Entry]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 60, (count,), generator=generator).tolist()
    return [entry(i, length) for i, length in enumerate(lengths)]


@settings(max_examples=30)
@given(st.integers(1, 3 * _WINDOW), st.integers(40, 400), st.integers(1, 4), st.integers(0, 99))
def test_a_pass_covers_everything_but_what_cannot_be_shared_out(
    count: int, budget: int, ranks: int, seed: int
) -> None:
    """With one process nothing is left out, so that shows what the last batches held."""
    all_of_them = entries(count, seed)
    alone = Plan(all_of_them, budget, 1, seed).epoch(0)
    assert Counter(e.id for batch in alone for e in batch) == Counter(range(count))
    batches = Plan(all_of_them, budget, ranks, seed).epoch(0)
    assert len(batches) % ranks == 0
    assert len(alone) - len(batches) < ranks
    assert batches == alone[: len(batches)]


@settings(max_examples=30)
@given(st.integers(1, 2 * _WINDOW), st.integers(1, 400), st.integers(0, 99))
def test_batches_keep_to_the_budget(count: int, budget: int, seed: int) -> None:
    for batch in Plan(entries(count, seed), budget, 1, seed).epoch(0):
        longest = max(e.length for e in batch)
        assert len(batch) * longest <= budget or len(batch) == 1


def test_similar_lengths_share_a_batch() -> None:
    batches = Plan(entries(_WINDOW, 0), 600, 1, 0).epoch(0)
    padded = sum(len(batch) * max(e.length for e in batch) for batch in batches)
    assert padded < 1.1 * sum(e.length for batch in batches for e in batch)


def test_every_pass_has_an_order_of_its_own_that_the_seed_fixes() -> None:
    some = entries(200, 0)

    def order(seed: int, number: int) -> list[list[int]]:
        return [[e.id for e in batch] for batch in Plan(some, 400, 1, seed).epoch(number)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 1) == order(0, 1)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != order(1, 0)
    lengths = [some[batch[0]].length for batch in order(0, 0)]
    assert lengths != sorted(lengths)


def test_answers_of_one_token_leave_nothing_to_predict() -> None:
    some = [entry(0, length=5, prompt=4), entry(1, length=5, prompt=3)]
    assert [[e.id for e in batch] for batch in Plan(some, 99, 1, 0).epoch(0)] == [[1]]


# -- what is kept from training -------------------------------------------------------------------


def test_all_answers_to_a_prompt_are_held_out_or_none(tmp_path: Path) -> None:
    texts = [
        conversation([prompt, 7], [answer, 8], hidden=1, number=10 * prompt + answer)
        for prompt in range(600)
        for answer in range(3)
    ]
    write_shard(tmp_path, texts[::2], [])
    write_shard(tmp_path, texts[1::2], [])
    corpus = Corpus(tmp_path)
    by_prompt: dict[int, set[bool]] = {}
    for found in corpus.entries:
        by_prompt.setdefault(corpus.prompt(found)[0], set()).add(held_out(found))
    assert len(by_prompt) == 600
    decisions = [decision for (decision,) in by_prompt.values()]
    assert 3 < sum(decisions) < 30


def test_the_lowest_two_percent_of_hashes_are_held_out() -> None:
    bound = int(HELD_OUT * 2**32)
    for prompt_hash in (0, bound - 1, bound + 1, 2**32 - 1):
        found = Entry(Path("shard"), 0, 0, 5, 1, prompt_hash)
        assert held_out(found) == (prompt_hash < bound)
