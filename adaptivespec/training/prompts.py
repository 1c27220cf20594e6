"""Prompts to train on: rows of JSONL files, and messages that the target writes itself."""

import gzip
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from adaptivespec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptSet:
    """User messages from one file: `FILE:FIELD[:COUNT[:STEP]]` on the command line."""

    name: str
    messages: list[str]


@dataclass(frozen=True, slots=True)
class SelfWritten:
    """`count` user messages that the target writes, each beginning with `start`: `COUNT[:START]` on
    the command line."""

    count: int
    start: str


def read_prompts(text: str) -> PromptSet:
    """`FILE:FIELD[:COUNT[:STEP]]`: of a JSONL file (.gz too) every STEP-th row from the first on,
    COUNT at most; FIELD of each (its first element, if it is a list) is one user message. Raises
    ConfigError naming the part that is wrong."""
    name, _, rest = text.partition(":")
    field, *numbers = rest.split(":")
    file = Path(name).expanduser()
    if not field or len(numbers) > 2 or not all(n.isdecimal() and int(n) > 0 for n in numbers):
        raise ConfigError(f"prompts {text!r}: not FILE:FIELD[:COUNT[:STEP]]")
    count, step = [*map(int, numbers), None, None][:2]
    try:
        with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
            rows = [line for line in lines if line.strip()]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"prompts {text!r}: {error}") from error
    messages = [_message(row, field, text) for row in rows[::step][:count]]
    return PromptSet(file.name.split(".")[0], messages)


def _message(row: str, field: str, text: str) -> str:
    try:
        value = json.loads(row)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"prompts {text!r}: a row without {field!r}: {row[:80]!r}") from error
    message = value[0] if isinstance(value, list) and value else value
    if not isinstance(message, str):
        raise ConfigError(f"prompts {text!r}: {field!r} is no text in {row[:80]!r}")
    return message


def read_self_written(text: str) -> SelfWritten:
    r"""`COUNT[:START]`; `\n` in START is a line break. Raises ConfigError."""
    count, _, start = text.partition(":")
    if not count.isdecimal() or int(count) < 1:
        raise ConfigError(f"self-written prompts {text!r}: not COUNT[:START]")
    return SelfWritten(int(count), start.replace("\\n", "\n"))


class Excluded:
    """Messages that must not be trained on, known by their words, whatever the case, spacing and
    punctuation: `in` is true of a message that equals one, or that contains the opening of one, its
    first 60 letters and digits."""

    def __init__(self, messages: Iterable[str] = ()) -> None:
        self._normal = {_normal(message) for message in messages} - {""}
        self._openings = {text[:_OPENING] for text in self._normal if len(text) >= _OPENING}

    def normal_forms(self) -> list[str]:
        """What identifies the messages, in an order of their own."""
        return sorted(self._normal)

    def __contains__(self, message: str) -> bool:
        text = _normal(message)
        if text in self._normal:
            return True
        windows = (text[i : i + _OPENING] for i in range(len(text) - _OPENING + 1))
        return bool(self._openings) and any(window in self._openings for window in windows)


_OPENING = 60
"""Letters and digits that two messages share by more than chance."""


def _normal(message: str) -> str:
    return "".join(character for character in message.casefold() if character.isalnum())
