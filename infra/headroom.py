"""How much faster than a static tree can any policy be, with this drafter on this machine?

    OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE python infra/headroom.py \\
        --set gsm8k.jsonl:question:5 ... [--rest-ms 1]

Plain answers are decoded once, and at every position of them a large tree is drafted and kept. Then
ways of drafting are replayed over the positions, whose outcomes are known, with strict acceptance
and with what passes were measured to cost: a step from a position drafts part of its tree, and goes
on behind what was accepted of that. No noise of a machine is in the ratios. Beside plain decoding
and static shapes:

stops       at every level, knows what the drafted nodes are worth and cost, and for what is below
            how nodes of such worth have fared: what a policy can know
foresees    drafts all levels, knows what each node is worth, and pays for the levels that turn out
            best alone: more than a policy can know

What a node is worth is counted over the same positions. theta, the price of time, is for each the
best of a range (docs/method.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from acceptance import in_process, local_parser, print_header, print_row
from numpy.typing import NDArray

from adaptivespec.appraisal import market, worths
from adaptivespec.bench.sweep import candidates
from adaptivespec.calibration import Calibration, outcomes
from adaptivespec.cost import DraftCosts
from adaptivespec.drafters.base import Drafter, Extension
from adaptivespec.drafters.build import make_drafter
from adaptivespec.engine.build import make_target
from adaptivespec.engine.engine import TargetEngine
from adaptivespec.messages import Chunk, StateRows
from adaptivespec.pricing import LIKELIHOODS, NODES, Prices
from adaptivespec.sampling import SamplingParams
from adaptivespec.shape import Shape
from adaptivespec.startup import measure_drafter, measure_target
from adaptivespec.tokenizer import load_tokenizer
from adaptivespec.tree import DraftTrees, roots

LARGEST = Shape(6, 3, 24)
BINS = 20

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass
class Position:
    """A tree whose outcome is known. Parents come before their children; 0 is the root."""

    tree: DraftTrees  # [1, N]
    parents: Ints  # [N]
    depths: Ints
    accepted: NDArray[np.bool_]
    worth: Floats  # P(accepted); ones until `appraise`

    def children(self, nodes: Sequence[int], width: int) -> list[int]:
        """The best `width` of each, which are listed best first."""
        return [c for n in nodes for c in np.flatnonzero(self.parents == n)[:width].tolist()]

    def best(self, nodes: Sequence[int], width: int) -> list[int]:
        return sorted(nodes, key=lambda n: -self.worth[n])[:width]


class Step(NamedTuple):
    """What is verified, and what drafting it took."""

    nodes: list[int]
    levels: int
    expanded: int


class Costs(NamedTuple):
    """Milliseconds. `rows`: of passes of the target over 0, 1, 2, ... rows."""

    rows: Floats
    draft: DraftCosts
    rest: float

    def of(self, step: Step, fed: int) -> float:
        """Of a step, before which the drafter was told `fed` tokens."""
        total = self.rows[1 + len(step.nodes)] + self.rest
        if fed:
            total += self.draft.feed + self.draft.token * fed
        if step.nodes or step.levels:
            total += self.draft.once
        return float(total + self.draft.level * step.levels + self.draft.expansion * step.expanded)


Policy = Callable[[Position], Step]


def record(
    engine: TargetEngine, drafter: Drafter, prompt: list[int], max_tokens: int, ends: Sequence[int]
) -> list[Position]:
    """The positions of a plain answer."""
    capacity = len(prompt) + max_tokens + 2
    engine.open(0, capacity, SamplingParams())
    drafter.open(0, prompt[0], capacity)
    text = [*prompt, *engine.forward([Chunk(0, prompt, True)], [], roots([])).first_tokens]
    trees, fed = [], 1
    while len(text) < len(prompt) + max_tokens and text[-1] not in ends:
        rows = StateRows(0, fed - 1, len(text) - 1)
        states = engine.states([rows]) if drafter.state_size else None
        drafter.commit([Extension(0, text[fed:])], states)
        fed = len(text)
        trees.append(drafter.draft([0], [LARGEST]))
        target = engine.forward([], [0], roots([text[-1]])).target
        engine.commit(0, [0])
        text.append(int(target[0, 0]))
    engine.close(0)
    drafter.close(0)
    return [_outcome(tree, text[len(prompt) + 1 + i :]) for i, tree in enumerate(trees)]


def _outcome(tree: DraftTrees, following: list[int]) -> Position:
    """What became of a tree whose root these tokens follow."""
    size = int(tree.sizes[0])
    columns = tree.tokens, tree.parents, tree.logprobs
    tree = DraftTrees(*(column[:, :size].contiguous() for column in columns))
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].numpy().astype(np.int64)
    depths, accepted = np.zeros(size, np.int64), np.arange(size) == 0
    for n in range(1, size):
        depths[n] = depths[parents[n]] + 1
        right = tokens[n : n + 1] == following[depths[n] - 1 : depths[n]]
        accepted[n] = accepted[parents[n]] and right
    return Position(tree, parents, depths, accepted, np.ones(size))


def appraise(positions: list[Position]) -> None:
    """Find what nodes are worth, by how such nodes fared."""
    calibration = Calibration(greedy=True)
    for position in positions:
        known = outcomes(position.tree, position.accepted[None])
        calibration.update(known.logprobs, known.first, known.accepted)
    free = Prices(0.0, 0.0, [0.0] * len(NODES), [0.0] * LIKELIHOODS, [calibration.curve], [0])
    for position in positions:
        position.worth = np.exp(worths(position.tree, market(free, 1))[0].astype(np.float64))


def static(shape: Shape, position: Position) -> Step:
    found, frontier, expanded = [], [0], 0
    for _ in range(shape.depth):
        expanded += len(frontier)
        frontier = position.children(frontier, shape.width)
        found += frontier
        frontier = position.best(frontier, shape.width)
    return Step(position.best(found, shape.nodes - 1), shape.depth - 1, expanded - 1)


class Pricing:
    """What both policies weigh, at a price of time `theta`, in tokens per millisecond."""

    def __init__(self, costs: Costs, theta: float, positions: list[Position]) -> None:
        draft = costs.draft
        self._nodes = theta * (costs.rows[1:] - costs.rows[1])
        self._once, self._level, self._expansion = (
            theta * each for each in (draft.once, draft.level, draft.expansion)
        )
        self._onward = np.zeros(BINS)
        self._learn(positions)

    def chosen(self, position: Position, nodes: list[int]) -> tuple[float, list[int]]:
        """So many of the best nodes as bring most above their price."""
        best = position.best(nodes, len(self._nodes) - 1)
        net = position.worth[best].cumsum() - self._nodes[1 : len(best) + 1]
        if not len(best) or net.max() <= 0:
            return 0.0, []
        return float(net.max()), best[: int(net.argmax()) + 1]

    def _learn(self, positions: list[Position]) -> None:
        """What expanding one of the first nodes brings, by its worth."""
        sums = np.zeros((2, BINS))
        for position in positions:
            first = position.children([0], LARGEST.width)
            before, _ = self.chosen(position, first)
            for node in first:
                below = position.children([node], LARGEST.width)
                place = min(int(position.worth[node] * BINS), BINS - 1)
                sums[:, place] += 1, self.chosen(position, first + below)[0] - before
        self._onward = sums[1] / np.maximum(sums[0], 1)

    def stops(self, position: Position) -> Step:
        frontier = found = position.children([0], LARGEST.width)
        levels = expanded = 0
        while levels < LARGEST.depth - 1:
            places = np.minimum((position.worth * BINS).astype(int), BINS - 1)
            net = self._onward[places] - self._expansion
            frontier = [n for n in position.best(frontier, LARGEST.width) if net[n] > 0]
            if net[frontier].sum() <= self._level:
                break
            levels, expanded = levels + 1, expanded + len(frontier)
            frontier = position.children(frontier, LARGEST.width)
            found = found + frontier
        net_of_all, nodes = self.chosen(position, found)
        if not levels and net_of_all <= self._once:
            return Step([], 0, 0)
        return Step(nodes, levels, expanded)

    def foresees(self, position: Position) -> Step:
        best, most = Step([], 0, 0), 0.0
        frontier = found = position.children([0], LARGEST.width)
        expanded = 0
        for levels in range(LARGEST.depth):
            net, nodes = self.chosen(position, found)
            net -= self._once + self._level * levels + self._expansion * expanded
            if net > most:
                best, most = Step(nodes, levels, expanded), net
            frontier = position.best(frontier, LARGEST.width)
            expanded += len(frontier)
            frontier = position.children(frontier, LARGEST.width)
            found = found + frontier
        return best


def rate(answers: list[list[Position]], costs: Costs, policy: Policy, feeds: bool = True) -> float:
    """Tokens per millisecond."""
    tokens, spent = 0, 0.0
    for answer in answers:
        at, fed = 0, 1
        while at < len(answer):
            position = answer[at]
            step = policy(position)
            kept = [n for n in step.nodes if position.accepted[n]]
            spent += costs.of(step, fed * feeds)
            fed = 1 + int(position.depths[kept].max(initial=0))
            at += fed
            tokens += fed
    return tokens / spent


def main() -> None:
    parser = local_parser(__doc__)
    add = parser.add_argument
    add("--rest-ms", type=float, default=1.0, help="of a step, beside both models (1)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    settings = in_process(args.drafter, args.dtype, args.threads, 1)
    engine, drafter = make_target(settings), make_drafter(settings)
    tokenizer = load_tokenizer(settings.model.path)

    rows = range(LARGEST.nodes + 1)
    verify = measure_target(engine, [*range(1, 9), 10, 12, 16, 20, 24])
    seconds = measure_drafter(drafter, LARGEST.width)
    draft = DraftCosts(*(1e3 * getattr(seconds, f) for f in DraftCosts.__struct_fields__))
    costs = Costs(1e3 * np.interp(rows, verify.rows, verify.seconds), draft, args.rest_ms)
    print("verifying 1, 2, ... rows, ms:", *(f"{ms:.1f}" for ms in costs.rows[1:]))
    print(f"drafting, ms: {draft}")

    sets: dict[str, list[list[Position]]] = {}
    for prompts in args.sets:
        chats = [[{"role": "user", "content": message}] for message in prompts.messages]
        sets[prompts.name] = [
            record(
                engine,
                drafter,
                tokenizer.apply_chat_template(chat),
                args.max_tokens,
                sorted(tokenizer.eos_ids),
            )
            for chat in chats
        ]
    positions = [p for answers in sets.values() for answer in answers for p in answer]
    appraise(positions)

    def ratios(policy: Policy) -> list[float]:
        return [
            rate(answers, costs, policy) / rate(answers, costs, lambda _: Step([], 0, 0), False)
            for answers in sets.values()
        ]

    shapes = candidates(LARGEST)
    found = {f"static {tuple(s)}": ratios(partial(static, s)) for s in shapes}
    thetas = np.linspace(0.7, 2.0, 14) / (costs.rows[1] + costs.rest)
    for name in ("stops", "foresees"):
        tried = [ratios(getattr(Pricing(costs, t, positions), name)) for t in thetas]
        found[name] = max(tried, key=sum)
    print_header("over plain decoding", *sets, "mean")
    for name, values in sorted(found.items(), key=lambda item: -sum(item[1])):
        print_row(name, *(f"{v:.3f}" for v in (*values, float(np.mean(values)))))


if __name__ == "__main__":
    main()
