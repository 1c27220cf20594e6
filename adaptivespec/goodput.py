"""The policy that maximises goodput: expected tokens per second of the whole batch.

A fraction E[tokens] / seconds is maximal where E[tokens] - theta * seconds is, at theta = the
fraction's own maximum (Dinkelbach 1967). theta is what steps have been achieving; it turns every
cost into tokens, and a batch of trees into a sum of nodes: each is kept if the probability that it
is accepted exceeds its price. What a draft costs as a whole, and one more level, weighs against all
that it brings. docs/method.md derives this.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from adaptivespec.appraisal import market, worths
from adaptivespec.calibration import Calibration, Floats, Reliability, accepted_nodes, outcomes
from adaptivespec.config import DCSPolicy, GoodputPolicy
from adaptivespec.cost import CostModel, DraftCosts, StepWork, VerifyCosts
from adaptivespec.kernels import worth as kernels
from adaptivespec.pricing import LIKELIHOODS, NODES, UNPRICED, Prices
from adaptivespec.shape import NO_DRAFT, Shape
from adaptivespec.signals import STRICT, Rule, Signals
from adaptivespec.tree import DraftTrees

MEMORY = 0.99
"""What a step's gain over plain decoding, and what expanding nodes brought, still weigh at the
next step."""

LATELY = 0.97
"""The same of the gain that decides on a rest, with one request; and of what trees bring above
their forecast."""

HOPE = 10.0, 1.5
"""Plain tokens that the gain over plain decoding starts with, and what it starts at."""

ONWARD = 4.0
"""Worth of expanded nodes that `Prices.onward` is drawn to `expected_onward` by."""

TYPICAL = 4
"""Nodes of a tree whose mean price is that of one more, before it is known what these bring."""

PLAIN_EVERY = 200
"""Steps after which one decodes plainly, whatever a draft promises: what is compared with plain
decoding has to know what that takes, at this batch and context."""

SURPLUS = 4.0
"""Forecast tokens that what trees bring above their forecast is drawn to 1 by."""

CHECK_EVERY = 8
"""Steps with trees of which one's predictions are held against what came of them."""

PROBE = Shape(1, 1, 2)
"""What one request drafts after a rest, whatever it is worth: the cheapest way to learn. The others
are not even fed, for what a drafter has missed is as much work as if it had not rested."""

PROBES = 3
"""Steps that probe after a rest. If nothing of theirs is accepted, or drafting for all does not
promise to pay, it goes on resting."""

STAY = 64
"""Steps in which what the requests have missed has to pay for being fed: then others are there. If
wakings have been ending in a rest sooner, in as many as they lasted."""

RECOVERY = 1 / 8
"""Of what these are short of `STAY`, what a rest without a waking gives back: what did not last may
at another time."""

SHORTEST, LONGEST = 16, 512
"""Steps of a rest. The shortest is with one request; what several are like together changes more
slowly, by the root of their number."""

PAYING = 1.02
"""Gain over plain decoding below which the drafter rests, and which it has to promise more than to
be woken: costs are not known better than that."""

CATCHING_UP = 8
"""Steps behind a rest in which its arrears are fed, which are paid once. Later ones that feed more
than they have brought are those in which prompts are, and that is what drafting costs, too."""

TRIAL = 6.0, 1.25
"""`HOPE` of the steps behind a rest, until which the drafter has to pay for itself."""


class _Priced(NamedTuple):
    """Prices without curves, what they were worked out for, and some of them as arrays."""

    running: int
    learned: int
    prices: Prices
    nodes: Floats  # of 0, 1, ... nodes
    onward: Floats


class Goodput:
    """One object serves all requests: they share passes, so they share prices.

    When steps with a drafter have been bringing less than plain decoding would, it *rests*:
    adaptive requests do not even feed it. Rests double in length while nothing changes, and after
    each it has to show with one request that it is of use.
    """

    def __init__(self, settings: GoodputPolicy) -> None:
        self._largest = settings.largest
        low = Shape(3, 4, 4)
        self.start = Shape(*(min(a, b) for a, b in zip(low, settings.largest, strict=True)))
        self.costs = CostModel()
        self.reliability = Reliability()
        self._calibrations: dict[Rule, Calibration] = {}
        seen, gain = HOPE
        self._tokens, self._plain_tokens = gain * seen, seen
        self._gained, self._expanded = np.zeros((2, LIKELIHOODS))
        self._since_plain = PLAIN_EVERY
        self._awake = HOPE  # plain tokens since the last rest, and the gain over them
        self._rest, self._next_rest = 0, SHORTEST
        self._probes = 0  # steps that are yet to probe
        self._accepted = False  # whether anything of those was
        self._listened: list[float] = []  # worth of the best first child in each
        self._priced: _Priced | None = None
        self._checks = 0  # steps since the last whose predictions were checked
        self._since_rest, self._brought = 0, 0.0  # steps, and tokens above those of plain decoding
        self._stay = float(STAY)  # steps that a waking is thought to last, or what matters of them
        self._came = self._forecasts = SURPLUS
        self._forecasted: float | None = None  # tokens of this step's trees above their price

    @property
    def reachable(self) -> list[Shape]:
        """Trees have any number of nodes up to the largest; these are worth preparing for."""
        depth, width, nodes = self._largest
        sizes = (
            {2**k for k in range(1, nodes.bit_length())} | {3 * 2**k for k in range(5)} | {nodes}
        )
        trees = [Shape(min(depth, n - 1), width, n) for n in sorted(sizes) if 2 <= n <= nodes]
        return [NO_DRAFT, *trees]

    @property
    def followed(self) -> int | None:
        if self._rest:
            return 0
        return 1 if self._probes else None

    @property
    def gain(self) -> float:
        """Tokens per second over those of plain decoding, of late, by modelled costs; at least 1,
        for not drafting is always open."""
        return max(self._tokens / self._plain_tokens, 1.0)

    @property
    def _surplus(self) -> float:
        """What trees have brought of late, per token that was forecast."""
        return min(max(self._came / self._forecasts, 0.5), 2.0)

    def signals(self, rule: Rule = STRICT) -> Signals:
        paper = DCSPolicy()  # whose signals are kept for whoever watches
        coarse = Rule(round(rule.kappa, 1), round(2 * rule.temperature) / 2)
        rule = Rule(coarse.kappa, max(coarse.temperature, 0.5) if rule.temperature else 0.0)
        return Signals(paper.alpha, paper.patience, paper.initial_acceptance, rule)

    def calibration(self, rule: Rule) -> Calibration:
        """The curve of a class of requests."""
        if rule not in self._calibrations:
            self._calibrations[rule] = Calibration(rule.greedy)
        return self._calibrations[rule]

    def profiled(self, verify: VerifyCosts | None, draft: DraftCosts | None) -> None:
        self.costs.profiled(verify, draft)
        self._priced = None

    # -- before a step ----------------------------------------------------------------------------

    def shapes(self, signals: Sequence[Signals], running: int) -> list[Shape]:
        """The largest shape for requests whose best first child can be worth verifying, if their
        trees together are worth a draft."""
        self._forecasted = None
        if not signals:
            return []
        prices, fixed = self._price(running).prices, self._theta(running) * self.costs.drafting
        worth = np.array([self.calibration(s.rule).best(s.confidence) for s in signals])
        shapes = [NO_DRAFT] * len(signals)
        if self._probes:
            self._listened.append(float(worth.max()))
            shapes[int(worth.argmax())] = PROBE
            return shapes
        brought = self._forecast(worth, running)
        self._forecasted = brought if len(signals) == running else None
        if self._since_plain < PLAIN_EVERY and self._surplus * brought > fixed:
            return [self._largest if each > prices.nodes[1] else NO_DRAFT for each in worth]
        return shapes

    def _forecast(self, worth: Floats, running: int) -> float:
        """Tokens that trees bring above their price (see `kernels.forecast`)."""
        priced = self._price(running)
        costs = priced.prices.expansion, priced.prices.level, self._largest.depth
        return kernels.forecast(worth.copy(), priced.nodes, priced.onward, *costs)

    def prices(self, signals: Sequence[Signals | None], running: int) -> Prices:
        """What a drafter is told beside shapes; None: a request that asked for a shape."""
        rules = list(dict.fromkeys(s.rule for s in signals if s is not None))
        of = [UNPRICED if s is None or self._probes else rules.index(s.rule) for s in signals]
        curves = [self.calibration(rule).curve for rule in rules]
        return msgspec.structs.replace(self._price(running).prices, curves=curves, of=of)

    def _price(self, running: int) -> "_Priced":
        """The same until the costs have learned."""
        known = running, self.costs.learned
        if self._priced is None or self._priced[:2] != known:
            prices = self._work_out_prices(running)
            nodes = np.interp(np.arange(NODES[-1] + 1), NODES, prices.nodes)
            self._priced = _Priced(*known, prices, nodes, np.array(prices.onward))
        return self._priced

    def _work_out_prices(self, running: int) -> Prices:
        """Without curves."""
        theta, costs = self._theta(running), self.costs
        nodes = [theta * seconds for seconds in costs.nodes(running, NODES)]
        start = expected_onward(nodes[NODES.index(TYPICAL)] / TYPICAL)
        return Prices(
            level=theta * costs.level,
            expansion=theta * costs.expansion,
            nodes=nodes,
            onward=((self._gained + ONWARD * start) / (self._expanded + ONWARD)).tolist(),
            curves=[],
            of=[],
        )

    def _theta(self, running: int) -> float:
        """Tokens per second of this batch."""
        return self.gain * running / self.costs.plain(running)

    # -- after it ---------------------------------------------------------------------------------

    def verified(self, trees: DraftTrees, path: Tensor, rules: Sequence[Rule]) -> None:
        """Learn from trees [B, N], and what was accepted of them (Walk.path)."""
        if trees.tokens.shape[1] == 1:
            return
        trees, accepted = trees.cpu(), accepted_nodes(path.cpu())
        self._checks = (self._checks + 1) % CHECK_EVERY
        if self._checks == 0:
            self._check(trees, accepted, rules)
        known = outcomes(trees, accepted)
        columns = known.logprobs, known.first, known.accepted
        classes = list(dict.fromkeys(rules))
        if len(classes) == 1:
            self.calibration(classes[0]).update(*columns)
            return
        of = np.array([classes.index(rule) for rule in rules])[known.row]
        for index, rule in enumerate(classes):
            self.calibration(rule).update(*(column[of == index] for column in columns))

    def _check(self, trees: DraftTrees, accepted: NDArray[np.bool_], rules: Sequence[Rule]) -> None:
        """Hold the predictions that were made against the outcomes."""
        classes = list(dict.fromkeys(rules))
        curves = [self.calibration(rule).curve for rule in classes]
        nothing = [0.0] * len(NODES), [0.0] * LIKELIHOODS
        free = Prices(0.0, 0.0, *nothing, curves, [*map(classes.index, rules)])
        predicted = np.exp(worths(trees, market(free, len(rules))), dtype=np.float64)
        drafted = (trees.tokens.numpy() >= 0) & (trees.parents.numpy() >= 0)
        self.reliability.add(predicted[drafted], accepted[drafted])

    def stepped(self, step: StepWork) -> None:
        """Learn from what a step of decoding did and took."""
        priced = self._price(step.requests)
        self.costs.observe(step)
        self._since_plain = self._since_plain + 1 if step.nodes > step.requests else 0
        if not step.adaptive:  # it tells what steps cost, not whether drafting pays
            return
        plain_tokens = self.costs.seconds(step) / self.costs.plain(step.requests) * step.requests
        self._tokens = MEMORY * self._tokens + step.tokens
        self._plain_tokens = MEMORY * self._plain_tokens + plain_tokens
        if step.growth is not None:
            self._gained, self._expanded = MEMORY * self._gained, MEMORY * self._expanded
            if step.growth.worth:
                self._gained += step.growth.gained
                self._expanded += step.growth.worth
            if self._forecasted is not None:
                spent = float(priced.nodes[min(step.nodes - step.requests, NODES[-1])])
                spent += priced.prices.level * step.growth.passes
                spent += priced.prices.expansion * step.growth.expanded
                self._came = LATELY * self._came + step.tokens - step.requests - spent
                self._forecasts = LATELY * self._forecasts + self._forecasted
                weight = (1 - LATELY) * SURPLUS
                self._came, self._forecasts = self._came + weight, self._forecasts + weight
        self._account(step)

    def _account(self, step: StepWork) -> None:
        """Decide whether the drafter rests."""
        if self._rest:
            self._rest -= 1
            if not self._rest:
                self._begin_probing()
            return
        if self._probes:
            if step.growth is not None and self._listened:
                self._probes -= 1
                self._accepted |= step.tokens > step.requests
                if not self._probes:
                    arrears = self._theta(step.requests) * self.costs.feeding(step.behind)
                    if self._accepted and self._promise(step.requests) * self._stay > arrears:
                        self._wake(step.requests)
                    else:
                        self._stay += RECOVERY * (STAY - self._stay)
                        self._begin_rest(step.requests)
            return
        rate = step.requests / self.costs.plain(step.requests)
        self._brought += step.tokens - rate * self.costs.seconds(step)
        if self._since_rest < CATCHING_UP:
            step = step._replace(fed=min(step.fed, step.tokens))
        plain = rate * self.costs.seconds(step)
        seen, gain = self._awake
        # The more requests, the fewer steps tell as much; but rests that are none cost steps, too.
        seen *= LATELY**step.requests**0.25
        total = seen + plain
        self._awake = total, (seen * gain + step.tokens) / total
        self._since_rest += 1
        if self._awake[1] < PAYING:
            self._stay = (self._stay + min(self._since_rest, STAY)) / 2
            self._begin_rest(step.requests)

    def _begin_rest(self, requests: int) -> None:
        shortest = round(SHORTEST * requests**0.5)
        if self._brought > 0:  # arrears included: it was of use, and may soon be again
            self._next_rest = shortest
        self._rest = max(self._next_rest, shortest)
        self._next_rest = min(2 * self._rest, LONGEST)

    def _begin_probing(self) -> None:
        self._probes, self._accepted, self._listened = PROBES, False, []
        self._brought = 0.0
        for calibration in self._calibrations.values():
            calibration.doubt_less()

    def _promise(self, requests: int) -> float:
        """Tokens that a step is thought to bring above what pays if all draft, and have been fed.
        What one request was worth in the probes is what all are worth at a time: if all were alike
        in every step, drafting would only have to be done in the good ones, and seem to pay."""
        theta = self._theta(requests)
        brought = 0.0
        for first in range(len(self._listened)):
            worth = np.resize(np.roll(self._listened, first), requests)
            above = self._surplus * self._forecast(worth, requests) - theta * self.costs.drafting
            brought += max(above, 0.0)
        brought /= len(self._listened)
        return brought - theta * self.costs.feeding(requests) - (PAYING - 1) * requests

    def _wake(self, requests: int) -> None:
        seen, gain = TRIAL
        self._awake, self._since_rest = (seen * requests**0.5, gain), 0


def expected_onward(price: float) -> Floats:
    """What expanding a node brings per unit of its worth, at LIKELIHOODS values of it, where one
    node more costs `price`, before it is known: E[max(P - price / worth, 0)], where P, the chance
    of a best child below an accepted node, is as the larger of two uniform numbers: that is 2/3 on
    average, and more often near 1 than near 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        x = np.minimum(np.nan_to_num(price / np.linspace(0, 1, LIKELIHOODS), nan=0.0), 1.0)
    return np.asarray(2 / 3 - x + x**3 / 3)
