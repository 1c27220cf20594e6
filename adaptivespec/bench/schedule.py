"""In which order arms take turns: all of them on the same prompts before the next ones."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from adaptivespec.bench.arms import Arm
from adaptivespec.bench.records import Turn
from adaptivespec.bench.sets import Item, PromptSet
from adaptivespec.errors import ConfigError


class Job(NamedTuple):
    """One turn to take."""

    turn: Turn
    arm: Arm
    items: list[Item]


def blocks(items: Sequence[Item], concurrency: int) -> list[list[Item]]:
    """The prompts of one turn each: one by one, or with several at once about twice as many as
    that, so that slots are refilled and most of the time all are taken. Sizes differ by one."""
    count = len(items) if concurrency == 1 else max(1, len(items) // (2 * concurrency))
    bounds = [len(items) * i // count for i in range(count + 1)]
    return [list(items[a:b]) for a, b in pairwise(bounds)]


def schedule(
    sets: Sequence[PromptSet], arms: Sequence[Arm], ladder: Sequence[int], rounds: int
) -> Iterator[Job]:
    """Every arm answers a block of prompts before any answers the next; from block to block and
    round to round another arm begins."""
    for round_ in range(rounds):
        for prompts in sets:
            for concurrency in ladder:
                for index, items in enumerate(blocks(prompts.items, concurrency)):
                    first = (index + round_) % len(arms)
                    for arm in [*arms[first:], *arms[:first]]:
                        turn = Turn("measure", prompts.name, concurrency, round_, index, arm.name)
                        yield Job(turn, arm, items)


def check_ladder(sets: Sequence[PromptSet], ladder: Sequence[int]) -> None:
    """Raises ConfigError where a set is too small to keep so many requests going."""
    for prompts in sets:
        if len(prompts.items) < max(ladder):
            raise ConfigError(
                f"--concurrency {max(ladder)}: set {prompts.name!r} has {len(prompts.items)} "
                "prompts; at least as many as requests at once are needed"
            )
