"""Takes the turns of a plan, once each, and keeps what came of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from adaptivespec.bench.arms import PLAIN, STRICT, Arm, Rule, static_arm
from adaptivespec.bench.provenance import provenance
from adaptivespec.bench.records import Journal, Outcome, read_json, write_json
from adaptivespec.bench.runner import Options, Runner
from adaptivespec.bench.schedule import Job, schedule
from adaptivespec.bench.scorers import Scorer
from adaptivespec.bench.sets import Item, PromptSet
from adaptivespec.bench.summary import Cell, Judge, summarise
from adaptivespec.bench.sweep import halve, turns
from adaptivespec.errors import ConfigError
from adaptivespec.shape import Shape

WARM_UP_TOKENS = 16


class Sweep(msgspec.Struct, frozen=True):
    """The search for the best static shape: prompts per round of halving. `unseen`: none of the
    prompts are measured later."""

    shapes: list[Shape]
    items: list[Item]
    per_round: int
    unseen: bool


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that results depend on, but for the machine and the versions."""

    system: dict[str, Any]  # what answers; as its `identity` has it
    peers: dict[str, dict[str, Any]]  # by URL
    arms: list[Arm]
    drafters: list[str | None]  # that the sweep looks for shapes for
    rules: list[Rule]  # that the shape it finds is measured with
    sets: list[PromptSet]
    sweep: Sweep | None
    concurrency: list[int]
    rounds: int
    options: Options


class Found(msgspec.Struct, frozen=True):
    """What the sweep measured, best first: tokens per second by arm."""

    best: str
    rates: dict[str, float]


class Run:
    """A plan, its folder, and what answers: by URL of a peer, None for the system itself."""

    def __init__(self, folder: Path, plan: Plan, runners: Mapping[str | None, Runner]) -> None:
        """Begin in an empty folder, or go on in one that this plan was begun in. Raises
        ConfigError naming what differs."""
        self._plan = plan
        self._runners = runners
        self._warm: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "run.json"
        ours = msgspec.json.decode(msgspec.json.encode(plan))
        begun: dict[str, Any] = {"plan": ours, "starts": []}
        if file.exists():
            begun = read_json(file)
            theirs = begun.get("plan") or {}
            differing = [key for key in ours if ours[key] != theirs.get(key)]
            if differing:
                raise ConfigError(
                    f"{folder}: holds another run, which differs in {', '.join(differing)}; "
                    "the same arguments go on with it, other ones need another folder"
                )
        begun["starts"].append(provenance())
        write_json(file, begun)
        self.begun = begun
        self._journal = Journal(folder / "measurements.jsonl")

    def search(self) -> tuple[list[Arm], str | None, dict[str, Found]]:
        """All arms, those of the best static shapes added; the strict one of the first drafter's;
        and what was found, by drafter."""
        plan, sweep = self._plan, self._plan.sweep
        arms = list(plan.arms)
        best: str | None = None
        found: dict[str, Found] = {}
        if sweep is None:
            return arms, best, found
        lowest = min(plan.concurrency)
        total = len(plan.drafters) * turns(len(sweep.shapes), sweep.per_round, lowest)
        with tqdm(total=total, desc="sweep", unit="turn") as bar:
            for drafter in plan.drafters:
                tried = [static_arm(shape, STRICT, drafter) for shape in sweep.shapes]
                results = halve(
                    tried, sweep.items, sweep.per_round, lowest, lambda job: self._take(job, bar)
                )
                rates = dict(results)
                winner = list(rates)[-1]
                best = best or winner.name
                ordered = {arm.name: rate for arm, rate in reversed(rates.items())}
                found[drafter or ""] = Found(winner.name, ordered)
                if winner.shape is not None:
                    arms += [static_arm(winner.shape, rule, drafter) for rule in plan.rules]
        return list({arm.name: arm for arm in arms}.values()), best, found

    def measure(self, arms: Sequence[Arm]) -> None:
        """Take all turns that were not taken yet."""
        plan = self._plan
        jobs = list(schedule(plan.sets, arms, plan.concurrency, plan.rounds))
        with tqdm(total=len(jobs), desc="measure", unit="turn") as bar:
            for job in jobs:
                self._take(job, bar)

    def summarise(
        self, scorers: Mapping[str, Scorer], baseline: str, unguarded: Mapping[str, str | None]
    ) -> list[Cell]:
        """Score what was measured."""
        judge = Judge(self._plan.sets, scorers)
        records = list(self._journal.records("measure"))
        for turn, outcome in tqdm(records, desc="score", unit="turn"):
            for answer in outcome.answers:
                judge.correct(turn.set, answer)
        return summarise(records, judge, baseline, unguarded)

    def _take(self, job: Job, bar: Any) -> Outcome:
        turn = job.turn
        bar.set_postfix_str(f"{turn.set}, {turn.concurrency} at once: {turn.arm}")
        if turn not in self._journal:
            runner, options = self._runners[job.arm.peer], self._plan.options
            if turn.arm not in self._warm:  # no turn pays for what is done at first use
                few = min(WARM_UP_TOKENS, options.max_tokens)
                short = msgspec.structs.replace(options, max_tokens=few)
                runner.run(job.arm, job.items[:1], 1, short)
                self._warm.add(turn.arm)
            self._journal.add(turn, runner.run(job.arm, job.items, turn.concurrency, options))
        bar.update()
        return self._journal[turn]


def choose_baseline(arms: Sequence[Arm], swept: str | None) -> str:
    """The arm that others are held against: the sweep's best, else the first that is static and
    strict, else plain decoding."""
    return swept or next((arm.name for arm in arms if arm.static and arm.strict), PLAIN)
