"""What is measured, as it is written down: one line per turn of an arm."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from adaptivespec.errors import ConfigError
from adaptivespec.request import StepSeconds


class Counts(msgspec.Struct, frozen=True):
    """What speculation did for an answer, and where its steps' time went; as
    `adaptivespec.request.Usage` and a server's `usage.speculation` have it."""

    steps: int
    drafted_tokens: int
    accepted_tokens: int
    promoted_tokens: int
    accepted_per_position: list[int]
    step_seconds: StepSeconds


class Answer(msgspec.Struct, frozen=True):
    """One request. Times are seconds from its submission. `gaps`: between deliveries, of which each
    may bring several tokens. `counts` are None where the endpoint does not say."""

    row: int
    seed: int
    text: str
    finish_reason: str
    prompt_tokens: int
    tokens: int
    seconds: float
    first_token_s: float
    gaps: list[float]
    counts: Counts | None = None


class Outcome(msgspec.Struct, frozen=True):
    """A turn's wall time, from its first submission to its last token, and what came of it."""

    seconds: float
    answers: list[Answer]


Stage = Literal["sweep", "measure"]


class Turn(NamedTuple):
    """Which turn: `block` counts the blocks of prompts that are answered together."""

    stage: Stage
    set: str
    concurrency: int
    round: int
    block: int
    arm: str


class Record(msgspec.Struct, frozen=True):
    """A turn that was taken."""

    turn: Turn
    outcome: Outcome


class Journal:
    """The records of a run in a file, written one by one as they are made. A line that a crash cut
    off is dropped: its turn is taken again."""

    def __init__(self, file: Path) -> None:
        """Read what is there. Raises ConfigError for a file of another kind."""
        self._file = file
        self._records: dict[Turn, Outcome] = {}
        content = file.read_bytes() if file.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        try:
            for line in whole.splitlines():
                record = msgspec.json.decode(line, type=Record)
                self._records[record.turn] = record.outcome
        except msgspec.DecodeError as error:
            raise ConfigError(f"{file}: not a journal of measurements: {error}") from error
        if whole != content:
            file.write_bytes(whole)

    def __contains__(self, turn: Turn) -> bool:
        return turn in self._records

    def __getitem__(self, turn: Turn) -> Outcome:
        return self._records[turn]

    def add(self, turn: Turn, outcome: Outcome) -> None:
        """Keep a record, on disk before this returns."""
        line = msgspec.json.encode(Record(turn, outcome)) + b"\n"
        with self._file.open("ab") as lines:
            lines.write(line)
        self._records[turn] = outcome

    def records(self, stage: Stage) -> Iterable[tuple[Turn, Outcome]]:
        """Those of a stage, in the order in which they were made."""
        return ((t, o) for t, o in self._records.items() if t.stage == stage)


def write_json(file: Path, content: object) -> None:
    """Whole or not at all, for people to read too."""
    partial = file.with_name(file.name + ".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    partial.replace(file)


def read_json(file: Path) -> dict[str, Any]:
    """Raises ConfigError for what is no JSON object."""
    try:
        content = json.loads(file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return content
