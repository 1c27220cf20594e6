"""Second stage: training of the head on the recorded conversations."""

import itertools
import json
import math
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from adaptivespec.errors import ConfigError
from adaptivespec.training.batches import Batch, Plan, collate, held_out
from adaptivespec.training.corpus import Corpus, Entry
from adaptivespec.training.loss import SoftTargets
from adaptivespec.training.model import TrainableHead, Unrolled
from adaptivespec.training.ranks import Ranks

LOG_EVERY = 10
"""Steps between two reports."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """passes: over the corpus. tokens: of text (padding too) per step, of all processes together.
    unroll: steps of training-time test, in the first and the second half of the run. stride: of
    the chains that go on after their first step, one in `stride`. decay: weight of each further
    step. learning_rate of the layer, head_learning_rate of the output layer; both rise over
    `warmup` steps and fall along a cosine. clip: largest norm of all gradients together. seed: of
    the order of conversations and the choice of chains."""

    passes: float = 3.5
    tokens: int = 4096
    unroll: tuple[int, int] = (4, 7)
    stride: int = 3
    decay: float = 0.8
    learning_rate: float = 3e-3
    head_learning_rate: float = 8e-4
    warmup: int = 50
    clip: float = 1.0
    seed: int = 0


class Trainer:
    """The state of one run: model, optimiser and the number of steps done. `conversations`: the
    number of those that are trained on."""

    def __init__(
        self, head: TrainableHead, target_head: Tensor, corpus: Corpus, recipe: Recipe, ranks: Ranks
    ) -> None:
        """`target_head` [draft vocabulary, H]: the target's output rows of the draft tokens, in the
        precision to train in. Raises ConfigError when the corpus makes no batch."""
        self.head, self.step = head, 0
        self._recipe, self._ranks, self._corpus = recipe, ranks, corpus
        entries = [e for e in corpus.entries if not held_out(e)]
        self.conversations = len(entries)
        self._plan = Plan(entries, recipe.tokens // ranks.world, ranks.world, recipe.seed)
        self._per_pass = len(self._plan.epoch(0)) // ranks.world
        self.steps = math.ceil(recipe.passes * self._per_pass)
        if self.steps == 0:
            raise ConfigError("the conversations are too few for one batch per process")
        self._scratch = SoftTargets(target_head)
        self._dtype = target_head.dtype
        output = [p for name, p in head.weights.items() if name.startswith("lm_head")]
        others = [p for name, p in head.weights.items() if not name.startswith("lm_head")]
        self._optimiser = torch.optim.AdamW(
            [
                {"params": others, "lr": 0.0, "peak": recipe.learning_rate},
                {"params": output, "lr": 0.0, "peak": recipe.head_learning_rate},
            ],
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )

    def run(self, folder: Path, save_every: int) -> None:
        """Train to the end, from `checkpoint.pt` in `folder` if it is there; it is renewed every
        `save_every` steps and at the end. `log.jsonl` gets a line every `LOG_EVERY` steps."""
        checkpoint = folder / "checkpoint.pt"
        if checkpoint.exists():
            self._load(checkpoint)
        if self._ranks.first:
            _cut_log(folder / "log.jsonl", self.step)
        bar = tqdm(
            total=self.steps,
            initial=self.step,
            desc="train",
            unit="step",
            disable=not self._ranks.first,
            mininterval=1,
        )
        recent = _Recent()
        with bar:
            for batch in self._batches():
                recent.add(self._update(batch))
                self.step += 1
                bar.update()
                if self.step % LOG_EVERY == 0 or self.step == self.steps:
                    figures = recent.figures(self._ranks)
                    bar.set_postfix_str(" ".join(f"{name} {v}" for name, v in figures.items()))
                    if self._ranks.first:
                        with (folder / "log.jsonl").open("a") as log:
                            log.write(json.dumps({"step": self.step} | figures) + "\n")
                    recent = _Recent()
                if self.step % save_every == 0 or self.step == self.steps:
                    self._save(checkpoint)

    def _batches(self) -> Iterator[Batch]:
        """This process's batches from the present step on; the next one is read meanwhile."""
        mine = self._entries()
        with ThreadPoolExecutor(1) as reader:
            ahead: Future[Batch] | None = None
            while True:
                entries = next(mine, None)
                following = reader.submit(self._read, entries) if entries else None
                if ahead is not None:
                    yield ahead.result()
                if following is None:
                    return
                ahead = following

    def _entries(self) -> Iterator[list[Entry]]:
        """Pass behind pass: they differ a little in their number of batches."""
        passes = map(self._plan.epoch, itertools.count())
        mine = (batches[self._ranks.rank :: self._ranks.world] for batches in passes)
        return itertools.islice(itertools.chain.from_iterable(mine), self.step, self.steps)

    def _read(self, entries: list[Entry]) -> Batch:
        return collate([self._corpus.read(entry) for entry in entries], self._ranks.device)

    def _update(self, batch: Batch) -> Unrolled:
        recipe = self._recipe
        half = int(2 * self.step >= self.steps)
        torch.manual_seed((recipe.seed << 32) + self.step)
        with torch.autocast(
            self._ranks.device.type, self._dtype, enabled=self._dtype != torch.float32
        ):
            unrolled = self.head.unroll(
                batch, self._scratch, recipe.unroll[half], recipe.stride, recipe.decay
            )
        unrolled.loss.backward()
        parameters = list(self.head.weights.values())
        self._ranks.average(p.grad for p in parameters if p.grad is not None)
        torch.nn.utils.clip_grad_norm_(parameters, recipe.clip)
        for group in self._optimiser.param_groups:
            group["lr"] = group["peak"] * self._schedule()
        self._optimiser.step()
        self._optimiser.zero_grad()
        return unrolled

    def _schedule(self) -> float:
        """Share of the peak learning rate: linear warm-up, then a cosine to a hundredth."""
        warm = min(1.0, (self.step + 1) / self._recipe.warmup)
        cosine = 0.5 * (1 + math.cos(math.pi * self.step / self.steps))
        return warm * (0.01 + 0.99 * cosine)

    def _save(self, checkpoint: Path) -> None:
        if self._ranks.first:
            state = {
                "step": self.step,
                **self._identity(),
                "head": self.head.state_dict(),
                "optimiser": self._optimiser.state_dict(),
            }
            unfinished = checkpoint.with_suffix(".tmp")
            torch.save(state, unfinished)
            os.replace(unfinished, checkpoint)
        self._ranks.wait()

    def _identity(self) -> dict[str, Any]:
        """What must not change between the parts of a run."""
        return {
            "steps": self.steps,
            "recipe": asdict(self._recipe),
            "processes": self._ranks.world,
            "corpus": self._corpus.digest(),
        }

    def _load(self, checkpoint: Path) -> None:
        """Raises ConfigError when the checkpoint is of another run."""
        state = torch.load(checkpoint, map_location=self._ranks.device, weights_only=True)
        different = [
            f"{name} {state.get(name)} there, {value} now"
            for name, value in self._identity().items()
            if state.get(name) != value
        ]
        there, here = state["head"]["target_ids"], self.head.target_ids
        if not torch.equal(there, here):
            sizes = f"{len(there)} tokens there, {len(here)} now"
            different.append(f"another draft vocabulary ({sizes})")
        if different:
            raise ConfigError(
                f"{checkpoint}: {'; '.join(different)}; resume with the same options and prompts, "
                "or choose another output folder"
            )
        self.head.load_state_dict(state["head"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]


def _cut_log(file: Path, step: int) -> None:
    """Drop what was reported of steps after `step`: they are done again."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    if len(kept) < len(lines):
        file.write_text("".join(kept))


class _Recent:
    """Sums over the steps since the last report."""

    def __init__(self) -> None:
        self._steps = 0
        self._sums: Tensor | None = None

    def add(self, unrolled: Unrolled) -> None:
        sums = torch.cat((unrolled.loss.detach().double()[None], unrolled.hits, unrolled.rows))
        self._steps += 1
        if self._sums is None or len(self._sums) != len(sums):
            self._steps, self._sums = 1, torch.zeros_like(sums)
        self._sums += sums

    def figures(self, ranks: Ranks) -> dict[str, Any]:
        """loss: mean of all processes. top1: share of right tokens at every unrolled step."""
        assert self._sums is not None
        loss, *counts = ranks.sum(self._sums.clone()).tolist()
        half = len(counts) // 2
        shares = [hit / max(1, row) for hit, row in zip(counts[:half], counts[half:], strict=True)]
        return {
            "loss": round(loss / self._steps / ranks.world, 4),
            "top1": [round(share, 3) for share in shares],
        }
