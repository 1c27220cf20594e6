"""The best static shape on this machine, by successive halving."""

from collections.abc import Callable, Iterator, Sequence

from adaptivespec.bench.arms import Arm
from adaptivespec.bench.records import Outcome, Turn
from adaptivespec.bench.schedule import Job
from adaptivespec.bench.sets import Item, PromptSet
from adaptivespec.config import Settings
from adaptivespec.shape import Shape

CHAINS = [Shape(depth, 1, depth + 1) for depth in (1, 2, 3, 4, 5, 7)]
TREES = [
    Shape(*size)
    for size in [
        *((1, 2, 3), (2, 2, 3), (2, 2, 5), (3, 4, 4), (3, 2, 7), (3, 4, 8)),
        *((5, 2, 8), (5, 4, 8), (5, 4, 16), (6, 8, 32), (5, 8, 60)),
    ]
]
"""Chains and trees from those that pay on a CPU to those that EAGLE is run with on GPUs."""


def candidates(largest: Shape | None = None) -> list[Shape]:
    """The shapes to try, none larger than `largest` (by default, what settings allow)."""
    largest = largest or Settings().max_shape
    shapes = CHAINS + TREES
    return [s for s in shapes if all(a <= b for a, b in zip(s, largest, strict=True))]


def choose_items(sets: Sequence[PromptSet], count: int) -> tuple[list[Item], bool]:
    """Prompts to sweep on, from all sets in turn: those that are not measured where a set has any
    left, and whether all are such."""
    pools = [prompts.spare or prompts.items for prompts in sets]
    turns = [pool[i] for i in range(max(map(len, pools))) for pool in pools if i < len(pool)]
    spare = all(prompts.spare for prompts in sets)
    return [turns[i % len(turns)] for i in range(count)], spare and len(turns) >= count


def halve(
    arms: Sequence[Arm],
    items: Sequence[Item],
    per_round: int,
    concurrency: int,
    take: Callable[[Job], Outcome],
) -> Iterator[tuple[Arm, float]]:
    """Measure two arms or more on some prompts in turn, drop the slower half, and go on with
    other prompts until one is left. Yields every arm, with its tokens per second over all that it
    answered, as it is dropped, and the best one last."""
    left = list(arms)
    tokens, seconds = dict.fromkeys(arms, 0), dict.fromkeys(arms, 0.0)
    for round_ in range(rounds(len(arms))):
        chosen = items[round_ * per_round : (round_ + 1) * per_round]
        for start in range(0, len(chosen), concurrency):
            first = start % len(left)
            for arm in [*left[first:], *left[:first]]:
                turn = Turn("sweep", "sweep", concurrency, round_, start, arm.name)
                outcome = take(Job(turn, arm, list(chosen[start : start + concurrency])))
                tokens[arm] += sum(answer.tokens for answer in outcome.answers)
                seconds[arm] += outcome.seconds
        left.sort(key=lambda arm: tokens[arm] / seconds[arm], reverse=True)
        for _ in range(len(left) // 2):
            arm = left.pop()
            yield arm, tokens[arm] / seconds[arm]
    yield left[0], tokens[left[0]] / seconds[left[0]]


def rounds(arms: int) -> int:
    """How often a field of so many is halved."""
    return (arms - 1).bit_length()


def turns(arms: int, per_round: int, concurrency: int) -> int:
    """How many turns `halve` takes."""
    total = 0
    for _ in range(rounds(arms)):
        total += arms * -(-per_round // concurrency)
        arms -= arms // 2
    return total
