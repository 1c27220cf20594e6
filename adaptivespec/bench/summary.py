"""From the records of a run to what a reader compares: one cell per set, concurrency and arm."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from adaptivespec.bench.arms import PLAIN
from adaptivespec.bench.records import Answer, Counts, Outcome, Turn
from adaptivespec.bench.scorers import Scorer
from adaptivespec.bench.sets import PromptSet
from adaptivespec.bench.statistics import Percentiles, Ratio, percentiles, ratio_of_rates
from adaptivespec.request import StepSeconds

ALL = "all"
"""The set that stands for all together."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """An arm on a set. Times are seconds. None: not reported, or not defined.

    tokens_per_s: of all requests together. vs_plain, vs_baseline, vs_unguarded: its ratio to that
    of plain decoding, of the baseline, and of the same arm without guards of its own, on the same
    prompts. accepted_at[d]: share of steps that accepted
    a token at position d + 1. accuracy, and recovery: its ratio to the baseline's. agreement: share
    of the `compared` answers that come to the baseline's end. ended: share of answers that ended by
    themselves. time_per_token: of an answer behind its first token. gap: between deliveries.
    step: mean decoding step of a request, its `total` and the parts of `StepSeconds`; one that
    several requests share counts for each.
    """

    set: str
    concurrency: int
    arm: str
    answers: int
    tokens_per_s: float
    vs_plain: Ratio | None
    vs_baseline: Ratio | None
    vs_unguarded: Ratio | None
    acceptance_length: float | None
    drafted_per_step: float | None
    promoted_per_step: float | None
    accepted_at: list[float] | None
    accuracy: float | None
    recovery: Ratio | None
    agreement: float | None
    compared: int
    tokens_per_answer: float
    ended: float
    first_token: Percentiles | None
    time_per_token: Percentiles | None
    gap: Percentiles | None
    step: dict[str, float] | None


class Judge:
    """Scores answers; equal answers once."""

    def __init__(self, sets: Sequence[PromptSet], scorers: Mapping[str, Scorer]) -> None:
        """`scorers` by name of the set."""
        self._scorers = scorers
        self._items = {(s.name, item.row): item for s in sets for item in s.items}
        self._correct: dict[tuple[str, int, str], bool | None] = {}
        self._agrees: dict[tuple[str, str, str], bool | None] = {}

    def correct(self, set_: str, answer: Answer) -> bool | None:
        """Whether it is right; None where the set cannot tell."""
        key = (set_, answer.row, answer.text)
        if key not in self._correct:
            item = self._items[set_, answer.row]
            self._correct[key] = self._scorers[set_].correct(answer.text, item)
        return self._correct[key]

    def agrees(self, set_: str, answer: Answer, other: Answer) -> bool | None:
        """Whether it comes to the end of the other; None where that comes to none."""
        key = (set_, answer.text, other.text)
        if key not in self._agrees:
            self._agrees[key] = self._scorers[set_].agrees(answer.text, other.text)
        return self._agrees[key]


Group = dict[Turn, Outcome]


def summarise(
    records: Iterable[tuple[Turn, Outcome]],
    judge: Judge,
    baseline: str,
    unguarded: Mapping[str, str | None] = MappingProxyType({}),
) -> list[Cell]:
    """Cells in the order of first appearance of set and concurrency, then of arm names; those of
    all sets together last, where there are several. `unguarded`: as of `arms.without_guards`."""
    groups: dict[tuple[str, int], dict[str, Group]] = defaultdict(lambda: defaultdict(dict))
    for turn, outcome in records:
        groups[turn.set, turn.concurrency][turn.arm][turn] = outcome
    if len({name for name, _ in groups}) > 1:
        for (_, concurrency), arms in list(groups.items()):
            for arm, group in arms.items():
                groups[ALL, concurrency][arm] |= group
    return [
        _cell(name, concurrency, arm, arms, judge, baseline, unguarded.get(arm))
        for (name, concurrency), arms in groups.items()
        for arm in arms
    ]


def _cell(
    name: str,
    concurrency: int,
    arm: str,
    arms: Mapping[str, Group],
    judge: Judge,
    baseline: str,
    unguarded: str | None,
) -> Cell:
    group = arms[arm]
    answers = [answer for outcome in group.values() for answer in outcome.answers]
    counts = [a.counts for a in answers if a.counts is not None]
    steps = sum(c.steps for c in counts)
    verdicts = [v for v in _verdicts(group, judge).values() if v is not None]
    agreements = _agreements(group, arms.get(baseline, {}), judge)
    tokens = sum(a.tokens for a in answers)
    return Cell(
        set=name,
        concurrency=concurrency,
        arm=arm,
        answers=len(answers),
        tokens_per_s=tokens / sum(outcome.seconds for outcome in group.values()),
        vs_plain=_speed_ratio(group, arms.get(PLAIN)),
        vs_baseline=_speed_ratio(group, arms.get(baseline)),
        vs_unguarded=_speed_ratio(group, arms.get(unguarded)) if unguarded else None,
        acceptance_length=1 + sum(c.accepted_tokens for c in counts) / steps if steps else None,
        drafted_per_step=sum(c.drafted_tokens for c in counts) / steps if steps else None,
        promoted_per_step=sum(c.promoted_tokens for c in counts) / steps if steps else None,
        accepted_at=_accepted_at(counts),
        accuracy=sum(verdicts) / len(verdicts) if verdicts else None,
        recovery=_recovery(group, arms.get(baseline), judge),
        agreement=sum(agreements) / len(agreements) if agreements else None,
        compared=len(agreements),
        tokens_per_answer=tokens / len(answers),
        ended=sum(a.finish_reason == "stop" for a in answers) / len(answers),
        first_token=percentiles([a.first_token_s for a in answers]),
        time_per_token=percentiles(
            [(a.seconds - a.first_token_s) / (a.tokens - 1) for a in answers if a.tokens > 1]
        ),
        gap=percentiles([gap for a in answers for gap in a.gaps]),
        step=_step(counts),
    )


def _pairs(
    ours: Mapping[Any, tuple[float, float]], theirs: Mapping[Any, tuple[float, float]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Two [n, 2] of what both have."""
    common = [key for key in ours if key in theirs]
    a, b = (np.array([each[key] for key in common], dtype=float) for each in (ours, theirs))
    return a.reshape(-1, 2), b.reshape(-1, 2)


def _speed_ratio(group: Group, other: Group | None) -> Ratio | None:
    """Pairs are blocks of prompts; rounds of one block are one pair."""

    def rates(turns: Group) -> dict[tuple[str, int], tuple[float, float]]:
        sums: dict[tuple[str, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for turn, outcome in turns.items():
            tokens, seconds = sums[turn.set, turn.block]
            tokens += sum(answer.tokens for answer in outcome.answers)
            sums[turn.set, turn.block] = tokens, seconds + outcome.seconds
        return sums

    return ratio_of_rates(*_pairs(rates(group), rates(other))) if other else None


Key = tuple[str, int, int]  # set, round, row


def _answers_by_key(group: Group) -> dict[Key, Answer]:
    return {
        (turn.set, turn.round, answer.row): answer
        for turn, outcome in group.items()
        for answer in outcome.answers
    }


def _verdicts(group: Group, judge: Judge) -> dict[Key, bool | None]:
    return {key: judge.correct(key[0], a) for key, a in _answers_by_key(group).items()}


def _agreements(group: Group, other: Group, judge: Judge) -> list[bool]:
    theirs = _answers_by_key(other)
    pairs = ((k[0], a, theirs[k]) for k, a in _answers_by_key(group).items() if k in theirs)
    return [said for pair in pairs if (said := judge.agrees(*pair)) is not None]


def _recovery(group: Group, other: Group | None, judge: Judge) -> Ratio | None:
    """The ratio of accuracies. Pairs are prompts; rounds of one prompt are one pair."""

    def shares(turns: Group) -> dict[tuple[str, int], tuple[float, float]]:
        sums: dict[tuple[str, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        for (set_, _, row), right in _verdicts(turns, judge).items():
            if right is not None:
                number, of = sums[set_, row]
                sums[set_, row] = number + right, of + 1
        return sums

    return ratio_of_rates(*_pairs(shares(group), shares(other))) if other else None


def _accepted_at(counts: Sequence[Counts]) -> list[float] | None:
    steps = sum(c.steps for c in counts)
    if not steps:
        return None
    positions = zip_longest(*(c.accepted_per_position for c in counts), fillvalue=0)
    return [sum(accepted) / steps for accepted in positions]


def _step(counts: Sequence[Counts]) -> dict[str, float] | None:
    steps = sum(c.steps for c in counts)
    if not steps:
        return None
    seconds = sum((c.step_seconds for c in counts), StepSeconds())
    parts = msgspec.structs.asdict(seconds) | {"total": seconds.total}
    return {name: value / steps for name, value in parts.items()}
