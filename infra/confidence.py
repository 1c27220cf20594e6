"""Does the drafter's confidence tell how much of its draft will be accepted?

    python infra/confidence.py --drafter eagle3:HEAD --set gsm8k.jsonl:question:40 ...
        [--plot reliability.svg]

Answers prompts greedily, a batch at a time, with the same tree at every step, and takes from each
step's span the probability that the drafter gives its own first choice and the number of drafted
tokens that the target accepted. In a chain, the default, at least one accepted token means that the
first choice was accepted. Steps whose tree was cut at the end of an answer are left out.

Prints Spearman's rank correlations (ties share their mean rank), the expected calibration error,
which is the mean over steps of |share accepted - mean confidence| of the step's bin, and the
reliability table. Sets as in acceptance.py; --plot needs matplotlib.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from acceptance import in_process, local_parser, print_header, print_row
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from adaptivespec import arguments, tracing
from adaptivespec.config import Settings, check_shape
from adaptivespec.errors import ConfigError
from adaptivespec.local import LocalSystem
from adaptivespec.request import GenerationRequest
from adaptivespec.shape import Shape

BINS = 10
SAMPLED = "00-0000000000000000000000000000000a-000000000000000b-01"
"""The W3C trace context of a caller whose requests are traced."""


class Steps(NamedTuple):
    """confidence float64 [n], accepted int64 [n]: one row per step."""

    confidence: np.ndarray
    accepted: np.ndarray

    @property
    def first(self) -> np.ndarray:
        """bool [n]: whether a token at depth 1 was accepted."""
        return self.accepted > 0


class Bin(NamedTuple):
    """Means over the steps whose confidence lies between two bounds."""

    low: float
    high: float
    steps: int
    confidence: float
    first: float
    accepted: float


def record_spans() -> InMemorySpanExporter:
    """Keep the spans of this process in memory, whatever OTEL_* variables ask for."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.configure("adaptivespec", provider)
    return exporter


def answer(
    system: LocalSystem, spans: InMemorySpanExporter, messages: list[str], args: argparse.Namespace
) -> Steps:
    """The steps of the answers to all messages."""
    confidence: list[float] = []
    accepted: list[int] = []
    for start in range(0, len(messages), args.concurrency):
        spans.clear()
        system.generate(
            [
                GenerationRequest(
                    prompt=system.tokenizer.apply_chat_template([{"role": "user", "content": m}]),
                    max_tokens=args.max_tokens,
                    mode="static",
                    kappa=args.kappa,
                    shape=args.shape,
                    traceparent=SAMPLED,
                )
                for m in messages[start : start + args.concurrency]
            ]
        )
        for span in spans.get_finished_spans():
            said: Mapping[str, Any] = span.attributes or {}
            if said.get("adaptivespec.shape") == tuple(args.shape):
                confidence.append(said["adaptivespec.confidence"])
                accepted.append(said["adaptivespec.accepted"])
    return Steps(np.array(confidence), np.array(accepted))


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, float64 [n]; equal values share the mean of theirs."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[where]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation; nan if all values of one are equal."""
    with np.errstate(invalid="ignore"):
        return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def reliability(steps: Steps) -> list[Bin]:
    """The bins, of equal width over [0, 1], that are not empty."""
    place = np.minimum((steps.confidence * BINS).astype(int), BINS - 1)
    return [
        Bin(
            index / BINS,
            (index + 1) / BINS,
            int(chosen.sum()),
            float(steps.confidence[chosen].mean()),
            float(steps.first[chosen].mean()),
            float(steps.accepted[chosen].mean()),
        )
        for index in range(BINS)
        if (chosen := place == index).any()
    ]


def calibration_error(bins: list[Bin]) -> float:
    """The expected calibration error."""
    total = sum(b.steps for b in bins)
    return sum(b.steps * abs(b.first - b.confidence) for b in bins) / total


def plot(bins: list[Bin], error: float, title: str, file: Path) -> None:
    """The reliability diagram, above it and below what else is known of each bin."""
    # An extra, which nothing else here needs.
    from matplotlib import pyplot

    figure, (top, middle, bottom) = pyplot.subplots(
        3, 1, figsize=(5, 7.5), sharex=True, height_ratios=[3, 1, 1], layout="constrained"
    )
    centres = [(b.low + b.high) / 2 for b in bins]
    width = 0.9 / BINS
    top.bar(centres, [b.first for b in bins], width, color="#7aa6c2")
    top.plot([b.confidence for b in bins], [b.first for b in bins], "o", color="#1f4e6b")
    top.plot([0, 1], [0, 1], "--", color="0.5", linewidth=1)
    top.set(ylabel="share accepted at depth 1", xlim=(0, 1), ylim=(0, 1), title=title)
    top.text(0.03, 0.93, f"expected calibration error {error:.3f}", transform=top.transAxes)
    middle.bar(centres, [b.accepted for b in bins], width, color="#7aa6c2")
    middle.set(ylabel="accepted tokens")
    bottom.bar(centres, [b.steps for b in bins], width, color="0.7")
    bottom.set(ylabel="steps", xlabel="drafter's probability of its first choice")
    for axes, form in ((middle, "{:.2f}"), (bottom, "{:.0f}")):
        axes.spines[["top", "right"]].set_visible(False)
        axes.bar_label(axes.containers[0], fmt=form, fontsize=7)
        axes.margins(y=0.2)
    figure.savefig(file)


def main() -> None:
    parser = local_parser(__doc__)
    add = parser.add_argument
    add("--concurrency", type=arguments.positive, default=8, help="answers at once")
    add("--kappa", type=float, default=1.0)
    add("--shape", type=arguments.shape, default=Shape(7, 1, 8), metavar="DEPTH,WIDTH,NODES")
    add("--plot", type=Path, metavar="FILE.svg")
    args = parser.parse_args()
    try:
        check_shape(args.shape, "--shape", Settings().max_shape)
    except ConfigError as error:
        parser.error(str(error))
    spans = record_spans()
    system = LocalSystem.load(in_process(args.drafter, args.dtype, args.threads, args.concurrency))
    print_header("set", "steps", "rho with accepted length", "rho with depth 1 accepted", "ECE")

    def summarise(name: str, steps: Steps) -> list[Bin]:
        bins = reliability(steps)
        rho = (spearman(steps.confidence, with_) for with_ in (steps.accepted, steps.first))
        figures = (f"{value:.3f}" for value in (*rho, calibration_error(bins)))
        print_row(name, str(len(steps.confidence)), *figures)
        return bins

    parts = []
    for prompts in args.sets:
        parts.append(answer(system, spans, prompts.messages, args))
        summarise(prompts.name, parts[-1])
    bins = summarise("all", Steps(*map(np.concatenate, zip(*parts, strict=True))))
    print()
    print_header("confidence", "steps", "mean confidence", "accepted at depth 1", "accepted tokens")
    for b in bins:
        figures = (f"{value:.3f}" for value in (b.confidence, b.first, b.accepted))
        print_row(f"{b.low:.1f} to {b.high:.1f}", str(b.steps), *figures)
    if args.plot:
        title = f"shape {tuple(args.shape)}, kappa {args.kappa:g}"
        plot(bins, calibration_error(bins), title, args.plot)


if __name__ == "__main__":
    main()
