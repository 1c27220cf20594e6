"""Whether the GPUs of this machine give what the tests can vouch for on a CPU only.

    infra/gpu/check.sh                                        sets up and runs this
    python infra/gpu/check.py --model FOLDER [--device cpu] [--only NAME ...]

FOLDER holds SmolLM2-135M-Instruct as `infra/export_target.py` writes it. Every check is a function
in a module beside this one, and runs in a process of its own: engines leave neither memory nor
threads to the next one, and one that hangs is ended. Exits with 1 when a check fails, after a table
of all.

Answers are compared token for token. Two kernels may round differently, and where the two best
tokens are all but equal that changes a greedy answer: a difference is a failure unless the logits
of the two tokens, computed anew in fp32, are within TIE of each other.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from engine_checks import sglang_eager, sglang_graphs, sglang_plain, speed, torch_engine
from link_check import link
from machine import CheckFailed, Machine

LIMIT_S = 300  # for one check; the first ones compile kernels

CHECKS: dict[str, Callable[[Machine], str]] = {
    "torch-engine": torch_engine,
    "link": link,
    "sglang-plain": sglang_plain,
    "sglang-graphs": sglang_graphs,
    "sglang-eager": sglang_eager,
    "speed": speed,
}


class Outcome(NamedTuple):
    """How a check ended: what it says of itself, or why it failed."""

    passed: bool
    seconds: float
    detail: str


def run_alone(name: str, arguments: list[str], result: Path) -> Outcome:
    """Run one check in a process of its own, and end whatever it leaves behind."""
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, *arguments, "--run", name]
    env = os.environ | {"PYTHONWARNINGS": "ignore"}  # SGLang's many, and none of them ours
    started = time.monotonic()
    process = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
    seconds = time.monotonic() - started
    with suppress(ProcessLookupError):  # nothing is left
        os.killpg(process.pid, signal.SIGKILL)
    if code is None:
        return Outcome(False, seconds, f"not done after {LIMIT_S} s")
    if not result.exists():
        return Outcome(False, seconds, f"ended with {code}; its output is above")
    passed, detail = json.loads(result.read_text())
    return Outcome(passed, seconds, detail)


def run_here(name: str, machine: Machine, result: Path) -> None:
    sys.excepthook = _leave
    try:
        outcome = True, CHECKS[name](machine)
    except CheckFailed as error:
        outcome = False, str(error)
    result.write_text(json.dumps(outcome))
    # SGLang's threads, and its handlers at exit, are of no interest any more.
    sys.stdout.flush()
    os._exit(0)


def _leave(kind: Any, error: BaseException, trace: Any) -> None:
    """In the place of an orderly exit, which would wait for an engine that was left running."""
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)


def visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(gpu) for gpu in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/gpu-check"))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help=", ".join(CHECKS))
    parser.add_argument("--run", choices=CHECKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    gpus = visible_gpus() if args.device == "cuda" else []
    if args.device == "cuda" and not gpus:
        parser.error("torch sees no GPU here; --device cpu runs the same checks without")
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # its fp32 is TF32 otherwise
    if args.run:
        run_here(args.run, Machine(args.model, args.work, gpus), args.work / f"{args.run}.json")
    arguments = ["--model", str(args.model), "--work", str(args.work), "--device", args.device]
    outcomes = {}
    # Without graphs on either, the two are one.
    for name in args.only or [name for name in CHECKS if gpus or name != "sglang-eager"]:
        if name == "speed":
            print("| speculation | tokens/s | tokens per step | draft ms | verify ms |")
            print("|---|---|---|---|---|", flush=True)
        outcomes[name] = run_alone(name, arguments, args.work / f"{name}.json")
    where = ", ".join(torch.cuda.get_device_name(i) for i in range(len(gpus))) or "CPU"
    print(f"\n{where}\n| check | | seconds | |\n|---|---|---|---|")
    for name, outcome in outcomes.items():
        word = "passed" if outcome.passed else "FAILED"
        print(f"| {name} | {word} | {outcome.seconds:.0f} | {outcome.detail} |")
    return 0 if all(outcome.passed for outcome in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
