"""The report: what was measured, how, and what came out, in Markdown."""

import shlex
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from adaptivespec.bench import table
from adaptivespec.bench.run import Found, Plan
from adaptivespec.bench.summary import Cell

NOTES = """\
Ratios are of tokens per second, or of accuracies, over the same prompts; in brackets 95 % intervals
of a paired bootstrap over {pairs}, left out below five. Latencies are medians, in brackets the 99th
percentile: *first token* from the request on, *per token* the mean of an answer behind its first
token, *between deliveries* of which each may bring several tokens. *Acceptance length*: tokens per
step of the target, its own included. *At d*: share of steps that accept the d-th drafted token of a
path. *Recovery*: accuracy over that of `{baseline}`. *Agreement*: share of answers that come to the
same end as those of `{baseline}`; for sets without right answers, that are the same text. *Ended*:
share of answers that were not cut off at {max_tokens} tokens. "{none}": not reported, or not
defined."""

GUARDS = """\
What guards cost and bring: *to unguarded* is the ratio of speeds to the same arm without guards,
*gained* what the share in front of it is above that arm's, in percentage points."""


def report(
    plan: Plan,
    starts: Sequence[Mapping[str, Any]],
    cells: Sequence[Cell],
    baseline: str,
    unguarded: Mapping[str, str | None],
    found: Mapping[str, Found],
    figures: Sequence[tuple[str, str]],
) -> str:
    """All of it. `starts`: the provenance of each start of the run; `unguarded`: as of
    `arms.without_guards`."""
    parts = ["# Benchmark", _setting(plan, starts), "## Results", table.overview(cells, baseline)]
    pairs = "prompts" if max(plan.concurrency) == 1 else "prompts, or blocks of them at once"
    parts += [f"![{caption}]({file})\n\n*{caption}.*" for file, caption in figures]
    parts += ["## In detail", _notes(plan, baseline, pairs)]
    for name, at_once in dict.fromkeys((c.set, c.concurrency) for c in cells):
        chosen = [c for c in cells if (c.set, c.concurrency) == (name, at_once)]
        title = f"### {name}" + (f", {at_once} at once" if max(plan.concurrency) > 1 else "")
        parts += [title, table.speed(chosen, baseline), table.answers(chosen)]
        parts += [table.drafting(chosen)]
        if unguarded:
            parts += [textwrap.fill(GUARDS, 100), table.guards(chosen, unguarded)]
        if any(c.step for c in chosen):
            parts += [table.steps(chosen)]
    parts += [_sweep(plan, found)] if found else []
    return "\n\n".join(parts) + "\n"


def _setting(plan: Plan, starts: Sequence[Mapping[str, Any]]) -> str:
    start = starts[-1]
    machine, versions = start["machine"], start["versions"]
    options = plan.options
    sets = ", ".join(f"{len(s.items)} of {s.name}" for s in plan.sets)
    rule = "greedy" if options.temperature == 0 else f"temperature {options.temperature:g}"
    device = ", ".join(machine["gpus"]) or f"{machine['cores']} cores of {machine['processor']}"
    known = ", ".join(f"{name} {value}" for name, value in versions.items() if value)
    lines = [
        f"- Prompts: {sets}; {rule}, seed {options.seed} + row; {options.max_tokens} tokens at most"
        + (", past the end of the turn" if options.ignore_eos else ""),
        f"- Arms in turn on each prompt; {plan.rounds} round{'s' * (plan.rounds > 1)}; "
        f"requests at once: {', '.join(map(str, plan.concurrency))}",
        f"- Machine: {device}; {machine['memory_gib']} GiB; {machine['system']}"
        + ("; the server's may be another" if "url" in plan.system else ""),
        f"- Versions: {known}",
        f"- Started: {', '.join(str(s['started']) for s in starts)}",
        "- Everything else: `results.json`; every answer: `measurements.jsonl`",
    ]
    return "\n".join(lines) + f"\n\n```\n{shlex.join(start['command'])}\n```"


def _notes(plan: Plan, baseline: str, pairs: str) -> str:
    text = NOTES.format(
        pairs=pairs, baseline=baseline, max_tokens=plan.options.max_tokens, none=table.NONE
    )
    return textwrap.fill(text, 100)


def _sweep(plan: Plan, found: Mapping[str, Found]) -> str:
    sweep = plan.sweep
    assert sweep is not None
    source = "none of which are measured above" if sweep.unseen else "which are measured above too"
    parts = [
        "## Sweep of static shapes",
        f"Tokens per second, strict rule. The slower half was dropped after every "
        f"{sweep.per_round} prompts, {source}; a shape's rate is over those that it answered.",
    ]
    for name, result in found.items():
        parts += [f"### {name}"] if name else []
        parts += [
            table.table(
                ["arm", "tokens/s"],
                [[arm, table.number(rate, 1)] for arm, rate in result.rates.items()],
            )
        ]
    return "\n\n".join(parts)
