"""What a request's recent past says about how far to draft."""

from typing import NamedTuple, Self

from adaptivespec.sampling import SamplingParams


class Rule(NamedTuple):
    """How a request's trees are verified: the margin rule's threshold, 1 for the strict rule, and
    the temperature, 0 for greedy. What is accepted of a draft depends on it."""

    kappa: float = 1.0
    temperature: float = 0.0

    @classmethod
    def of(cls, kappa: float, sampling: SamplingParams) -> Self:
        """The rule of a request: promotions only at temperature 0."""
        return cls(kappa) if sampling.greedy else cls(1.0, sampling.temperature)

    @property
    def greedy(self) -> bool:
        """Whether the target takes its top-1."""
        return self.temperature == 0


STRICT = Rule()


class Signals:
    """Draft confidence and rolling acceptance of one request (arXiv 2609.02897).

    confidence: the drafter's probability of its own top-1 next token, in [0, 1], as the drafter
    gave it at the last commit. acceptance: exponential moving average of accepted / drafted depth
    over the steps that drafted, in [0, 1]. rule: how the request's trees are verified.

    After `patience` drafted steps in a row with nothing accepted the past is forgotten: acceptance
    returns to its initial value, and `dcs` reads 0 until the next drafted step, which makes that
    step's tree the policy's start shape whatever the confidence.
    """

    def __init__(
        self, alpha: float, patience: int, initial_acceptance: float, rule: Rule = STRICT
    ) -> None:
        self.rule = rule
        self.confidence = 0.0
        self.acceptance = initial_acceptance
        self._alpha = alpha
        self._patience = patience
        self._initial_acceptance = initial_acceptance
        self._fruitless = 0
        self._restarting = False

    @property
    def dcs(self) -> float:
        """Draft confidence x rolling acceptance, in [0, 1]."""
        return 0.0 if self._restarting else self.confidence * self.acceptance

    def update(self, depth: int, accepted: int) -> None:
        """Account for a step: depth of the tree that was drafted, nodes accepted below its root.
        A step without a draft (depth 0) says nothing about the drafter and changes nothing."""
        if depth == 0:
            return
        self._restarting = False
        self.acceptance += self._alpha * (accepted / depth - self.acceptance)
        self._fruitless = 0 if accepted else self._fruitless + 1
        if self._fruitless == self._patience:
            self.acceptance = self._initial_acceptance
            self._fruitless = 0
            self._restarting = True
