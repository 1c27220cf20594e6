"""What drafting with an EAGLE-3 head costs, beside a plain step of its target.

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python infra/bench_draft.py --drafter eagle3:HEAD

Everything is measured in turn, round by round, because a shared machine drifts: medians of the
rounds, and medians of each round's ratio to the plain step, which is one pass of the target over
one node. Target and drafter take turns in this process, with all threads each.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from acceptance import in_process, print_header, print_row
from torch import Tensor

from adaptivespec import arguments
from adaptivespec.drafters.base import Extension
from adaptivespec.drafters.build import make_drafter
from adaptivespec.drafters.eagle3 import Eagle3Drafter
from adaptivespec.drafters.growth import Level
from adaptivespec.engine.build import make_target
from adaptivespec.engine.engine import TargetEngine
from adaptivespec.messages import Chunk, StateRows
from adaptivespec.sampling import SamplingParams
from adaptivespec.shape import Shape
from adaptivespec.training.evaluate import SHAPES
from adaptivespec.tree import roots

COMMITS = [1, 2, 3, 4]
FRONTIER = 4
"""Nodes expanded by the level that is measured alone."""
SHALLOW, DEEP = Shape(4, FRONTIER, 16), Shape(5, FRONTIER, 16)
"""Trees that differ by one level."""
PLAIN, LEVEL = "target, 1 node", f"level of {FRONTIER} nodes"


class Case(NamedTuple):
    """`call` is timed, `prepare` before it is not."""

    prepare: Callable[[], object]
    call: Callable[[], object]


class Bench:
    """One request: `cached` tokens before the root, on both sides."""

    def __init__(self, engine: TargetEngine, drafter: Eagle3Drafter, cached: int) -> None:
        self._engine, self._drafter, self._cached = engine, drafter, cached
        self._capacity = cached + 1 + max(COMMITS)
        self._tokens = torch.randint(0, engine.config.vocab_size, (self._capacity,)).tolist()
        # The states of all tokens, from a request that has them all as its prompt.
        for request, prompt in enumerate((self._tokens, self._tokens[:cached])):
            engine.open(request, self._capacity, SamplingParams())
            engine.forward([Chunk(request, prompt, False)], [], roots([]))
        self._states = engine.states([StateRows(0, 0, self._capacity)])

    def cases(self) -> dict[str, Case]:
        level = self.level()
        trees = dict.fromkeys([*SHAPES, SHALLOW, DEEP])
        return (
            {PLAIN: Case(lambda: None, self.plain_step)}
            | {f"commit of {n}": Case(self.start, partial(self.commit, n)) for n in COMMITS}
            | {LEVEL: Case(self.start, partial(self._drafter._expand, level))}
            | {tree(shape): Case(self.start, partial(self.draft, shape)) for shape in trees}
        )

    def plain_step(self) -> None:
        """The next pass drops what this one writes."""
        self._engine.forward([], [1], roots([self._tokens[self._cached]]))

    def start(self) -> None:
        """Let the drafter know everything up to the root, and no tree."""
        self._drafter.close(0)
        self._drafter.open(0, self._tokens[0], self._capacity)
        self._extend(1, self._cached + 1)

    def commit(self, count: int) -> None:
        self._extend(self._cached + 1, self._cached + 1 + count)

    def _extend(self, start: int, stop: int) -> None:
        extension = Extension(0, self._tokens[start:stop])
        self._drafter.commit([extension], self._states[start - 1 : stop - 1])

    def draft(self, shape: Shape) -> None:
        self._drafter.draft([0], [shape])

    def level(self) -> Level:
        """The root's best children, as a tree has them expanded."""
        levels: list[Level] = []

        def expand(level: Level) -> tuple[Tensor, Tensor]:
            levels.append(level)
            return self._drafter._expand(level)

        self.start()
        self._drafter._trees.draft([0], [Shape(2, FRONTIER, 1 + FRONTIER)], expand)
        (level,) = levels
        return level


def tree(shape: Shape) -> str:
    return f"tree {tuple(shape)}"


def measure(cases: dict[str, Case], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each case in each round, after one round of warming up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(rounds + 1):
        for name, case in cases.items():
            case.prepare()
            started = time.perf_counter()
            case.call()
            if round_:
                times[name].append((time.perf_counter() - started) * 1e3)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--drafter", default="eagle3", metavar="eagle3[:PATH]")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the target")
    add("--threads", type=arguments.positive, default=2)
    add("--rounds", type=arguments.positive, default=31)
    add("--cached", type=arguments.positive, default=256, help="tokens before the root")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    settings = in_process(args.drafter, args.dtype, args.threads, 1)
    drafter = make_drafter(settings)
    if not isinstance(drafter, Eagle3Drafter):
        parser.error(f"--drafter {args.drafter}: not an EAGLE-3 head")
    times = measure(Bench(make_target(settings), drafter, args.cached).cases(), args.rounds)
    deep, shallow = times[tree(DEEP)], times[tree(SHALLOW)]
    times[f"{tree(DEEP)} less {tree(SHALLOW)}"] = [
        a - b for a, b in zip(deep, shallow, strict=True)
    ]
    print_header("", "median ms", "ratio to plain step")
    for name, milliseconds in times.items():
        ratios = [ms / plain for ms, plain in zip(milliseconds, times[PLAIN], strict=True)]
        print_row(
            name, f"{statistics.median(milliseconds):.2f}", f"{statistics.median(ratios):.3f}"
        )


if __name__ == "__main__":
    main()
