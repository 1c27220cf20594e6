"""Conversations on disk come back as they were, whole shards or none."""

from pathlib import Path

import torch

from adaptivespec.training.corpus import Conversation, Corpus, bytes_used, done, write_shard
from tests.adaptivespec.training.conversations import conversation, random_conversation

HIDDEN = 4


def some(*ids: int) -> list[Conversation]:
    return [random_conversation(i % 5 + 1, i % 3 + 2, HIDDEN, 99, number=i) for i in ids]


def assert_same(ours: Conversation, theirs: Conversation) -> None:
    assert (ours.id, ours.prompt) == (theirs.id, theirs.prompt)
    for name in ("tokens", "aux", "final"):
        mine, others = getattr(ours, name), getattr(theirs, name)
        assert mine.dtype == others.dtype
        assert torch.equal(mine, others)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """In order of ids, whichever shard they are in and however they lie in it."""
    write_shard(tmp_path, some(7, 3, 5), skipped=[4])
    write_shard(tmp_path, some(6, 2), skipped=[])
    corpus = Corpus(tmp_path)
    expected = some(2, 3, 5, 6, 7)
    assert [entry.id for entry in corpus.entries] == [2, 3, 5, 6, 7]
    for entry, wanted in zip(corpus.entries, expected, strict=True):
        assert_same(corpus.read(entry), wanted)
        assert (entry.length, entry.prompt) == (len(wanted.tokens), wanted.prompt)
        assert corpus.prompt(entry) == wanted.tokens[: wanted.prompt].tolist()
    answers = sorted(tokens.tolist() for tokens in corpus.answers())
    assert answers == sorted(c.tokens[c.prompt :].tolist() for c in expected)


def test_shards_account_for_what_gave_no_conversation(tmp_path: Path) -> None:
    write_shard(tmp_path, some(5, 1), skipped=[3, 9])
    write_shard(tmp_path, [], skipped=[0])
    assert done(tmp_path) == {0, 1, 3, 5, 9}
    assert [entry.id for entry in Corpus(tmp_path).entries] == [1, 5]


def test_an_unfinished_shard_does_not_exist(tmp_path: Path) -> None:
    write_shard(tmp_path, some(1), skipped=[])
    (shard,) = tmp_path.iterdir()
    size = bytes_used(tmp_path)
    shard.with_name("shard-00000002.tmp").write_bytes(shard.read_bytes()[: size // 2])
    assert done(tmp_path) == {1}
    assert bytes_used(tmp_path) == size == shard.stat().st_size
    assert len(Corpus(tmp_path).entries) == 1


def test_equal_prompts_have_one_hash_whatever_their_answers(tmp_path: Path) -> None:
    texts = [([1, 2], [3, 4]), ([1, 2], [5, 6, 7]), ([1, 2, 3], [4])]
    write_shard(
        tmp_path, [conversation(*text, HIDDEN, number=i) for i, text in enumerate(texts)], []
    )
    first, same, other = (entry.prompt_hash for entry in Corpus(tmp_path).entries)
    assert first == same != other
    assert all(0 <= prompt_hash < 2**32 for prompt_hash in (first, other))


def test_a_folder_without_shards_is_empty(tmp_path: Path) -> None:
    assert Corpus(tmp_path).entries == []
    assert done(tmp_path) == set()
    assert bytes_used(tmp_path / "nowhere") == 0
