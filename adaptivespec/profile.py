"""`adaptivespec profile`: what steps cost on this machine, by tree and by requests at once.

The policy `goodput` learns the same from the steps that it serves; this shows it beforehand.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from adaptivespec import arguments
from adaptivespec.config import GoodputPolicy, Settings, check_shape
from adaptivespec.cost import CostModel, StepWork
from adaptivespec.errors import ConfigError
from adaptivespec.goodput import Goodput
from adaptivespec.local import LocalSystem
from adaptivespec.request import GenerationRequest
from adaptivespec.shape import NO_DRAFT, Shape

SHAPES = [
    Shape(*size) for size in ((1, 1, 2), (3, 1, 4), (3, 4, 4), (3, 4, 8), (7, 1, 8), (5, 4, 16))
]
BATCHES = [1, 4, 8]
TEXT = "Write a Python function that sorts a list of numbers, and explain how it works. "


class Cell(NamedTuple):
    """Medians over the steps of one shape and batch, in seconds."""

    requests: int
    shape: Shape
    nodes: float
    verify: float
    draft: float
    feed: float
    total: float


class _Listener(Goodput):
    """Keeps what every step did and took."""

    def __init__(self) -> None:
        super().__init__(GoodputPolicy())
        self.steps: list[StepWork] = []

    def stepped(self, step: StepWork) -> None:
        super().stepped(step)
        self.steps.append(step)


class Profile:
    """Measures the system of some settings, whose requests repeat one prompt."""

    def __init__(self, settings: Settings, prompt: int) -> None:
        """`prompt`: its tokens. Raises ConfigError."""
        self._listener = _Listener()
        self._system = LocalSystem.load(settings, self._listener)
        text = self._system.tokenizer.encode(TEXT)
        self._prompt = (text * (prompt // len(text) + 1))[:prompt]

    @property
    def costs(self) -> CostModel:
        """What the policy makes of all that was measured."""
        return self._listener.costs

    def cells(self, batches: list[int], shapes: list[Shape], steps: int) -> Iterator[Cell]:
        """Every shape at every batch, plain decoding first."""
        for requests in batches:
            for shape in [NO_DRAFT, *shapes]:
                yield self._measure(requests, shape, steps)

    def _measure(self, requests: int, shape: Shape, steps: int) -> Cell:
        controller, taken = self._system.controller, self._listener.steps
        request = GenerationRequest(
            prompt=self._prompt,
            max_tokens=(steps + 2) * (shape.depth + 1),
            ignore_eos=True,
            mode="off" if shape == NO_DRAFT else "static",
            shape=shape,
        )
        taken.clear()
        ids = [controller.submit(request, _raise) for _ in range(requests)]
        while len(taken) < steps + 1:
            controller.step()
        for id in ids:
            controller.cancel(id)
        controller.step()
        rows = taken[1 : steps + 1]  # the first may fill caches
        nodes, verify, draft, feed, total = (
            statistics.median(column)
            for column in zip(
                *((r.nodes, r.verify_s, r.draft_s, r.feed_s, r.total_s) for r in rows), strict=True
            )
        )
        return Cell(requests, shape, nodes, verify, draft, feed, total)


def _raise(event: object) -> None:
    if isinstance(event, Exception):
        raise event


def table(cells: list[Cell]) -> list[str]:
    """A line per cell, in milliseconds, and the ratio to the plain step of the same batch."""
    lines = [
        f"{'requests':>8} {'shape':>12} {'nodes':>6} {'verify':>8} {'draft':>8} {'feed':>8} "
        f"{'step ms':>8} {'/ plain':>8}"
    ]
    plain = {cell.requests: cell.total for cell in cells if cell.shape == NO_DRAFT}
    for cell in cells:
        shape = "plain" if cell.shape == NO_DRAFT else ",".join(map(str, cell.shape))
        parts = (cell.verify, cell.draft, cell.feed, cell.total)
        columns = " ".join(f"{1e3 * seconds:8.2f}" for seconds in parts)
        ratio = cell.total / plain[cell.requests]
        lines.append(f"{cell.requests:8} {shape:>12} {cell.nodes:6.0f} {columns} {ratio:8.2f}")
    return lines


def summary(costs: CostModel) -> str:
    """The costs that the policy has learned of it."""
    plain = costs.plain(1)
    counts = 1, 3, 7, 15
    more = costs.nodes(1, counts)
    parts = {f"{n} more nodes": seconds for n, seconds in zip(counts, more, strict=True)}
    parts |= {"level": costs.level, "expansion": costs.expansion}
    parts |= {"draft": costs.drafting, "feeding 3 tokens": costs.feeding(3)}
    shares = ", ".join(f"{name} {seconds / plain:.3f}" for name, seconds in parts.items())
    return f"as parts of a plain step of one request ({1e3 * plain:.2f} ms): {shares}"


def plot(cells: list[Cell], file: Path) -> None:
    """Verification and drafting, by nodes, a line per number of requests at once."""
    from matplotlib import pyplot  # of the extra `bench`

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.5), sharex=True, layout="constrained")
    for requests in dict.fromkeys(cell.requests for cell in cells):
        rows = sorted((c.nodes, c.verify, c.draft) for c in cells if c.requests == requests)
        nodes = [row[0] for row in rows]
        for place, column in zip(axes, (1, 2), strict=True):
            place.plot(
                nodes, [1e3 * row[column] for row in rows], "o-", label=f"{requests} at once"
            )
    for place, name in zip(axes, ("verify", "draft"), strict=True):
        place.set(xlabel="nodes", ylabel=f"{name}, ms", ylim=(0, None))
    axes[0].legend()
    figure.savefig(file)


def profile(args: argparse.Namespace) -> int:
    """Measure what verifying, drafting and feeding take, by tree and by requests at once, with
    target and drafter taking turns in this process."""
    settings: Settings = args.settings(args)
    shapes = [check_shape(s, "--shape", settings.max_shape) for s in args.shapes or SHAPES]
    batches = args.batches or BATCHES
    if max(batches) > (most := settings.target.max_running):
        raise ConfigError(f"--batch: {max(batches)} is above target.max_running, {most}")
    if settings.drafter is None:
        raise ConfigError("--drafter: none leaves nothing to profile")
    measured = Profile(settings, args.prompt)
    cells = list(measured.cells(batches, shapes, args.steps))
    print("\n".join(table(cells)))
    print(summary(measured.costs))
    if args.plot:
        plot(cells, args.plot)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `adaptivespec profile`."""
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="take the settings of a serve_config.yaml")
    add("--model", dest="path", metavar="PATH", help="folder, hub id, GGUF file or smollm2")
    add("--dtype", choices=["bfloat16", "float32"])
    add("--drafter", metavar="KIND[:PATH]", help="lookup, eagle3[:PATH] or lm:PATH")
    add("--shape", action="append", dest="shapes", type=arguments.shape, metavar="D,W,N")
    add("--batch", action="append", dest="batches", type=arguments.positive, metavar="N")
    add("--steps", type=arguments.positive, default=10, help="of each shape and batch")
    add("--prompt", type=arguments.positive, default=256, help="tokens before the first step")
    add("--plot", type=Path, metavar="FILE.svg", help="needs the extra bench")
