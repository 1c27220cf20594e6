"""Types of command-line arguments. All raise `argparse.ArgumentTypeError` with what is allowed."""

import argparse
import math

from adaptivespec.shape import Shape


def shape(text: str) -> Shape:
    """DEPTH,WIDTH,NODES."""
    try:
        depth, width, nodes = map(int, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not DEPTH,WIDTH,NODES") from None
    return Shape(depth, width, nodes)


def positive(text: str) -> int:
    """A whole number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def seed(text: str) -> int:
    """A whole number from 0 to 2^31 - 1: it is shifted into the upper half of 64 bits."""
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2147483647")
    return int(text)


def positive_pair(text: str) -> tuple[int, int]:
    """Two whole numbers from 1 up, with a comma between."""
    first, _, second = text.partition(",")
    return positive(first), positive(second)


def nonempty(text: str) -> str:
    """A text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("it must not be empty")
    return text


def above_zero(text: str) -> float:
    """A number above 0."""
    value = _number(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def share(text: str) -> float:
    """A number from 0 to 1."""
    return _between(text, 0, 1)


def temperature(text: str) -> float:
    """A number from 0 to 2."""
    return _between(text, 0, 2)


def _between(text: str, low: int, high: int) -> float:
    value = _number(text)
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
