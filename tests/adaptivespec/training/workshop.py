"""A tiny target with prompts for it, and `adaptivespec train-eagle3` in processes of its own."""

import hashlib
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adaptivespec.config import load_settings
from adaptivespec.local import LocalSystem
from adaptivespec.shape import Shape
from adaptivespec.training.batches import held_out
from adaptivespec.training.corpus import Corpus
from adaptivespec.training.evaluate import Measurement, measure
from tests.factories import write_hf_folder

WORDS = ("the", "quick", "brown", "fox", "def", "add", "left", "right", "return", "range", "print")
PROMPTS, OWN = 400, 40
EXCLUDED = "the quick brown fox"
START = "Do "
SHAPE = Shape(4, 1, 5)
MAX_ANSWER = 64
PATIENCE_S = 300


@dataclass(frozen=True)
class Workshop:
    """A target whose greedy text is no loop, and prompts for it."""

    folder: Path

    @property
    def model(self) -> str:
        return str(self.folder / "target")

    def command(self, output: Path, *options: str, prompts: int = PROMPTS) -> list[str]:
        """The arguments of the command; `options` override or add to what is said before them."""
        return [
            "train-eagle3",
            str(output),
            f"--model={self.model}",
            f"--prompts={self.folder}/prompts.jsonl:text:{prompts}",
            f"--self-written={OWN}:{START}",
            f"--exclude={self.folder}/excluded.jsonl:text",
            "--slots=4",
            "--max-prompt=48",
            f"--max-answer={MAX_ANSWER}",
            "--tokens-per-step=1024",
            "--unroll=3,5",
            "--learning-rate=5e-3",
            "--head-learning-rate=5e-3",
            "--passes=6",
            "--save-every=20",
            f"--shape={','.join(map(str, SHAPE))}",
            *options,
        ]

    def measure(self, head: Path, corpus: Corpus) -> Measurement:
        """Acceptance of a head at the prompts that are kept from training."""
        one = {"compute": {"threads": 1}}
        settings = {
            "model": {"path": self.model},
            "target": one,
            "drafter": {"kind": "eagle3", "path": str(head)} | one,
        }
        kept = {e.prompt_hash: e for e in corpus.entries if held_out(e)}
        prompts = [corpus.prompt(entry) for entry in kept.values()]
        system = LocalSystem.load(load_settings(settings))
        return measure(system, prompts, SHAPE, max_tokens=MAX_ANSWER)


def new_workshop(folder: Path) -> Workshop:
    """A small range of weights, and an output layer of its own: greedy text is then no loop."""
    write_hf_folder(folder / "target", tied=False, initializer_range=0.08)
    chance = random.Random(0)
    messages = [" ".join(chance.choices(WORDS, k=chance.randint(2, 6))) for _ in range(PROMPTS - 1)]
    for name, texts in (("prompts", [*messages, EXCLUDED]), ("excluded", [EXCLUDED.upper() + "!"])):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / f"{name}.jsonl").write_text(rows)
    return Workshop(folder)


SCRIPT = Path(sys.executable).with_name("adaptivespec")


def kill_when(arrived: Callable[[], bool], command: list[str], log: Path) -> None:
    """Run the command in a process of its own, and kill it as soon as something has happened."""
    with log.open("w") as out:
        process = subprocess.Popen([str(SCRIPT), *command], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not arrived():
            assert process.poll() is None, f"ended too early:\n{log.read_text()}"
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        status = process.wait()
    assert status == -signal.SIGKILL, "ended before it was killed"


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def checkpoint_of(output: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(output / "checkpoint.pt", weights_only=True)
    return state


def log_of(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
