"""The console script `adaptivespec`."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import yaml

from adaptivespec import arguments, profile
from adaptivespec.bench import options as bench
from adaptivespec.config import Settings, check_shape, load_settings
from adaptivespec.errors import AdaptiveSpecError, ConfigError
from adaptivespec.local import LocalSystem
from adaptivespec.request import Delta, GenerationRequest, Origin, Usage
from adaptivespec.sampling import SamplingParams
from adaptivespec.training.command import add_arguments, train_eagle3

_COLOURS = {Origin.TARGET: "", Origin.DRAFTED: "\x1b[32m", Origin.PROMOTED: "\x1b[33m"}
_PLAIN = "\x1b[0m"
_LEGEND = {Origin.TARGET: "target's own", Origin.DRAFTED: "drafted", Origin.PROMOTED: "promoted"}


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit status: 2 for what the user can mend, with one line."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        return status
    except AdaptiveSpecError as error:
        print(f"adaptivespec: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def generate(args: argparse.Namespace) -> int:
    """Answer one prompt in this process, with the controller that the server runs."""
    settings = _settings(args)
    if args.shape and args.mode != "static":
        raise ConfigError(f"--shape: needs --mode static, not {args.mode}")
    if args.kappa is not None and args.kappa < 1 and (args.temperature > 0 or args.mode == "off"):
        raise ConfigError(f"--kappa: {args.kappa} acts at temperature 0 and while drafting only")
    shape = args.shape and check_shape(args.shape, "--shape", settings.max_shape)
    system = LocalSystem.load(settings)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    tokenizer = system.tokenizer
    message = {"role": "user", "content": prompt}
    ids = tokenizer.encode(prompt) if args.raw else tokenizer.apply_chat_template([message])
    request = GenerationRequest(
        prompt=ids,
        max_tokens=args.max_tokens,
        sampling=SamplingParams(temperature=args.temperature, seed=args.seed),
        stop=tuple(args.stop),
        mode=args.mode,
        kappa=system.settings.kappa,
        shape=shape,
    )
    colour = args.color == "always" or (args.color == "auto" and sys.stdout.isatty())
    printer = _Printer(sys.stdout, colour)
    system.controller.submit(request, printer)
    started = time.perf_counter()
    while system.controller.busy:
        system.controller.step()
    printer.report(time.perf_counter() - started, sys.stderr)
    return 0


class _Printer:
    """Writes text as it comes, coloured by where its tokens came from."""

    def __init__(self, out: TextIO, colour: bool) -> None:
        self._out = out
        self._colour = colour
        self._usage: Usage | None = None

    def __call__(self, event: Delta | Exception) -> None:
        if isinstance(event, Exception):
            raise event
        for piece, origin in zip(event.pieces, event.origins, strict=True):
            start = _COLOURS[origin] if self._colour else ""
            self._out.write(f"{start}{piece}{_PLAIN}" if start and piece else piece)
        self._out.flush()
        self._usage = event.usage

    def report(self, seconds: float, out: TextIO) -> None:
        """One line of figures, and what the colours mean."""
        usage = self._usage
        if usage is None:
            return
        legend = ", ".join(f"{_COLOURS[o]}{text}{_PLAIN}" for o, text in _LEGEND.items())
        print(
            f"\n\n{usage.completion_tokens} tokens in {usage.steps} steps, "
            f"{usage.mean_acceptance_length:.2f} per step; "
            f"{usage.accepted_tokens} of {usage.drafted_tokens} drafted accepted, "
            f"{usage.promoted_tokens} of them promoted; "
            f"{usage.completion_tokens / seconds:.1f} tokens/s"
            + (f"\n{legend}" if self._colour else ""),
            file=out,
        )


def _settings(args: argparse.Namespace) -> Settings:
    """The application's arguments from --config, and the options over them."""
    settings = _application_args(args.config) if args.config else {}
    model: dict[str, Any] = settings.setdefault("model", {})
    for key in ("path", "dtype"):
        if (value := getattr(args, key)) is not None:
            model[key] = value
    if args.drafter == "none":
        settings["drafter"] = None
    elif args.drafter is not None:
        kind, _, path = args.drafter.partition(":")
        if kind == "lm" and not path:
            raise ConfigError("--drafter: 'lm' needs a path, as in lm:PATH")
        settings["drafter"] = {"kind": kind} | ({"path": path} if path else {})
    if args.kappa is not None:
        settings["kappa"] = args.kappa
    loaded = load_settings(settings)
    if loaded.engine != "torch":
        raise ConfigError(
            f"--config {args.config}: engine: {loaded.engine!r} is not allowed: it only serves; "
            "'torch' runs in this process"
        )
    return loaded


def _application_args(file: Path) -> dict[str, Any]:
    try:
        applications = yaml.safe_load(file.read_text())["applications"]
        return dict(applications[0]["args"])
    except (OSError, yaml.YAMLError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"--config {file}: no applications[0].args there: {error!r}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="adaptivespec", description="Speculative decoding that follows the text."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "generate",
        help="answer one prompt in this process, showing what was drafted",
        description=generate.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.set_defaults(run=generate)
    add = command.add_argument
    add("prompt", help="the user's message; - reads standard input")
    add("--config", type=Path, metavar="FILE", help="take the settings of a serve_config.yaml")
    add("--model", dest="path", metavar="PATH", help="folder, hub id, GGUF file or smollm2")
    add("--dtype", choices=["bfloat16", "float32"])
    add("--drafter", metavar="KIND[:PATH]", help="lookup, eagle3[:PATH], lm:PATH or none")
    add("--mode", choices=["adaptive", "static", "off"], default="adaptive")
    add("--shape", type=arguments.shape, metavar="DEPTH,WIDTH,NODES", help="with --mode static")
    add("--kappa", type=float, help="margin rule at temperature 0; 1 is lossless")
    add("--temperature", type=arguments.temperature, default=0.0)
    add("--seed", type=int, default=0)
    add("--max-tokens", type=arguments.positive, default=256)
    add("--stop", action="append", default=[], type=arguments.nonempty, metavar="TEXT")
    add("--raw", action="store_true", help="continue the text itself, without the chat template")
    add("--color", choices=["auto", "always", "never"], default="auto")
    command = commands.add_parser(
        "train-eagle3",
        help="train an EAGLE-3 draft head for a model",
        description=train_eagle3.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.set_defaults(run=train_eagle3)
    add_arguments(command)
    command = commands.add_parser(
        "profile",
        help="what steps cost on this machine, by tree and by requests at once",
        description=profile.profile.__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.set_defaults(run=profile.profile, settings=_settings, kappa=None)
    profile.add_arguments(command)
    command = commands.add_parser(
        "bench",
        help="compare ways of decoding over prompt sets: speed, acceptance, accuracy",
    )
    command.set_defaults(run=bench.bench, settings=_settings)
    bench.add_arguments(command)
    return parser
