"""In which order arms take turns."""

from collections import Counter

import pytest

from adaptivespec.bench.arms import Arm
from adaptivespec.bench.schedule import blocks, check_ladder, schedule
from adaptivespec.bench.sets import Item, PromptSet
from adaptivespec.errors import ConfigError

ITEMS = [Item(i, f"prompt {i}") for i in range(20)]
SETS = [PromptSet("a", "text", ITEMS, []), PromptSet("b", "text", ITEMS[:6], [])]
ARMS = [Arm(name=name) for name in "xyz"]


def test_one_at_a_time_each_prompt_is_a_block() -> None:
    assert blocks(ITEMS, 1) == [[item] for item in ITEMS]


@pytest.mark.parametrize("concurrency", [2, 3, 8, 16])
def test_with_several_at_once_blocks_keep_the_slots_taken(concurrency: int) -> None:
    parts = blocks(ITEMS, concurrency)
    assert [item for part in parts for item in part] == ITEMS
    assert min(map(len, parts)) >= min(len(ITEMS), 2 * concurrency)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_every_arm_answers_every_prompt_before_the_next_one() -> None:
    jobs = list(schedule(SETS, ARMS, [1, 2], rounds=2))
    assert len({job.turn for job in jobs}) == len(jobs)
    for start in range(0, len(jobs), len(ARMS)):
        together = jobs[start : start + len(ARMS)]
        assert {job.arm.name for job in together} == {"x", "y", "z"}
        assert len({job.turn._replace(arm="") for job in together}) == 1
        assert all(job.items == together[0].items for job in together)
    answered = Counter((job.turn.set, job.turn.concurrency, job.arm.name) for job in jobs)
    assert answered["a", 1, "x"] == 2 * 20
    assert answered["b", 2, "z"] == 2 * 1


def test_each_arm_begins_equally_often() -> None:
    jobs = list(schedule([PromptSet("a", "text", ITEMS[:9], [])], ARMS, [1], rounds=1))
    assert Counter(job.arm.name for job in jobs[:: len(ARMS)]) == {"x": 3, "y": 3, "z": 3}


def test_a_set_too_small_for_the_ladder_is_named() -> None:
    check_ladder(SETS, [1, 6])
    with pytest.raises(ConfigError, match="--concurrency 8: set 'b' has 6 prompts"):
        check_ladder(SETS, [1, 8])
