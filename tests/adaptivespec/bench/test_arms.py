"""The grid of arms, their names, and which of them differ in guards alone."""

import pytest

from adaptivespec.bench.arms import Arm, Rule, grid, guards_name, rules, static_arm, without_guards
from adaptivespec.config import UNGUARDED, DCSPolicy, GuardSettings
from adaptivespec.shape import Shape

ONE = GuardSettings(max_promotions=1)
WORDS = GuardSettings(never_promote=("digits", "operators"))


def test_the_grid_is_trees_by_rules_and_plain_decoding() -> None:
    arms = grid([Shape(3, 4, 4)], [("dcs", DCSPolicy())], rules([0.2, 1.0], []), [None])
    assert [arm.name for arm in arms] == [
        "plain",
        "static 3,4,4 strict",
        "dcs strict",
        "static 3,4,4 kappa 0.2",
        "dcs kappa 0.2",
    ]
    assert [arm.mode for arm in arms] == ["off", "static", "adaptive", "static", "adaptive"]
    assert [arm.kappa for arm in arms[1:]] == [1, 1, 0.2, 0.2]
    assert without_guards(arms) == {}


def test_drafters_are_told_apart_by_name() -> None:
    arms = grid([Shape(3, 1, 4)], [], rules([1.0], []), ["lookup", "eagle3"])
    assert [arm.name for arm in arms[1:]] == [
        "lookup: static 3,1,4 strict",
        "eagle3: static 3,1,4 strict",
    ]


def test_guards_multiply_lossy_rules_alone() -> None:
    assert rules([0.45, 1.0, 0.2], [UNGUARDED, ONE]) == [
        Rule(1.0),
        Rule(0.45, UNGUARDED),
        Rule(0.45, ONE),
        Rule(0.2, UNGUARDED),
        Rule(0.2, ONE),
    ]
    arms = grid([Shape(3, 1, 4)], [], rules([1.0, 0.2], [UNGUARDED, ONE]), [None])
    assert [(arm.name, arm.guards) for arm in arms[1:]] == [
        ("static 3,1,4 strict", None),
        ("static 3,1,4 kappa 0.2 unguarded", UNGUARDED),
        ("static 3,1,4 kappa 0.2 1 a step", ONE),
    ]


@pytest.mark.parametrize(
    ("guards", "name"),
    [
        (UNGUARDED, "unguarded"),
        (GuardSettings(max_promotions=0), "0 a step"),
        (GuardSettings(max_promotions_per_window=2, promotion_window=16), "2 in 16"),
        (WORDS, "no digits or operators"),
        (GuardSettings(max_promotions=1, never_promote=("digits",)), "1 a step, no digits"),
    ],
)
def test_the_name_of_guards_is_what_they_allow(guards: GuardSettings, name: str) -> None:
    assert guards_name(guards) == name


def test_an_arm_is_held_against_the_one_that_differs_in_guards_alone() -> None:
    both = rules([1.0, 0.2, 0.45], [UNGUARDED, ONE])
    arms = grid([Shape(3, 1, 4), Shape(3, 4, 4)], [], both, ["lookup", "eagle3"])
    arms.append(static_arm(Shape(2, 1, 3), Rule(0.2, WORDS)))  # alone
    arms.append(Arm(name="peer", peer="http://other/v1"))
    found = without_guards(arms)
    assert len(found) == 2 * 2 * 2 * 2 + 1
    guarded = "lookup: static 3,4,4 kappa 0.45 "
    assert found[guarded + "1 a step"] == found[guarded + "unguarded"] == guarded + "unguarded"
    assert found["static 2,1,3 kappa 0.2 no digits or operators"] is None
