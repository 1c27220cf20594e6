"""What options take, and what is refused with a line that says what is allowed."""

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest

from adaptivespec import arguments
from adaptivespec.shape import Shape


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (arguments.shape, "3,4,4", Shape(3, 4, 4)),
        (arguments.positive, "1", 1),
        (arguments.positive_pair, "4,7", (4, 7)),
        (arguments.seed, "0", 0),
        (arguments.seed, "2147483647", 2**31 - 1),
        (arguments.above_zero, "1e-3", 1e-3),
        (arguments.share, "0", 0.0),
        (arguments.share, "1", 1.0),
        (arguments.temperature, "2", 2.0),
    ],
)
def test_what_is_allowed(kind: Callable[[str], Any], text: str, value: object) -> None:
    assert kind(text) == value


@pytest.mark.parametrize(
    ("kind", "texts", "allowed"),
    [
        (arguments.shape, ["3,4", "3,4,x"], "DEPTH,WIDTH,NODES"),
        (arguments.positive, ["", "0", "-1", "1.5", "²"], "whole number from 1 up"),
        (arguments.positive_pair, ["4", "4,", "4,0", "4,7,9"], "whole number from 1 up"),
        (arguments.seed, ["", "-1", "²", "2147483648"], "from 0 to 2147483647"),
        (arguments.above_zero, ["0", "-1", "inf", "nan", "x"], "number above 0"),
        (arguments.share, ["-0.1", "1.1", "nan", "x"], "from 0 to 1"),
        (arguments.temperature, ["2.1", "inf"], "from 0 to 2"),
    ],
)
def test_what_is_refused(kind: Callable[[str], Any], texts: list[str], allowed: str) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=allowed):
            kind(text)
