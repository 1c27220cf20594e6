"""`adaptivespec bench`: from its options to a report."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import yaml

from adaptivespec.bench import plots, sweep, table
from adaptivespec.bench.arms import Arm, grid
from adaptivespec.bench.endpoint import Endpoint
from adaptivespec.bench.in_process import InProcess
from adaptivespec.bench.records import write_json
from adaptivespec.bench.report import report
from adaptivespec.bench.run import Plan, Run, Sweep, choose_baseline
from adaptivespec.bench.runner import Options, Runner
from adaptivespec.bench.schedule import check_ladder
from adaptivespec.bench.scorers import scorer_of
from adaptivespec.bench.sets import Item, PromptSet, read_set
from adaptivespec.bench.summary import ALL
from adaptivespec.config import (
    DCSPolicy,
    PolicySettings,
    Settings,
    StaticPolicy,
    check_shape,
    load_settings,
)
from adaptivespec.errors import ConfigError
from adaptivespec.shape import Shape

SHAPE = Shape(3, 4, 4)  # the paper's
KAPPAS = [1.0, 0.2]
SWEEP_PROMPTS = 4


def run(args: argparse.Namespace) -> int:
    """Measure, score and report."""
    sets = [read_set(text) for text in args.sets]
    _distinct("--set", [prompts.name for prompts in sets])
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
        _check_left_to_server(args)
    texts: list[str | None] = args.drafters or [None]
    drafters: list[str | None] = texts if len(texts) > 1 else [None]  # one needs no name
    settings = {
        name: _settings(args, text)
        for name, text in zip(drafters, texts, strict=True)
        if not args.url
    }
    arms = _arms(args, settings.get(drafters[0]), drafters)
    plan_sweep = _sweep(args, sets, settings.get(drafters[0]))
    items = [item for prompts in sets for item in prompts.items]
    items += plan_sweep.items if plan_sweep else []
    with _runners(args, settings, items) as runners:
        plan = Plan(
            system=runners[None].identity(),
            peers={url: runners[url].identity() for _, url in args.peers},
            arms=arms,
            drafters=drafters,
            kappas=_kappas(args),
            sets=[PromptSet(s.name, s.kind, s.items, []) for s in sets],
            sweep=plan_sweep,
            concurrency=args.concurrency,
            rounds=args.rounds,
            options=options,
        )
        benchmark = Run(args.out, plan, runners)
        arms, swept, found = benchmark.search()
        benchmark.measure(arms)
        status = runners[None].status()
    baseline = choose_baseline(arms, swept)
    cells = benchmark.summarise(scorers, baseline)
    results = {"baseline": baseline, "sweep": found, "cells": cells, "status": status}
    write_json(args.out / "results.json", benchmark.begun | results)
    figures = plots.draw_all(cells, args.out)
    text = report(plan, benchmark.begun["starts"], cells, baseline, found, figures, status)
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


def _check_left_to_server(args: argparse.Namespace) -> None:
    """Raises ConfigError for an option that only a model in this process can follow."""
    policies = [text for text in args.policies or [] if text is not None]
    for name, value in {
        "--config": args.config,
        "--model": args.path,
        "--dtype": args.dtype,
        "--drafter": args.drafters,
        "--policy": policies,
    }.items():
        if value:
            raise ConfigError(f"{name}: is the server's own with --url")


def _settings(args: argparse.Namespace, drafter: str | None) -> Settings:
    """By the command line's own reading of its options (`args.settings`)."""
    chosen = argparse.Namespace(
        config=args.config, path=args.path, dtype=args.dtype, drafter=drafter, kappa=None
    )
    read: Callable[[argparse.Namespace], Settings] = args.settings
    settings = read(chosen)
    if settings.drafter is None:
        raise ConfigError("--drafter: none leaves nothing to compare with plain decoding")
    return settings


def _kappas(args: argparse.Namespace) -> list[float]:
    kappas = args.kappas or (KAPPAS if args.temperature == 0 else [1.0])
    for kappa in kappas:
        load_settings({"kappa": kappa})
        if kappa < 1 and args.temperature > 0:
            raise ConfigError(f"--kappa: {kappa} acts at temperature 0 only")
    return sorted(set(kappas), reverse=True)


def _arms(
    args: argparse.Namespace, settings: Settings | None, drafters: Sequence[str | None]
) -> list[Arm]:
    """`settings` are None for a server."""
    largest = settings.max_shape if settings else None
    shapes = [
        check_shape(shape, "--shape", largest)
        for shape in (args.shapes or [SHAPE])
        if shape is not None
    ]
    if settings is None:
        policies: list[tuple[str, PolicySettings | None]] = (
            [] if args.policies else [("adaptive", None)]
        )
    else:
        own = DCSPolicy() if isinstance(settings.policy, StaticPolicy) else settings.policy
        kind = str(type(own).__struct_config__.tag)
        policies = (
            [(text, _policy(text)) for text in args.policies if text is not None]
            if args.policies
            else [(kind, own)]
        )
    peers = [Arm(name=name, peer=url) for name, url in args.peers]
    arms = grid(shapes, policies, _kappas(args), drafters) + peers
    _distinct("arms", [arm.name for arm in arms])
    return arms


def _policy(text: str) -> PolicySettings:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--policy {text!r}: {error}") from error
    return load_settings({"policy": {"kind": value} if isinstance(value, str) else value}).policy


def _sweep(
    args: argparse.Namespace, sets: Sequence[PromptSet], settings: Settings | None
) -> Sweep | None:
    if not args.sweep:
        for name, value in {
            "--sweep-shape": args.sweep_shapes,
            "--sweep-prompts": args.sweep_prompts,
        }.items():
            if value:
                raise ConfigError(f"{name}: needs --sweep")
        return None
    largest = settings.max_shape if settings else None
    shapes = args.sweep_shapes or sweep.candidates(largest)
    shapes = list(dict.fromkeys(check_shape(s, "--sweep-shape", largest) for s in shapes))
    if len(shapes) < 2:
        raise ConfigError(f"--sweep-shape: {len(shapes)} shape leaves nothing to choose from")
    per_round = args.sweep_prompts or SWEEP_PROMPTS
    items, unseen = sweep.choose_items(sets, per_round * sweep.rounds(len(shapes)))
    return Sweep(shapes, items, per_round, unseen)


def _distinct(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{what}: {name!r} is there twice")
