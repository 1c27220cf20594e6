"""Acceptance lengths of static shapes over prompt files, in process or of a server.

    python infra/acceptance.py --drafter eagle3:HEAD --set gsm8k.jsonl:question:40 ...
    python infra/acceptance.py --url http://127.0.0.1:8000/v1 --set ...

A set is FILE:FIELD:COUNT[:STEP]: COUNT rows, every STEP-th from the first on; FIELD of each (its
first element, if it is a list) is one user message. Answers end as they would for a user, after
128 tokens at most. Acceptance length = tokens per target step, bonus token counted.
"""

import argparse
import asyncio
import gzip
import json
from pathlib import Path

from openai import AsyncOpenAI

from adaptivespec.config import load_settings
from adaptivespec.local import LocalSystem
from adaptivespec.request import NOTHING_USED, GenerationRequest, Usage
from adaptivespec.shape import Shape

SHAPES = [Shape(3, 4, 4), Shape(7, 1, 8), Shape(5, 4, 16), Shape(6, 8, 32)]


def read_set(text: str) -> tuple[str, list[str]]:
    """(name, user messages) of FILE:FIELD:COUNT[:STEP]."""
    name, field, *numbers = text.split(":")
    count, step = [*map(int, numbers), 1][:2]
    file = Path(name)
    lines = (gzip.open if file.suffix == ".gz" else open)(file, "rt").read().splitlines()
    values = [json.loads(line)[field] for line in lines[::step][:count]]
    return file.name.split(".")[0], [v[0] if isinstance(v, list) else v for v in values]


def total(usages: list[Usage]) -> Usage:
    return sum(usages, NOTHING_USED)


class InProcess:
    def __init__(self, args: argparse.Namespace) -> None:
        kind, _, path = args.drafter.partition(":")
        self._system = LocalSystem.load(
            load_settings(
                {
                    "model": {"dtype": args.dtype},
                    "target": {
                        "compute": {"threads": args.threads},
                        "max_running": args.concurrency,
                        "max_queued": 10_000,
                    },
                    "drafter": {"kind": kind} | ({"path": path} if path else {}),
                    "kappa": args.kappa,
                }
            )
        )
        self._args = args

    def run(self, prompts: list[str], shape: Shape) -> list[Usage]:
        system, args = self._system, self._args
        requests = [
            GenerationRequest(
                prompt=system.tokenizer.apply_chat_template([{"role": "user", "content": p}]),
                max_tokens=args.max_tokens,
                mode="static",
                kappa=args.kappa,
                shape=shape,
            )
            for p in prompts
        ]
        usages = [deltas[-1].usage for deltas in system.generate(requests)]
        return [usage for usage in usages if usage is not None]


class Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    def run(self, prompts: list[str], shape: Shape) -> list[Usage]:
        return asyncio.run(self._run(prompts, shape))

    async def _run(self, prompts: list[str], shape: Shape) -> list[Usage]:
        args = self._args
        slots = asyncio.Semaphore(args.concurrency)
        async with AsyncOpenAI(base_url=args.url, api_key="none", timeout=600) as client:
            model = (await client.models.list()).data[0].id

            async def one(prompt: str) -> Usage:
                async with slots:
                    answer = await client.chat.completions.create(
                        model=model,
                        messages=[{"role": "user", "content": prompt}],
                        temperature=0,
                        max_tokens=args.max_tokens,
                        extra_body={
                            "speculation": {"mode": "static", "kappa": args.kappa, "shape": shape},
                        },
                    )
                assert answer.usage is not None
                fields = answer.usage.model_dump()
                fields |= fields["speculation"]
                return Usage(**{name: fields[name] for name in Usage.__struct_fields__})

            return await asyncio.gather(*map(one, prompts))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--set", action="append", required=True, dest="sets", type=read_set)
    add("--url")
    add("--drafter", default="lookup")
    add("--dtype", default="bfloat16")
    add("--threads", type=int, default=2)
    add("--concurrency", type=int, default=8)
    add("--max-tokens", type=int, default=128)
    add("--kappa", type=float, default=1.0)
    args = parser.parse_args()
    if args.url and {args.drafter, args.dtype, args.threads} != {"lookup", "bfloat16", 2}:
        parser.error("--drafter, --dtype and --threads are the server's own with --url")
    runner = Server(args) if args.url else InProcess(args)
    names = [name for name, _ in args.sets]
    print("| shape | all |", " | ".join(names), "|")
    print("|---" * (2 + len(names)) + "|")
    for shape in SHAPES:
        usages = {name: runner.run(prompts, shape) for name, prompts in args.sets}
        everything = total([u for each in usages.values() for u in each])
        figures = [everything, *map(total, usages.values())]
        cells = " | ".join(f"{f.mean_acceptance_length:.3f}" for f in figures)
        print(f"| {tuple(shape)} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
