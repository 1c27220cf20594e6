"""The output folder of a run: what it was begun with, and what a stage needs of those before it."""

import hashlib
import json
from pathlib import Path
from typing import Any

from adaptivespec.errors import ConfigError
from adaptivespec.training.corpus import Corpus
from adaptivespec.training.generate import Job
from adaptivespec.training.prompts import Excluded
from adaptivespec.training.ranks import Ranks

PLAN = "plan.json"


def make(folder: Path) -> None:
    """Raises ConfigError when it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error


def begin(
    folder: Path, options: dict[str, Any], jobs: list[Job], excluded: Excluded, ranks: Ranks
) -> None:
    """Write down what is generated here, once for all processes. Shards know their conversations by
    number: raises ConfigError naming what differs when the folder was begun with other `options` or
    messages."""
    file = folder / PLAN
    messages = hashlib.sha256(repr((jobs, excluded.normal_forms())).encode()).hexdigest()[:16]
    mine = options | {"messages_sha256": messages}
    if file.exists():
        there = json.loads(file.read_text())
        different = [
            f"{n} {there.get(n)} there, {v} now" for n, v in mine.items() if there.get(n) != v
        ]
        if different:
            raise ConfigError(
                f"{file}: {'; '.join(different)}; resume with the same options and prompts, or "
                "choose another output folder"
            )
    elif ranks.first:
        write_json(file, mine)  # at once: other processes may be reading already
    ranks.wait()


def corpus_of(model: str, *folders: Path) -> Corpus:
    """The conversations that `model` recorded in all folders. Raises ConfigError when one of them
    has none, or another model's."""
    for folder in folders:
        file = folder / PLAN
        if not file.exists():
            raise ConfigError(f"{folder}: no {PLAN}; run the stage generate first")
        recorded = json.loads(file.read_text())["model"]
        if recorded != model:
            raise ConfigError(f"--model: {model}, but {folder} holds conversations of {recorded}")
        if not Corpus(folder / "corpus").entries:
            raise ConfigError(
                f"{folder / 'corpus'}: no conversations; run the stage generate first"
            )
    return Corpus(*(folder / "corpus" for folder in folders))


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(value, indent=2) + "\n")
    unfinished.replace(file)
