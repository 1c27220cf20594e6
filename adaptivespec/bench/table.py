"""Tables in Markdown that line up on a terminal too."""

from collections.abc import Mapping, Sequence

from adaptivespec.bench.statistics import Percentiles, Ratio
from adaptivespec.bench.summary import Cell

NONE = "-"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) + " |"
        for row in (head, rule, *rows)
    )


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def points(value: float | None, other: float | None) -> str:
    """By how many percentage points a share is above another."""
    return NONE if value is None or other is None else f"{100 * (value - other):+.1f}"


def ratio(value: Ratio | None) -> str:
    """With its interval, where there is one."""
    if value is None:
        return NONE
    if value.low is None or value.high is None or value.low == value.high:
        return f"{value.value:.2f}"
    return f"{value.value:.2f} [{value.low:.2f}, {value.high:.2f}]"


def milliseconds(value: Percentiles | None) -> str:
    """p50, and p99 in brackets."""
    return NONE if value is None else f"{1000 * value.p50:.1f} ({1000 * value.p99:.1f})"


def overview(cells: Sequence[Cell], baseline: str) -> str:
    """One line per cell, for the terminal."""
    several = len({c.concurrency for c in cells}) > 1
    head = ["set", *(["at once"] if several else []), "arm", "tokens/s", "to plain"]
    head += [f"to {baseline}", "tokens/step", "accuracy", "agreement", "tokens/answer"]
    rows = [
        [
            c.set,
            *([str(c.concurrency)] if several else []),
            c.arm,
            number(c.tokens_per_s, 1),
            ratio(c.vs_plain),
            ratio(c.vs_baseline),
            number(c.acceptance_length),
            percent(c.accuracy),
            percent(c.agreement),
            number(c.tokens_per_answer, 1),
        ]
        for c in cells
    ]
    return table(head, rows)


def speed(cells: Sequence[Cell], baseline: str) -> str:
    """Rates and latencies."""
    head = ["arm", "tokens/s", "to plain", f"to {baseline}", "first token, ms"]
    head += ["per token, ms", "between deliveries, ms"]
    rows = [
        [
            c.arm,
            number(c.tokens_per_s, 1),
            ratio(c.vs_plain),
            ratio(c.vs_baseline),
            milliseconds(c.first_token),
            milliseconds(c.time_per_token),
            milliseconds(c.gap),
        ]
        for c in cells
    ]
    return table(head, rows)


def drafting(cells: Sequence[Cell]) -> str:
    """What was drafted, accepted and promoted."""
    depth = max((len(c.accepted_at or []) for c in cells), default=0)
    head = ["arm", "acceptance length", "drafted/step", "promoted/step"]
    head += [f"at {d + 1}" for d in range(depth)]
    rows = [
        [
            c.arm,
            number(c.acceptance_length),
            number(c.drafted_per_step),
            number(c.promoted_per_step, 3),
            *(number(rate) for rate in c.accepted_at or []),
            *[NONE] * (depth - len(c.accepted_at or [])),
        ]
        for c in cells
    ]
    return table(head, rows)


def answers(cells: Sequence[Cell]) -> str:
    """What came of it."""
    head = ["arm", "answers", "accuracy", "recovery", "agreement", "tokens/answer", "ended"]
    rows = [
        [
            c.arm,
            str(c.answers),
            percent(c.accuracy),
            ratio(c.recovery),
            f"{percent(c.agreement)} of {c.compared}" if c.compared else NONE,
            number(c.tokens_per_answer, 1),
            percent(c.ended),
        ]
        for c in cells
    ]
    return table(head, rows)


def guards(cells: Sequence[Cell], unguarded: Mapping[str, str | None]) -> str:
    """What guards cost in speed and give back in answers, beside the same arm without any;
    `unguarded`: as of `arms.without_guards`."""
    by_arm = {c.arm: c for c in cells}
    head = ["arm", "tokens/s", "to unguarded", "promoted/step"]
    head += ["accuracy", "gained", "agreement", "gained"]
    rows = []
    for c in (c for c in cells if c.arm in unguarded):
        free = by_arm.get(unguarded[c.arm] or "")
        rows.append(
            [
                c.arm,
                number(c.tokens_per_s, 1),
                ratio(c.vs_unguarded),
                number(c.promoted_per_step, 3),
                percent(c.accuracy),
                points(c.accuracy, free.accuracy if free else None),
                percent(c.agreement),
                points(c.agreement, free.agreement if free else None),
            ]
        )
    return table(head, rows)


def steps(cells: Sequence[Cell]) -> str:
    """Where the time of a decoding step goes."""
    parts = ["draft", "transfer", "verify", "other"]
    head = ["arm", "step, ms", *parts]
    rows = [
        [
            c.arm,
            *(
                NONE if c.step is None else number(1000 * c.step[name])
                for name in ("total", *parts)
            ),
        ]
        for c in cells
    ]
    return table(head, rows)
