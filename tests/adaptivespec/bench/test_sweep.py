"""The search for the best static shape, over machines whose speeds are known."""

import itertools
import random

import pytest

from adaptivespec.bench.arms import Arm, static_arm
from adaptivespec.bench.records import Answer, Outcome
from adaptivespec.bench.schedule import Job
from adaptivespec.bench.sets import Item, PromptSet
from adaptivespec.bench.sweep import candidates, choose_items, halve, rounds, turns
from adaptivespec.config import check_shape
from adaptivespec.shape import Shape

ITEMS = [Item(i, str(i)) for i in range(100)]


class Machine:
    """Answers of 100 tokens at a rate of each arm's own, times a drift that only grows."""

    def __init__(self, rates: dict[str, float]) -> None:
        self.rates = rates
        self.jobs: list[Job] = []
        self.slowness = (1.01**i for i in itertools.count())

    def __call__(self, job: Job) -> Outcome:
        self.jobs.append(job)
        seconds = 100 * len(job.items) / self.rates[job.arm.name] * next(self.slowness)
        answers = [Answer(i.row, 0, "", "length", 1, 100, seconds, 0.1, []) for i in job.items]
        return Outcome(seconds, answers)


def arms(count: int) -> list[Arm]:
    return [static_arm(Shape(1, 1, nodes)) for nodes in range(2, count + 2)]


@pytest.mark.parametrize("count", [2, 3, 5, 16])
@pytest.mark.parametrize("concurrency", [1, 2])
def test_the_fastest_is_found(count: int, concurrency: int) -> None:
    tried = arms(count)
    for seed in range(5):
        speeds = random.Random(seed).sample(range(10, 10 + 3 * count, 3), count)
        machine = Machine(dict(zip((a.name for a in tried), map(float, speeds), strict=True)))
        results = list(halve(tried, ITEMS, 4, concurrency, machine))
        assert {arm for arm, _ in results} == set(tried)
        best = max(tried, key=lambda arm: machine.rates[arm.name])
        assert results[-1][0] == best
        assert len(machine.jobs) == turns(count, 4, concurrency)


def test_each_round_has_prompts_of_its_own_and_half_of_the_arms() -> None:
    tried = arms(8)
    machine = Machine({arm.name: 10.0 + i for i, arm in enumerate(tried)})
    list(halve(tried, ITEMS, 4, 1, machine))
    fields = [{j.arm.name for j in machine.jobs if j.turn.round == r} for r in range(3)]
    rows = [{j.items[0].row for j in machine.jobs if j.turn.round == r} for r in range(3)]
    assert [len(field) for field in fields] == [8, 4, 2]
    assert rows == [{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}]
    assert rounds(8) == 3


def test_prompts_that_are_not_measured_are_taken_where_there_are_any() -> None:
    rich = PromptSet("a", "text", ITEMS[:4], ITEMS[4:10])
    other = PromptSet("b", "text", ITEMS[20:24], ITEMS[30:40])
    poor = PromptSet("c", "text", ITEMS[:3], [])
    items, unseen = choose_items([rich, other], 4)
    assert unseen
    assert [item.row for item in items] == [4, 30, 5, 31]
    items, unseen = choose_items([poor], 5)
    assert not unseen
    assert [item.row for item in items] == [0, 1, 2, 0, 1]


def test_the_shapes_that_are_tried_exist_and_fit() -> None:
    assert len(set(candidates())) == len(candidates()) == 17
    for shape in candidates():
        check_shape(shape, "sweep")
    small = Shape(3, 4, 8)
    assert candidates(small) == [
        s for s in candidates() if s.depth <= 3 and s.width <= 4 and s.nodes <= 8
    ]
