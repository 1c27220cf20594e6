"""`adaptivespec bench`: from its options to a report."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from adaptivespec.bench import plots, table
from adaptivespec.bench.arms import without_guards
from adaptivespec.bench.choices import (
    check_distinct,
    check_left_to_server,
    check_unguarded,
    choose_arms,
    choose_rules,
    choose_settings,
    choose_sweep,
)
from adaptivespec.bench.endpoint import Endpoint
from adaptivespec.bench.in_process import InProcess
from adaptivespec.bench.records import write_json
from adaptivespec.bench.report import report
from adaptivespec.bench.run import Plan, Run, choose_baseline
from adaptivespec.bench.runner import Options, Runner
from adaptivespec.bench.schedule import check_ladder
from adaptivespec.bench.scorers import scorer_of
from adaptivespec.bench.sets import Item, PromptSet, read_set
from adaptivespec.bench.summary import ALL
from adaptivespec.config import Settings


def run(args: argparse.Namespace) -> int:
    """Measure, score and report."""
    sets = [read_set(text) for text in args.sets]
    check_distinct("--set", [prompts.name for prompts in sets])
    check_ladder(sets, args.concurrency)
    plots.check()
    scorers = {prompts.name: scorer_of(prompts.kind) for prompts in sets}
    options = Options(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    if args.url:
        check_left_to_server(args)
    texts: list[str | None] = args.drafters or [None]
    drafters: list[str | None] = texts if len(texts) > 1 else [None]  # one needs no name
    settings = {
        name: choose_settings(args, text)
        for name, text in zip(drafters, texts, strict=True)
        if not args.url
    }
    rules = choose_rules(args)
    arms = choose_arms(args, settings.get(drafters[0]), rules, drafters)
    sweep = choose_sweep(args, sets, settings.get(drafters[0]))
    items = [item for prompts in sets for item in prompts.items]
    items += sweep.items if sweep else []
    with _runners(args, settings, items) as runners:
        if args.url:
            check_unguarded(rules, runners[None].status())
        plan = Plan(
            system=runners[None].identity(),
            peers={url: runners[url].identity() for _, url in args.peers},
            arms=arms,
            drafters=drafters,
            rules=rules,
            sets=[PromptSet(s.name, s.kind, s.items, []) for s in sets],
            sweep=sweep,
            concurrency=args.concurrency,
            rounds=args.rounds,
            options=options,
        )
        benchmark = Run(args.out, plan, runners)
        arms, swept, found = benchmark.search()
        benchmark.measure(arms)
        status = runners[None].status()
    baseline = choose_baseline(arms, swept)
    unguarded = without_guards(arms)
    cells = benchmark.summarise(scorers, baseline, unguarded)
    results = {"baseline": baseline, "sweep": found, "cells": cells, "status": status}
    write_json(args.out / "results.json", benchmark.begun | results)
    figures = plots.draw_all(cells, args.out)
    starts = benchmark.begun["starts"]
    text = report(plan, starts, cells, baseline, unguarded, found, figures)
    (args.out / "report.md").write_text(text, encoding="utf-8")
    whole = [c for c in cells if c.set == ALL] or cells
    print(table.overview(cells if len(sets) < 5 else whole, baseline))
    print(f"\n{args.out / 'report.md'}", file=sys.stderr)
    return 0


@contextmanager
def _runners(
    args: argparse.Namespace, settings: Mapping[str | None, Settings], items: Sequence[Item]
) -> Iterator[Mapping[str | None, Runner]]:
    """By URL of a peer; None for the server, or the model in this process."""
    runners: dict[str | None, Runner] = {}
    with ExitStack() as stack:
        for url in dict.fromkeys([url for _, url in args.peers]):
            runners[url] = Endpoint(url)
            stack.callback(runners[url].close)
        runners[None] = (
            Endpoint(args.url)
            if args.url
            else InProcess(settings, items, args.max_tokens, max(args.concurrency))
        )
        stack.callback(runners[None].close)
        yield runners
