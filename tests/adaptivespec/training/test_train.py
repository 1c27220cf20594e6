"""A run that is stopped and resumed is the run that was not stopped."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from adaptivespec.errors import ConfigError
from adaptivespec.models.config import DecoderConfig
from adaptivespec.training.batches import Plan, held_out
from adaptivespec.training.corpus import Conversation, Corpus, Entry, write_shard
from adaptivespec.training.model import TrainableHead
from adaptivespec.training.ranks import Ranks
from adaptivespec.training.train import LOG_EVERY, Recipe, Trainer
from adaptivespec.training.warm_start import (
    count_tokens,
    draft_vocabulary,
    head_config,
    warm_start,
)
from tests.adaptivespec.training.conversations import random_conversation
from tests.factories import VOCAB_SIZE, tiny_model

RECIPE = Recipe(passes=2.5, tokens=300, unroll=(2, 4), learning_rate=2e-3, warmup=5, seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of more conversations than are sorted by length at a time."""
    folder = tmp_path_factory.mktemp("corpus")
    conversations = [
        random_conversation(1 + i % 3, 2 + i % 11, 32, VOCAB_SIZE, number=i) for i in range(1100)
    ]
    for start in range(0, len(conversations), 300):
        write_shard(folder, conversations[start : start + 300], [])
    return folder


@cache
def target() -> tuple[DecoderConfig, dict[str, torch.Tensor]]:
    model = tiny_model()
    return DecoderConfig.from_hf(model.config.to_dict()), model.state_dict()


def new_trainer(corpus: Corpus, recipe: Recipe = RECIPE, vocabulary: int = 300) -> Trainer:
    config, weights = target()
    ids = draft_vocabulary(count_tokens(corpus.answers(), config.vocab_size), vocabulary)
    made = head_config(config, vocabulary)
    embedding = weights["model.embed_tokens.weight"]
    head = TrainableHead(made, warm_start(config, weights, ids, seed=0), embedding, ids)
    return Trainer(head, embedding[ids], corpus, recipe, Ranks("cpu", threads=1))


class Recording(Corpus):
    """Remembers what is read, and fails when `limit` conversations have been read."""

    def __init__(self, folder: Path, limit: float = float("inf")) -> None:
        super().__init__(folder)
        self.seen: list[int] = []
        self._limit = limit

    def read(self, entry: Entry) -> Conversation:
        if len(self.seen) >= self._limit:
            raise OSError("the disk is gone")
        self.seen.append(entry.id)
        return super().read(entry)


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def complete(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Path]:
    run = tmp_path_factory.mktemp("complete")
    trainer = new_trainer(Corpus(folder))
    trainer.run(run, save_every=20)
    return trainer, run


def passes(folder: Path) -> list[int]:
    """The number of batches of the first three passes."""
    entries = [e for e in Corpus(folder).entries if not held_out(e)]
    plan = Plan(entries, RECIPE.tokens, 1, RECIPE.seed)
    return [len(plan.epoch(number)) for number in range(3)]


def test_passes_need_not_have_equally_many_batches(
    folder: Path, complete: tuple[Trainer, Path]
) -> None:
    first, second, _ = passes(folder)
    assert second < first, "choose another seed: this one tests nothing"
    trainer, _ = complete
    assert trainer.step == trainer.steps == -(-5 * first // 2)


def test_every_pass_reads_all_that_is_not_held_out(folder: Path, tmp_path: Path) -> None:
    corpus = Recording(folder)
    trainer = new_trainer(corpus, replace(RECIPE, passes=1.0))
    trainer.run(tmp_path, save_every=100)
    kept = {e.id for e in corpus.entries if held_out(e)}
    assert len(kept) > 10
    assert sorted(corpus.seen) == sorted({e.id for e in corpus.entries} - kept)


@pytest.mark.parametrize("read", [700, 1900], ids=["in the first pass", "in the second"])
def test_resumed_it_ends_where_it_would_have_ended(
    folder: Path, complete: tuple[Trainer, Path], tmp_path: Path, read: int
) -> None:
    trainer, run = complete
    stopped = new_trainer(Recording(folder, limit=read))
    with pytest.raises(OSError, match="disk is gone"):
        stopped.run(tmp_path, save_every=LOG_EVERY)
    assert 0 < stopped.step < trainer.steps
    with (tmp_path / "log.jsonl").open("a") as log:  # what the next checkpoint would have covered
        log.write(json.dumps({"step": stopped.step + LOG_EVERY}) + "\n")
    resumed = new_trainer(Corpus(folder))
    resumed.run(tmp_path, save_every=LOG_EVERY)
    assert resumed.step == trainer.steps
    ours, theirs = resumed.head.state_dict(), trainer.head.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert log_of(tmp_path) == log_of(run)


def test_it_reports_as_it_goes(complete: tuple[Trainer, Path]) -> None:
    trainer, run = complete
    log = log_of(run)
    reported = [entry["step"] for entry in log]
    assert reported == [*range(LOG_EVERY, trainer.steps, LOG_EVERY), trainer.steps]
    first, *_, last = log
    assert (len(first["top1"]), len(last["top1"])) == RECIPE.unroll
    assert last["loss"] < first["loss"]


def test_what_is_complete_is_not_trained_further(
    folder: Path, complete: tuple[Trainer, Path], tmp_path: Path
) -> None:
    _, run = complete
    checkpoint = run / "checkpoint.pt"
    (tmp_path / checkpoint.name).write_bytes(checkpoint.read_bytes())
    corpus = Recording(folder, limit=0)
    again = new_trainer(corpus)
    again.run(tmp_path, save_every=20)
    assert again.step == again.steps
    assert not (tmp_path / "log.jsonl").exists()


@pytest.mark.parametrize(
    ("changes", "vocabulary", "named"),
    [
        ({"learning_rate": 1e-4}, 300, "recipe .*'learning_rate': 0.002,.* there, .*0.0001"),
        ({"unroll": (2, 5)}, 300, r"recipe .*\(2, 4\).* there, .*\(2, 5\)"),
        ({"passes": 3.0}, 300, r"steps \d+ there, \d+ now"),
        ({}, 200, "draft vocabulary .300 tokens there, 200 now"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    folder: Path,
    complete: tuple[Trainer, Path],
    changes: dict[str, Any],
    vocabulary: int,
    named: str,
) -> None:
    _, run = complete
    other = new_trainer(Corpus(folder), replace(RECIPE, **changes), vocabulary)
    with pytest.raises(ConfigError, match=named) as caught:
        other.run(run, save_every=20)
    assert str(run / "checkpoint.pt") in str(caught.value)


def test_a_checkpoint_of_another_corpus_is_refused(
    folder: Path, complete: tuple[Trainer, Path], tmp_path: Path
) -> None:
    for shard in folder.iterdir():
        (tmp_path / shard.name).symlink_to(shard)
    write_shard(tmp_path, [random_conversation(2, 2, 32, VOCAB_SIZE, number=1100)], [])
    _, run = complete
    with pytest.raises(ConfigError, match=r"corpus \w{16} there, \w{16} now"):
        new_trainer(Corpus(tmp_path)).run(run, save_every=20)


def test_too_few_conversations(tmp_path: Path) -> None:
    write_shard(tmp_path, [random_conversation(3, 1, 32, VOCAB_SIZE)], [])
    with pytest.raises(ConfigError, match="too few"):
        new_trainer(Corpus(tmp_path))
