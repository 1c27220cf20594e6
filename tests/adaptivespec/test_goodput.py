"""The policy in a world whose machine and target are known exactly."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from adaptivespec.config import GoodputPolicy, StaticPolicy
from adaptivespec.drafters.growth import GrowingTrees, Level
from adaptivespec.goodput import LONGEST, PLAIN_EVERY, Goodput
from adaptivespec.policy import Policy, Static, make_policy
from adaptivespec.pricing import UNPRICED, Growth, Prices
from adaptivespec.shape import NO_DRAFT, Shape
from adaptivespec.signals import STRICT, Rule
from adaptivespec.tree import DraftTrees, roots
from tests.adaptivespec.drafters.test_growth import distribution
from tests.adaptivespec.machine import CPU, GPU, LOADED, Machine
from tests.adaptivespec.trees import walk

LARGEST = Shape(5, 4, 24)
Target = Callable[[tuple[int, ...], np.random.Generator], int]
"""The target's own token after a text."""


@cache
def shares(text: tuple[int, ...]) -> np.ndarray:
    """The drafter's distribution, as exact shares."""
    values = distribution(text).double().exp().numpy()
    return values / values.sum()


def agreeing(text: tuple[int, ...], random: np.random.Generator) -> int:
    """A target that samples from the drafter's own distribution: q is P(accepted)."""
    return int(random.choice(len(shares(text)), p=shares(text)))


def disagreeing(text: tuple[int, ...], random: np.random.Generator) -> int:
    """A target whose tokens the drafter has never heard of."""
    return 99


def draft(
    texts: Sequence[tuple[int, ...]], shapes: Sequence[Shape], prices: Prices | None
) -> tuple[DraftTrees, Growth]:
    """Trees below the texts, from the drafter's distribution."""
    requests = range(len(texts))
    trees = GrowingTrees(LARGEST, len(texts), torch.device("cpu"))
    known: dict[tuple[int, int], tuple[int, ...]] = {}

    def best(found: Sequence[tuple[int, ...]]) -> tuple[torch.Tensor, torch.Tensor]:
        values, tokens = torch.stack([distribution(text) for text in found]).topk(LARGEST.width)
        return values, tokens

    def expand(level: Level) -> tuple[torch.Tensor, torch.Tensor]:
        columns = (level.slots, level.rows, level.parents, level.tokens)
        rows = list(zip(*(column.tolist() for column in columns), strict=True))
        for slot, row, parent, token in rows:
            known[slot, row] = (*known[slot, parent], token)
        return best([known[slot, row] for slot, row, _, _ in rows])

    for request, text in zip(requests, texts, strict=True):
        trees.open(request, text[-1])
        known[int(trees.slots([request])), 0] = text
    trees.plant(requests, [text[-1] for text in texts], *best(texts))
    return trees.draft(requests, shapes, expand, prices), trees.growth


@dataclass
class World:
    """Requests that decode for ever."""

    machine: Machine
    target: Target
    requests: int = 1
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    drafted: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)

    def run(self, policy: Policy, steps: int) -> "World":
        random = np.random.default_rng(self.seed)
        texts = [(request, self.seed) for request in range(self.requests)]
        signals = [policy.signals(Rule(1.0, 1.0)) for _ in texts]
        unfed = [1] * self.requests
        for _ in range(steps):
            heard = range(self.requests)[: policy.followed]
            fed = sum(unfed[i] for i in heard)
            for i in heard:
                unfed[i] = 0
                signals[i].confidence = float(distribution(texts[i]).max().exp())
            shapes = [NO_DRAFT] * self.requests
            chosen = policy.shapes([signals[i] for i in heard], self.requests)
            for i, shape in zip(heard, chosen, strict=True):
                shapes[i] = shape
            trees, growth = roots([text[-1] for text in texts]), None
            if any(shape != NO_DRAFT for shape in shapes):
                prices = policy.prices(list(signals), self.requests)
                trees, growth = draft(texts, shapes, prices)
            predict = self._choose(texts, trees, random)
            walks, size = walk(trees, predict), trees.tokens.shape[1]
            paths = [path + [-1] * (size - len(path)) for path, _ in walks]
            policy.verified(trees, torch.tensor(paths), [each.rule for each in signals])
            emitted = 0
            for i, (path, bonus) in enumerate(walks):
                new = [*trees.tokens[i, path[1:]].tolist(), bonus]
                texts[i] = (*texts[i][-2:], *new)
                unfed[i] += len(new)
                emitted += len(new)
            nodes = int(trees.sizes.sum())
            work = self.machine.step(self.requests, nodes, emitted, fed, growth)
            policy.stepped(work)
            self.tokens += emitted
            self.seconds += work.total_s
            self.drafted.append(nodes - self.requests)
            self.fed.append(fed)
        return self

    def _choose(
        self, texts: Sequence[tuple[int, ...]], trees: DraftTrees, random: np.random.Generator
    ) -> torch.Tensor:
        predict = torch.full_like(trees.tokens, -1)
        for i, text in enumerate(texts):
            paths = {0: text}
            for node in range(int(trees.sizes[i])):
                if node:
                    parent = int(trees.parents[i, node])
                    paths[node] = (*paths[parent], int(trees.tokens[i, node]))
                predict[i, node] = self.target(paths[node], random)
        return predict

    @property
    def goodput(self) -> float:
        return self.tokens / self.seconds


def goodput() -> Goodput:
    return Goodput(GoodputPolicy(LARGEST))


def plain_goodput(machine: Machine, requests: int) -> float:
    return requests / machine.step(requests, requests, requests, 0, None).total_s


@pytest.mark.parametrize(("machine", "requests"), [(CPU, 1), (GPU, 4)], ids=["cpu", "gpu, four"])
def test_a_useless_drafter_is_switched_off_within_20_steps(machine: Machine, requests: int) -> None:
    world = World(machine, disagreeing, requests).run(goodput(), 1000)
    after = world.drafted[20:]
    assert sum(drafted > 0 for drafted in after) <= len(after) // 50
    assert max(after) <= 1, "no more than a probe"
    assert sum(fed > 0 for fed in world.fed[-LONGEST:]) <= LONGEST // 30
    assert world.goodput > 0.97 * plain_goodput(machine, requests)


def test_a_loaded_machine_decodes_plainly() -> None:
    policy = goodput()
    World(LOADED, agreeing, 8).run(policy, 80)
    world = World(LOADED, agreeing, 8).run(policy, 250)
    assert world.goodput > 0.97 * plain_goodput(LOADED, 8)


STATIC = [
    *(Shape(2, 1, 3), Shape(1, 3, 4), Shape(3, 2, 7), Shape(5, 4, 24)),
]


@pytest.mark.parametrize(
    ("machine", "requests"),
    [(CPU, 1), (CPU, 3), (GPU, 1), (GPU, 8)],
    ids=["cpu", "cpu, three", "gpu", "gpu, eight"],
)
def test_no_static_tree_is_faster(machine: Machine, requests: int) -> None:
    steps = 960 // requests
    ours = World(machine, agreeing, requests).run(goodput(), steps).goodput
    for shape in STATIC:
        policy = Static(StaticPolicy(shape))
        static = World(machine, agreeing, requests).run(policy, steps).goodput
        assert ours > 0.98 * static, shape
    assert ours > plain_goodput(machine, requests)


def test_predictions_are_calibrated() -> None:
    policy = goodput()
    World(GPU, agreeing, 3).run(policy, 120)
    assert policy.reliability.error < 0.05
    assert sum(b.nodes for b in policy.reliability.bins) > 500


def test_a_drafter_that_becomes_useful_is_used_again() -> None:
    policy = goodput()
    World(GPU, disagreeing).run(policy, 150)
    world = World(GPU, agreeing).run(policy, 800)  # in which there is an end to any rest
    late = world.drafted[-100:]
    assert sum(drafted > 1 for drafted in late) > 50


@pytest.mark.parametrize(
    ("confidences", "followed"),
    [([0.95] * 3, None), ([0.95, 0.95, 0.1], 0), ([0.1] * 3, 0)],
    ids=["always", "at times", "never"],
)
def test_what_one_request_is_worth_at_times_many_are_not_worth_at_once(
    confidences: list[float], followed: int | None
) -> None:
    """Eight requests of which some are always confident pay less than eight that all are at times,
    for a draft takes as long for some."""
    machine, requests, policy = Machine(base=10.0, node=1.4), 8, goodput()
    World(machine, disagreeing, requests).run(policy, 80)
    while policy.followed != 1:
        policy.stepped(machine.step(requests, requests, requests, 0, None))
    signals = policy.signals(Rule(1.0, 1.0))
    for signals.confidence in confidences:
        policy.shapes([signals], requests)
        probe = machine.step(requests, requests + 1, requests + 1, 0, Growth(passes=1))
        policy.stepped(probe._replace(behind=100))
    assert policy.followed == followed


def test_what_promises_and_does_not_last_is_fed_less_and_less() -> None:
    """What eight requests have missed is as much work as two steps. A promise is worth that while
    wakings last, and no longer when they have been ending after a few steps."""
    machine, requests, policy = Machine(base=10.0, node=1.4), 8, goodput()
    World(machine, disagreeing, requests).run(policy, 80)
    promising = policy.signals(Rule(1.0, 1.0))
    promising.confidence = 0.95
    plain = machine.step(requests, requests, requests, 0, None)
    probe = machine.step(requests, requests + 1, requests + 1, 0, Growth(passes=1))
    vain = machine.step(requests, 3 * requests, requests, requests, Growth(passes=2, expanded=16))
    woken = []
    for _ in range(8):
        while policy.followed != 1:
            policy.stepped(plain if policy.followed == 0 else vain)
        while policy.followed == 1:
            policy.shapes([promising], requests)
            policy.stepped(probe._replace(behind=800))
        woken.append(policy.followed is None)
    assert woken[0]
    assert sum(woken) < len(woken) / 2


def test_requests_that_never_draft_say_nothing_of_the_drafter() -> None:
    policy, others = goodput(), Goodput(GoodputPolicy(LARGEST))
    for each in (policy, others):
        World(CPU, disagreeing).run(each, 60)
    resting = policy.followed
    plain = CPU.step(1, 1, 1, 0, None)._replace(adaptive=False)
    for _ in range(2 * LONGEST):
        policy.stepped(plain)
    assert policy.followed == resting == 0
    assert World(CPU, agreeing).run(policy, 8).fed == World(CPU, agreeing).run(others, 8).fed


def test_requests_that_ask_for_a_shape_have_no_price() -> None:
    policy = goodput()
    signals = policy.signals()
    prices = policy.prices([signals, None, policy.signals(Rule(0.2))], 3)
    assert prices.of == [0, UNPRICED, 1]
    assert len(prices.curves) == 2


def test_classes_of_rules_are_few() -> None:
    policy = goodput()
    assert policy.signals(Rule(0.21, 0.0)).rule == policy.signals(Rule(0.19, 0.0)).rule
    assert policy.signals(Rule(1.0, 0.01)).rule == Rule(1.0, 0.5), "it samples"
    assert policy.signals().rule == STRICT


def test_what_is_reachable_is_within_the_largest_shape() -> None:
    policy = make_policy(GoodputPolicy(Shape(3, 2, 7)))
    assert policy.reachable == [
        NO_DRAFT,
        Shape(1, 2, 2),
        Shape(2, 2, 3),
        Shape(3, 2, 4),
        Shape(3, 2, 6),
        Shape(3, 2, 7),
    ]
    assert policy.start == Shape(3, 2, 4)


def test_what_plain_decoding_takes_is_measured_first_and_again() -> None:
    policy = goodput()
    assert policy.shapes([], 0) == []
    drafted = World(CPU, agreeing).run(policy, 3 * PLAIN_EVERY).drafted
    assert drafted[0] == 0 < drafted[1]
    plain = [step for step, nodes in enumerate(drafted) if not nodes]
    assert max(b - a for a, b in pairwise(plain)) <= PLAIN_EVERY + 1
