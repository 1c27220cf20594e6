"""Cells from records whose numbers can be worked out by hand."""

import pytest

from adaptivespec.bench.records import Answer, Counts, Outcome, Turn
from adaptivespec.bench.scorers import FinalNumber, SameText
from adaptivespec.bench.sets import Item, PromptSet
from adaptivespec.bench.summary import ALL, Cell, Judge, summarise
from adaptivespec.request import StepSeconds

SUMS = PromptSet("sums", "gsm8k", [Item(0, "", {"answer": "1"}), Item(1, "", {"answer": "2"})], [])
TALK = PromptSet("talk", "text", [Item(0, "")], [])
JUDGE = Judge([SUMS, TALK], {"sums": FinalNumber(), "talk": SameText()})


def answer(
    row: int,
    text: str,
    tokens: int,
    seconds: float,
    counts: Counts | None = None,
    reason: str = "stop",
) -> Answer:
    first, gaps = 0.5, [0.1, 0.3]
    return Answer(row, 0, text, reason, 9, tokens, seconds, first, gaps, counts)


def turn(arm: str, set_: str = "sums", block: int = 0, round_: int = 0, at_once: int = 1) -> Turn:
    return Turn("measure", set_, at_once, round_, block, arm)


RECORDS = [
    (turn("plain"), Outcome(2.0, [answer(0, "It is 1", 20, 2.0)])),
    (
        turn("fast"),
        Outcome(
            1.0,
            [
                answer(
                    *(0, "so 1", 30, 1.0),
                    Counts(10, 40, 12, 5, [8, 4], StepSeconds(draft=0.2, verify=0.5, other=0.1)),
                )
            ],
        ),
    ),
    (
        turn("fast", block=1),
        Outcome(
            3.0,
            [
                answer(
                    *(1, "3", 10, 3.0),
                    Counts(30, 20, 6, 0, [6], StepSeconds(draft=0.6, transfer=0.1, verify=2.4)),
                    reason="length",
                )
            ],
        ),
    ),
    (turn("plain", block=1), Outcome(3.0, [answer(1, "that makes 2", 30, 3.0)])),
]


def cells() -> dict[str, Cell]:
    return {cell.arm: cell for cell in summarise(RECORDS, JUDGE, "plain")}


def test_speed() -> None:
    fast, plain = cells()["fast"], cells()["plain"]
    assert plain.tokens_per_s == 50 / 5
    assert fast.tokens_per_s == 40 / 4
    assert fast.vs_plain is not None
    assert fast.vs_plain.value == pytest.approx(1.0)
    assert fast.first_token is not None
    assert fast.first_token.p50 == 0.5
    assert fast.time_per_token is not None
    assert fast.time_per_token.p50 == pytest.approx((0.5 / 29 + 2.5 / 9) / 2)
    assert fast.gap is not None
    assert fast.gap.p50 == pytest.approx(0.2)


def test_a_ratio_is_over_the_prompts_that_both_answered() -> None:
    once = [(t, o) for t, o in RECORDS if t.arm == "fast" or t.block == 0]
    fast = next(c for c in summarise(once, JUDGE, "plain") if c.arm == "fast")
    assert fast.tokens_per_s == 40 / 4
    assert fast.vs_plain is not None
    assert fast.vs_plain.value == pytest.approx((30 / 1) / (20 / 2))


def test_rounds_of_a_block_are_one_pair() -> None:
    again = [(t._replace(round=r), o) for t, o in RECORDS for r in range(4)]
    fast = next(c for c in summarise(again, JUDGE, "plain") if c.arm == "fast")
    assert fast.vs_plain is not None
    assert fast.vs_plain.low is None  # of two pairs, however often they were measured


def test_drafts() -> None:
    fast, plain = cells()["fast"], cells()["plain"]
    assert fast.acceptance_length == 1 + 18 / 40
    assert fast.drafted_per_step == 60 / 40
    assert fast.promoted_per_step == 5 / 40
    assert fast.accepted_at == [14 / 40, 4 / 40]
    assert plain.acceptance_length is None
    assert plain.accepted_at is None


def test_answers() -> None:
    fast, plain = cells()["fast"], cells()["plain"]
    assert (plain.accuracy, fast.accuracy) == (1.0, 0.5)
    assert fast.recovery is not None
    assert fast.recovery.value == 0.5
    assert (fast.agreement, fast.compared) == (0.5, 2)
    assert fast.tokens_per_answer == 20
    assert (plain.ended, fast.ended) == (1.0, 0.5)


def test_the_parts_of_a_step_add_up() -> None:
    step = cells()["fast"].step
    assert step is not None
    assert step == pytest.approx(
        {
            "draft": 0.8 / 40,
            "transfer": 0.1 / 40,
            "verify": 2.9 / 40,
            "other": 0.1 / 40,
            "total": 3.9 / 40,
        }
    )
    assert cells()["plain"].step is None


def test_sets_are_told_apart_and_taken_together() -> None:
    talk = [
        (turn(arm, "talk"), Outcome(1.0, [answer(0, arm, 5, 1.0)])) for arm in ("plain", "fast")
    ]
    found = {(c.set, c.arm): c for c in summarise(RECORDS + talk, JUDGE, "plain")}
    assert set(found) == {(s, a) for s in ("sums", "talk", ALL) for a in ("plain", "fast")}
    assert found["talk", "fast"].accuracy is None
    assert found["talk", "fast"].recovery is None
    assert found["talk", "fast"].agreement == 0
    assert found[ALL, "fast"].tokens_per_s == 45 / 5
    assert found[ALL, "fast"].accuracy == 0.5  # of those that can be scored
    assert (found[ALL, "fast"].agreement, found[ALL, "fast"].compared) == (1 / 3, 3)


def test_an_arm_is_held_against_the_same_one_without_guards() -> None:
    unguarded = {"fast": "plain", "plain": None}
    found = {c.arm: c for c in summarise(RECORDS, JUDGE, "fast", unguarded)}
    assert found["fast"].vs_unguarded == found["fast"].vs_plain
    assert found["plain"].vs_unguarded is None


def test_levels_of_concurrency_are_never_mixed() -> None:
    twice = RECORDS + [
        (t._replace(concurrency=4), Outcome(o.seconds / 2, o.answers)) for t, o in RECORDS
    ]
    found = {(c.concurrency, c.arm): c for c in summarise(twice, JUDGE, "plain")}
    assert found[1, "fast"].tokens_per_s == 10
    assert found[4, "fast"].tokens_per_s == 20
    assert found[4, "fast"].vs_plain == found[1, "fast"].vs_plain
