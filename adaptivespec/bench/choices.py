"""What the options of `adaptivespec bench` choose: settings, arms, and the sweep."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import yaml

from adaptivespec.bench import sweep
from adaptivespec.bench.arms import Arm, Rule, grid, rules
from adaptivespec.bench.run import Sweep
from adaptivespec.bench.sets import PromptSet
from adaptivespec.config import (
    UNGUARDED,
    DCSPolicy,
    GuardSettings,
    PolicySettings,
    Settings,
    StaticPolicy,
    check_guards,
    check_shape,
    load_settings,
)
from adaptivespec.errors import ConfigError
from adaptivespec.explain import explain
from adaptivespec.shape import Shape

SHAPE = Shape(3, 4, 4)  # the paper's
KAPPAS = [1.0, 0.2]
SWEEP_PROMPTS = 4


def choose_settings(args: argparse.Namespace, drafter: str | None) -> Settings:
    """By the command line's own reading of its options (`args.settings`)."""
    chosen = argparse.Namespace(
        config=args.config, path=args.path, dtype=args.dtype, drafter=drafter, kappa=None
    )
    read: Callable[[argparse.Namespace], Settings] = args.settings
    settings = read(chosen)
    if settings.drafter is None:
        raise ConfigError("--drafter: none leaves nothing to compare with plain decoding")
    return settings


def check_left_to_server(args: argparse.Namespace) -> None:
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


def check_unguarded(chosen: Sequence[Rule], status: Mapping[str, Any] | None) -> None:
    """Raises ConfigError where a rule is to have no guards, and a server, by its `status`, has some
    for all: a request can add to them, and lift none."""
    if all(rule.guards != UNGUARDED for rule in chosen):
        return
    none = msgspec.json.decode(msgspec.json.encode(UNGUARDED))
    said = (status or {}).get("guards")
    if not isinstance(said, dict):
        raise ConfigError("--guard none: the server does not say whether it has guards of its own")
    if own := {name: value for name, value in said.items() if value != none.get(name)}:
        raise ConfigError(
            f"--guard none: the server has guards of its own, {own}, which no request can lift"
        )


def choose_rules(args: argparse.Namespace) -> list[Rule]:
    """The margin rules of the arms. Raises ConfigError."""
    kappas = args.kappas or (KAPPAS if args.temperature == 0 else [1.0])
    for kappa in kappas:
        load_settings({"kappa": kappa})
        if kappa < 1 and args.temperature > 0:
            raise ConfigError(f"--kappa: {kappa} acts at temperature 0 only")
    guards = [UNGUARDED if text is None else _guards(text) for text in args.guards or []]
    if guards and min(kappas) == 1:
        raise ConfigError("--guard: limits promotions, of which kappa 1 has none")
    return rules(kappas, guards)


def _guards(text: str) -> GuardSettings:
    value = _yaml("--guard", text)
    try:
        guards = msgspec.convert(value, GuardSettings)
        check_guards(guards)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--guard {text!r}: {explain(error, value, GuardSettings)}") from error
    except ConfigError as error:
        raise ConfigError(f"--guard {text!r}: {error}") from error
    if guards == UNGUARDED:
        raise ConfigError(f"--guard {text!r}: limits nothing; 'none' is the unguarded arm")
    return guards


def choose_arms(
    args: argparse.Namespace,
    settings: Settings | None,
    chosen: Sequence[Rule],
    drafters: Sequence[str | None],
) -> list[Arm]:
    """`settings` are None for a server. Raises ConfigError."""
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
    arms = grid(shapes, policies, chosen, drafters) + peers
    check_distinct("arms", [arm.name for arm in arms])
    return arms


def _policy(text: str) -> PolicySettings:
    value = _yaml("--policy", text)
    return load_settings({"policy": {"kind": value} if isinstance(value, str) else value}).policy


def _yaml(option: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{option} {text!r}: {error}") from error


def choose_sweep(
    args: argparse.Namespace, sets: Sequence[PromptSet], settings: Settings | None
) -> Sweep | None:
    """None unless there is to be one. Raises ConfigError."""
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


def check_distinct(what: str, names: Sequence[str]) -> None:
    """Raises ConfigError for a name that is there twice."""
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{what}: {name!r} is there twice")
