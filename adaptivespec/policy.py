"""The policies that choose a tree shape per request and step."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

from torch import Tensor

from adaptivespec.config import DCSPolicy, GoodputPolicy, PolicySettings, StaticPolicy
from adaptivespec.cost import DraftCosts, StepWork, VerifyCosts
from adaptivespec.goodput import Goodput
from adaptivespec.pricing import Prices
from adaptivespec.shape import NO_DRAFT, Shape
from adaptivespec.signals import STRICT, Rule, Signals
from adaptivespec.tree import DraftTrees

__all__ = ["DCS", "NO_DRAFT", "Policy", "Shape", "Static", "make_policy"]


class Policy(Protocol):
    """Chooses shapes. One object serves all requests; what it knows of each is in its signals.
    Those that learn do so from what every step verified and took."""

    @property
    def start(self) -> Shape:
        """The shape for a request of which nothing is known."""

    @property
    def reachable(self) -> Sequence[Shape]:
        """Every shape that `shapes` can return, so that each can be prepared for."""

    @property
    def followed(self) -> int | None:
        """How many of the requests that leave their shapes to the policy the drafter is fed; None:
        all."""

    def profiled(self, verify: VerifyCosts | None, draft: DraftCosts | None) -> None:
        """What passes were measured to cost before the first step; None: not known."""

    def signals(self, rule: Rule = STRICT) -> Signals:
        """Signals of a new request."""

    def shapes(self, signals: Sequence[Signals], running: int) -> list[Shape]:
        """One shape per request, for its next step, in which `running` requests decode."""

    def prices(self, signals: Sequence[Signals | None], running: int) -> Prices | None:
        """What the drafter of these requests' trees is to weigh, of those that follow the policy;
        None: nothing."""

    def verified(self, trees: DraftTrees, path: Tensor, rules: Sequence[Rule]) -> None:
        """What a step verified: trees [B, N], what was accepted (Walk.path), the rules [B]."""

    def stepped(self, step: StepWork) -> None:
        """What a step that computed no prompt did, and took."""


class _Unlearning:
    """What policies do that learn nothing from steps."""

    followed = None

    def profiled(self, verify: VerifyCosts | None, draft: DraftCosts | None) -> None:
        return

    def prices(self, signals: Sequence[Signals | None], running: int) -> None:
        return None

    def verified(self, trees: DraftTrees, path: Tensor, rules: Sequence[Rule]) -> None:
        return

    def stepped(self, step: StepWork) -> None:
        return


class DCS(_Unlearning):
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

    def signals(self, rule: Rule = STRICT) -> Signals:
        return _signals(self._settings, rule)

    def shapes(self, signals: Sequence[Signals], running: int) -> list[Shape]:
        scale = self._settings.scale
        return [self.reachable[bisect_right(self._bounds, s.dcs / scale)] for s in signals]


class Static(_Unlearning):
    """The same shape at every step. Its signals are kept for whoever watches."""

    def __init__(self, settings: StaticPolicy) -> None:
        self.start = settings.shape
        self.reachable = [settings.shape]

    def signals(self, rule: Rule = STRICT) -> Signals:
        return _signals(DCSPolicy(), rule)

    def shapes(self, signals: Sequence[Signals], running: int) -> list[Shape]:
        return [self.start] * len(signals)


def make_policy(settings: PolicySettings) -> Policy:
    """The policy that the settings describe."""
    match settings:
        case StaticPolicy():
            return Static(settings)
        case DCSPolicy():
            return DCS(settings)
        case GoodputPolicy():
            return Goodput(settings)


def _signals(settings: DCSPolicy, rule: Rule) -> Signals:
    return Signals(settings.alpha, settings.patience, settings.initial_acceptance, rule)


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
