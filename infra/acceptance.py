"""Acceptance lengths, and lengths of answers, of static shapes over prompt files.

    python infra/acceptance.py --drafter eagle3:HEAD --set gsm8k.jsonl:question:40 ...
    python infra/acceptance.py --url http://127.0.0.1:8000/v1 --set ...

A set is FILE:FIELD[:COUNT[:STEP]]: every STEP-th row from the first on, COUNT at most; FIELD of
each (its first element, if it is a list) is one user message. Answers are greedy and end as they
would for a user, after --max-tokens at most. Acceptance length = tokens per target step, bonus
token counted. --kappa and --shape may be given several times. With --results, cells (kappa, shape,
set) that are done are kept in a file, and the same command goes on where it was stopped.
"""

import argparse
import asyncio
import hashlib
from pathlib import Path
from typing import Protocol

import msgspec

from adaptivespec import arguments
from adaptivespec.config import Settings, check_shape, load_settings
from adaptivespec.errors import ConfigError
from adaptivespec.local import LocalSystem
from adaptivespec.models.sources import resolve
from adaptivespec.request import Usage
from adaptivespec.shape import Shape
from adaptivespec.training.evaluate import NOTHING_MEASURED, SHAPES, Measurement, measure
from adaptivespec.training.prompts import read_prompts


class Runner(Protocol):
    def identity(self) -> dict[str, str]:
        """What the results depend on, beside kappa, shape and prompts."""

    def run(self, messages: list[str], shape: Shape, kappa: float) -> Measurement:
        """Answer all messages."""


def local_parser(doc: str | None) -> argparse.ArgumentParser:
    """What every script asks that runs the packaged model in its own process."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--set", action="append", required=True, dest="sets", type=read_prompts)
    add("--drafter", default="eagle3", metavar="KIND[:PATH]")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--threads", type=arguments.positive, default=2)
    add("--max-tokens", type=arguments.positive, default=128)
    return parser


def in_process(drafter: str, dtype: str, threads: int, concurrency: int) -> Settings:
    """Settings for the packaged model with a drafter given as KIND[:PATH]."""
    kind, _, path = drafter.partition(":")
    target = {"compute": {"threads": threads}, "max_running": concurrency, "max_queued": 10_000}
    return load_settings(
        {
            "model": {"dtype": dtype},
            "target": target,
            "drafter": {"kind": kind} | ({"path": path} if path else {}),
        }
    )


class InProcess:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        settings = in_process(args.drafter, args.dtype, args.threads, args.concurrency)
        self._system = LocalSystem.load(settings)

    def identity(self) -> dict[str, str]:
        weights, path = hashlib.sha256(), getattr(self._system.settings.drafter, "path", None)
        for file in sorted(resolve(path).glob("*.safetensors")) if path else []:
            weights.update(file.read_bytes())
        chosen = {name: getattr(self._args, name) for name in ("drafter", "dtype")}
        return chosen | {"drafter_sha256": weights.hexdigest()}

    def run(self, messages: list[str], shape: Shape, kappa: float) -> Measurement:
        template = self._system.tokenizer.apply_chat_template
        prompts = [template([{"role": "user", "content": m}]) for m in messages]
        limit = self._args.max_tokens
        return measure(self._system, prompts, shape, kappa=kappa, max_tokens=limit)


class Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def identity(self) -> dict[str, str]:
        return {"url": self._args.url}

    def run(self, messages: list[str], shape: Shape, kappa: float) -> Measurement:
        return asyncio.run(self._run(messages, shape, kappa))

    async def _run(self, messages: list[str], shape: Shape, kappa: float) -> Measurement:
        from openai import AsyncOpenAI  # which a run in process does not need

        args = self._args
        slots = asyncio.Semaphore(args.concurrency)
        speculation = {"mode": "static", "kappa": kappa, "shape": shape}
        async with AsyncOpenAI(base_url=args.url, api_key="none", timeout=600) as client:
            model = (await client.models.list()).data[0].id

            async def one(message: str) -> Measurement:
                async with slots:
                    answer = await client.chat.completions.create(
                        model=model,
                        messages=[{"role": "user", "content": message}],
                        temperature=0,
                        max_tokens=args.max_tokens,
                        extra_body={"speculation": speculation},
                    )
                assert answer.usage is not None
                fields = answer.usage.model_dump()
                fields |= fields["speculation"]
                usage = msgspec.convert(fields, Usage)
                ended = answer.choices[0].finish_reason == "stop"
                return Measurement(usage, 1, ended, [])

            return sum(await asyncio.gather(*map(one, messages)), NOTHING_MEASURED)


class Results(msgspec.Struct):
    """Measurements by kappa, shape and set; in `file`, if there is one."""

    identity: dict[str, str]
    cells: dict[str, Measurement] = {}

    def save(self, file: Path) -> None:
        """Whole or not at all."""
        partial = file.with_name(file.name + ".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        partial.replace(file)


def print_row(*cells: str) -> None:
    print("|", " | ".join(cells), "|", flush=True)


def print_header(*names: str) -> None:
    print_row(*names)
    print("|" + "---|" * len(names))


def print_lengths(
    names: list[str],
    rows: dict[Shape, list[Measurement]],
    lossless: dict[Shape, list[Measurement]] | None,
) -> None:
    """`rows` and `lossless` (those of kappa 1, unless these are they) have a cell per name."""
    compared = ["ratio to kappa 1", "promoted per step"] if lossless else []
    print_header("shape", "set", "tokens per answer", "ended by themselves", *compared)
    for shape, cells in rows.items():
        for i, (name, cell) in enumerate(zip(names, cells, strict=True)):
            figures = [f"{cell.length:.1f}", f"{cell.ended / cell.answers:.3f}"]
            if lossless:
                figures.append(f"{cell.length / lossless[shape][i].length:.3f}")
                figures.append(f"{cell.usage.promoted_tokens / cell.usage.steps:.3f}")
            print_row(str(tuple(shape)), name, *figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--set", action="append", required=True, dest="sets", metavar="FILE:FIELD[:COUNT[:STEP]]")
    add("--url", help="a server's, with its own drafter; otherwise in process")
    add("--drafter", default="eagle3", metavar="KIND[:PATH]")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    add("--threads", type=arguments.positive, default=2)
    add("--concurrency", type=arguments.positive, default=8, help="answers at once")
    add("--max-tokens", type=arguments.positive, default=128)
    add("--kappa", type=float, action="append", help="default: 1")
    add("--shape", type=arguments.shape, action="append", metavar="DEPTH,WIDTH,NODES")
    add("--results", type=Path, metavar="FILE.json", help="keep what is done, and go on with it")
    args = parser.parse_args()
    defaults = [parser.get_default(name) for name in ("drafter", "dtype", "threads")]
    if args.url and [args.drafter, args.dtype, args.threads] != defaults:
        parser.error("--drafter, --dtype and --threads are the server's own with --url")
    try:
        sets = {text: read_prompts(text) for text in args.sets}
        for shape in args.shape or ():
            check_shape(shape, "--shape", None if args.url else Settings().max_shape)
    except ConfigError as error:
        parser.error(str(error))
    runner: Runner = Server(args) if args.url else InProcess(args)
    results = Results(runner.identity() | {"max_tokens": str(args.max_tokens)})
    if args.results and args.results.exists():
        there = msgspec.json.decode(args.results.read_bytes(), type=Results)
        if there.identity != results.identity:
            parser.error(f"{args.results} holds results of {there.identity}, not these")
        results = there

    def cell(kappa: float, shape: Shape, text: str) -> Measurement:
        key = f"{kappa:g} {','.join(map(str, shape))} {text}"
        if key not in results.cells:
            results.cells[key] = runner.run(sets[text].messages, shape, kappa)
            if args.results:
                results.save(args.results)
        return results.cells[key]

    names = ["all", *(prompts.name for prompts in sets.values())]
    lossless: dict[Shape, list[Measurement]] | None = None
    for kappa in sorted(set(args.kappa or [1.0]), reverse=True):  # 1 first: others refer to it
        print(f"\nkappa {kappa:g}: acceptance length\n")
        print_header("shape", *names)
        rows: dict[Shape, list[Measurement]] = {}
        for shape in args.shape or SHAPES:
            each = [cell(kappa, shape, text) for text in sets]
            rows[shape] = [sum(each, NOTHING_MEASURED), *each]
            lengths = (f"{c.usage.mean_acceptance_length:.3f}" for c in rows[shape])
            print_row(str(tuple(shape)), *lengths)
        print(f"\nkappa {kappa:g}: answers\n")
        print_lengths(names, rows, lossless)
        if kappa == 1:
            lossless = rows


if __name__ == "__main__":
    main()
