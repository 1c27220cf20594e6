"""Guards of the margin rule: caps per window, and tokens that are never touched."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.config import UNGUARDED, GuardSettings, TokenClass, load_settings
from adaptivespec.drafting import DraftedSequence
from adaptivespec.guards import NO_STEP_GUARDS, Guards, StepGuards, class_bits, token_classes
from adaptivespec.margin import promote
from adaptivespec.policy import make_policy
from tests.adaptivespec.trees import Tree, batch, trees
from tests.smollm2 import tokenizer


def sequence(prompt: int, guards: GuardSettings = UNGUARDED) -> DraftedSequence:
    signals = make_policy(load_settings({}).policy).signals()
    return DraftedSequence(0, [0] * prompt, 1000, 2000, signals, guards=guards)


def caps(guards: Guards, *sequences: DraftedSequence) -> list[int] | None:
    """What a step leaves to each."""
    found = guards.of_step(sequences).caps
    return None if found is None else found.tolist()


@given(
    st.integers(0, 3),
    st.integers(1, 12),
    st.integers(1, 5),
    st.none() | st.integers(0, 2),
    st.lists(st.lists(st.booleans(), max_size=6), max_size=20),
)
def test_no_window_has_more_promotions_than_allowed(
    per_window: int, window: int, prompt: int, per_step: int | None, wanted: list[list[bool]]
) -> None:
    """`wanted`: of each step's accepted tokens, which would be promotions without a cap."""
    settings = GuardSettings(
        max_promotions=per_step, max_promotions_per_window=per_window, promotion_window=window
    )
    guards = Guards(settings, tokenizer())
    request, emitted = sequence(prompt), [False] * prompt
    for step in wanted:
        left = caps(guards, request)
        assert left is not None
        (cap,) = left
        # A promotion beyond the cap does not happen, and ends the step.
        allowed = [
            not jump or so_far <= cap for jump, so_far in zip(step, accumulate(step), strict=True)
        ]
        promoted = step[: allowed.index(False)] if False in allowed else step
        request.note_promotions(promoted)
        request.tokens += [0] * (len(promoted) + 1)
        emitted += [*promoted, False]
        if per_step is not None:
            assert sum(promoted) <= per_step
    for start in range(len(emitted)):
        assert sum(emitted[start : start + window]) <= per_window


def test_without_guards_nothing_is_limited() -> None:
    guards = Guards(UNGUARDED, tokenizer())
    assert guards.of_step([sequence(1)]) is NO_STEP_GUARDS
    step = Guards(GuardSettings(max_promotions=3), tokenizer()).of_step([sequence(1)] * 2)
    assert step.caps is not None
    assert step.caps.tolist() == [3, 3]
    assert step.never is None


def test_a_request_tightens_what_the_engine_allows_and_never_loosens_it() -> None:
    wider = sequence(10, GuardSettings(max_promotions=5))
    tighter = sequence(10, GuardSettings(max_promotions=1))
    windowed = sequence(10, GuardSettings(max_promotions_per_window=2, promotion_window=4))
    for each in (wider, tighter, windowed):
        each.promotions += [7, 9]
    guarded = Guards(GuardSettings(max_promotions=2), tokenizer())
    assert caps(guarded, sequence(10), wider, tighter, windowed) == [2, 2, 1, 0]
    free = caps(Guards(UNGUARDED, tokenizer()), sequence(10), wider, tighter)
    assert free is not None
    assert free[0] > max(free[1:])
    assert free[1:] == [5, 1]


def test_classes_of_a_request_join_the_engines() -> None:
    digits, operators = (GuardSettings(never_promote=(name,)) for name in ("digits", "operators"))
    guards = Guards(digits, tokenizer())
    never = guards.of_step([sequence(1), sequence(1, operators), sequence(1, digits)]).never
    assert never is not None
    both = class_bits(["digits", "operators"])
    assert never.tolist() == [class_bits(["digits"]), both, class_bits(["digits"])]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", ["digits"]), (" =", ["operators"]), (" the", [])],
)
def test_classes_are_those_of_the_tokens_text(text: str, expected: list[TokenClass]) -> None:
    classes = token_classes(tokenizer())
    assert len(classes) == tokenizer().vocab_size + 1
    assert classes[-1] == 0
    found = 0
    for token in tokenizer().encode(text):
        found |= int(classes[token])
    assert found == class_bits(expected)


@given(trees(), st.data())
def test_a_token_that_is_never_promoted_is_not_replaced_either(
    tree: Tree, data: st.DataObject
) -> None:
    size = len(tree.tokens)
    never = [*data.draw(st.lists(st.booleans(), min_size=5, max_size=5)), False]
    guards = StepGuards(never=torch.tensor([2]), classes=torch.tensor(never).byte() * 3)
    target = torch.tensor([data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))])
    forest = batch([tree])
    gap = torch.full((1, size), -0.1)
    gap[0, 0] = -torch.inf
    kappa = torch.tensor([0.5])
    predict, promoted = guards.promote(forest.tokens, forest.parents, target, gap, kappa)
    for node in range(size):
        if promoted[0, node]:
            before, after = int(target[0, node]), int(predict[0, node])
            assert not never[after]
            assert not never[min(before, 5)]
    _, free = promote(forest.tokens, forest.parents, target, gap, kappa)
    harmless = [
        n
        for n in range(size)
        if free[0, n]
        and not never[min(int(target[0, n]), 5)]
        and not any(never[tree.tokens[c]] for c in tree.children(n))
    ]
    assert all(promoted[0, node] for node in harmless)
