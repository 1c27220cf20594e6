"""The policies that choose a tree shape per request and step."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from adaptivespec.config import DCSPolicy, PolicySettings, StaticPolicy
from adaptivespec.shape import NO_DRAFT, Shape
from adaptivespec.signals import Signals

__all__ = ["DCS", "NO_DRAFT", "Policy", "Shape", "Static", "make_policy"]


class Policy(Protocol):
    """Chooses shapes. One object serves all requests; what it knows of each is in its signals."""

    @property
    def start(self) -> Shape:
        """The shape for a request of which nothing is known."""

    @property
    def reachable(self) -> Sequence[Shape]:
        """Every shape that `shapes` can return, so that each can be prepared for."""

    def signals(self) -> Signals:
        """Signals of a new request."""

    def shapes(self, signals: Sequence[Signals]) -> list[Shape]:
        """One shape per request, for its next step."""


class DCS:
    """The policy of arXiv 2609.02897: (depth, width, nodes) is interpolated between `low` at t = 0
    and `high` at t = 1, each rounded half up, where t = clamp(dcs / scale, 0, 1).

    That line passes few shapes, which are laid out once; a step only looks up where t falls.
    """

    def __init__(self, settings: DCSPolicy) -> None:
        self._settings = settings
        self._bounds, self.reachable = _line(settings.low, settings.high)

    @property
    def start(self) -> Shape:
        return self._settings.low

    def signals(self) -> Signals:
        return _signals(self._settings)

    def shapes(self, signals: Sequence[Signals]) -> list[Shape]:
        scale = self._settings.scale
        return [self.reachable[bisect_right(self._bounds, s.dcs / scale)] for s in signals]


class Static:
    """The same shape at every step. Its signals are kept for whoever watches."""

    def __init__(self, settings: StaticPolicy) -> None:
        self.start = settings.shape
        self.reachable = [settings.shape]

    def signals(self) -> Signals:
        return _signals(DCSPolicy())

    def shapes(self, signals: Sequence[Signals]) -> list[Shape]:
        return [self.start] * len(signals)


def make_policy(settings: PolicySettings) -> Policy:
    """The policy that the settings describe."""
    return Static(settings) if isinstance(settings, StaticPolicy) else DCS(settings)


def _signals(settings: DCSPolicy) -> Signals:
    return Signals(settings.alpha, settings.patience, settings.initial_acceptance)


def _line(low: Shape, high: Shape) -> tuple[list[float], list[Shape]]:
    """The shapes on the line from `low` to `high`, and the smallest float t of each but the first.

    a + t (b - a), rounded half up, changes at t = (k + 1/2 - a) / (b - a): at that t itself when
    growing, just above it when shrinking. Exact: no t is rounded to the wrong side.
    """
    bounds: set[float] = set()
    for a, b in zip(low, high, strict=True):
        for k in range(min(a, b), max(a, b)):
            bound = (Fraction(2 * k + 1, 2) - a) / (b - a)
            t = float(bound)
            if Fraction(t) < bound or (b < a and Fraction(t) == bound):
                t = math.nextafter(t, math.inf)
            bounds.add(t)
    ordered = sorted(bounds)
    return ordered, [_shape_at(Fraction(t), low, high) for t in [0.0, *ordered]]


def _shape_at(t: Fraction, low: Shape, high: Shape) -> Shape:
    ends = zip(low, high, strict=True)
    depth, width, nodes = (math.floor(a + t * (b - a) + Fraction(1, 2)) for a, b in ends)
    return Shape(depth, width, nodes) if depth and width else NO_DRAFT
