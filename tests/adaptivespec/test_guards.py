"""Guards of the margin rule: caps per window, and tokens that are never touched."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.config import load_settings
from adaptivespec.drafting import DraftedSequence
from adaptivespec.guards import NO_GUARDS, Guards, token_mask
from adaptivespec.margin import promote
from adaptivespec.policy import make_policy
from tests.adaptivespec.trees import Tree, batch, trees
from tests.smollm2 import tokenizer


def sequence(prompt: int) -> DraftedSequence:
    signals = make_policy(load_settings({}).policy).signals()
    return DraftedSequence(0, [0] * prompt, 1000, 2000, signals)


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
    guards = Guards(per_step, per_window, window)
    request, emitted = sequence(prompt), [False] * prompt
    for step in wanted:
        caps = guards.caps([request])
        assert caps is not None
        (cap,) = caps
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


def test_without_guards_there_is_no_cap() -> None:
    assert NO_GUARDS.caps([sequence(1)]) is None
    assert Guards(per_step=3).caps([sequence(1)] * 2) == [3, 3]
    gap = torch.zeros(1, 1)
    assert NO_GUARDS.forbid(gap, gap, gap, gap) is gap


def test_classes_are_those_of_the_tokens_text() -> None:
    mask = token_mask(tokenizer(), ["digits", "operators"])
    digits = token_mask(tokenizer(), ["digits"])
    assert len(mask) == tokenizer().vocab_size + 1
    assert not mask[-1]
    for text, is_digit, is_operator in [
        ("7", True, False),
        (" =", False, True),
        (" the", False, False),
    ]:
        (token,) = tokenizer().encode(text)
        assert (bool(digits[token]), bool(mask[token])) == (is_digit, is_digit or is_operator)


@given(trees(), st.data())
def test_a_token_that_is_never_promoted_is_not_replaced_either(
    tree: Tree, data: st.DataObject
) -> None:
    size = len(tree.tokens)
    never = torch.tensor([*data.draw(st.lists(st.booleans(), min_size=5, max_size=5)), False])
    target = torch.tensor([data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size))])
    forest = batch([tree])
    gap = torch.full((1, size), -0.1)
    gap[0, 0] = -torch.inf
    allowed = Guards(never=never).forbid(gap, forest.tokens, forest.parents, target)
    kappa = torch.tensor([0.5])
    predict, promoted = promote(forest.tokens, forest.parents, target, allowed, kappa)
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


@pytest.mark.parametrize("classes", [[], ["digits"]])
def test_settings_become_guards(classes: list[str]) -> None:
    settings = load_settings(
        {"max_promotions_per_window": 2, "promotion_window": 8, "never_promote": classes}
    )
    asked = 0

    def load() -> object:
        nonlocal asked
        asked += 1
        return tokenizer()

    guards = Guards.of(settings, load)  # type: ignore[arg-type]
    assert asked == len(classes), "no tokenizer is loaded for caps alone"
    assert guards.caps([sequence(3)]) == [2]
