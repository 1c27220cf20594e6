"""Is an answer right, and does it end as another does? One scorer per kind of set."""

import ast
import re
from decimal import Decimal
from functools import cache
from typing import Protocol

from adaptivespec.bench import extra, sandbox
from adaptivespec.bench.sets import Item


class Scorer(Protocol):
    def correct(self, text: str, item: Item) -> bool | None:
        """Whether an answer is right; None where a set knows no right answers."""

    def agrees(self, text: str, other: str) -> bool | None:
        """Whether an answer comes to the same end as another; None where that comes to none."""


class FinalNumber:
    """GSM8K: the number in the last \\boxed{}, else behind the last ####, else the last one."""

    def correct(self, text: str, item: Item) -> bool:
        return final_number(text) == final_number(item.reference["answer"])

    def agrees(self, text: str, other: str) -> bool | None:
        wanted = final_number(other)
        return None if wanted is None else final_number(text) == wanted


_NUMBER = re.compile(r"(?<!\d)-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<!\d)-?\.\d+")
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")


def final_number(text: str) -> Decimal | None:
    """The number that an answer ends in, None without one."""
    text = _conclusion(text).replace("{,}", ",").replace("\\!", "").replace("$", "")
    boxed = [number for box in _BOXED.findall(text) for number in _NUMBER.findall(box)]
    _, marked, behind = text.rpartition("####")
    numbers = boxed[-1:] or (_NUMBER.findall(behind)[:1] if marked else [])
    numbers = numbers or _NUMBER.findall(text)[-1:]
    return Decimal(numbers[0].replace(",", "")) if numbers else None


class Mathematics:
    """MATH-500: equality as the library math-verify sees it."""

    def __init__(self) -> None:
        """Raises ConfigError without the library."""
        library = extra.load("math_verify", "MATH-500's scorer")
        self._parse, self._verify = cache(library.parse), library.verify

    def correct(self, text: str, item: Item) -> bool:
        return self._equal(f"${item.reference['answer']}$", text)

    def agrees(self, text: str, other: str) -> bool | None:
        other = _conclusion(other)
        return self._equal(other, text) if self._parse(other) else None

    def _equal(self, gold: str, text: str) -> bool:
        return bool(self._verify(self._parse(gold), self._parse(_conclusion(text))))


class Functions:
    """HumanEval: the task's tests, run in the sandbox. Programs agree that differ in nothing but
    comments and layout."""

    def __init__(self) -> None:
        """Raises ConfigError where programs cannot be run safely."""
        sandbox.check()

    def correct(self, text: str, item: Item) -> bool:
        return sandbox.run(program(text, item)) == "passed"

    def agrees(self, text: str, other: str) -> bool | None:
        wanted = _syntax(_code(other))
        return None if wanted is None else _syntax(_code(text)) == wanted


def program(text: str, item: Item) -> str:
    """The task, the answer and the tests. An answer that defines the function replaces the task's,
    which goes first for its imports and helpers; any other goes on where the task ends."""
    task, tests, name = (item.reference[key] for key in ("prompt", "test", "entry_point"))
    code = _code(text)
    between = "\n" if re.search(rf"^\s*def {re.escape(name)}\b", code, re.MULTILINE) else ""
    return f"{task}{between}{code}\n\n{tests}\n\ncheck({name})\n"


class SameText:
    """Sets without right answers: two answers agree that are the same text."""

    def correct(self, text: str, item: Item) -> None:
        return None

    def agrees(self, text: str, other: str) -> bool:
        return text == other


def scorer_of(kind: str) -> Scorer:
    """The scorer of a set's kind. Raises ConfigError for what it lacks."""
    scorers: dict[str, type[Scorer]] = {
        "gsm8k": FinalNumber,
        "math500": Mathematics,
        "humaneval": Functions,
    }
    return scorers.get(kind, SameText)()


def _conclusion(text: str) -> str:
    """The answer behind what a reasoning model thought aloud."""
    return text.rpartition("</think>")[2]


_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def _code(text: str) -> str:
    """The first code block that parses and defines something, else the first; all of an answer
    without blocks."""
    answer = _conclusion(text)
    blocks: list[str] = _FENCED.findall(answer)
    whole = (b for b in blocks if "def " in b and _syntax(b) is not None)
    return next(whole, blocks[0] if blocks else answer)


def _syntax(code: str) -> str | None:
    try:
        return ast.dump(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
