"""Third stage: how much of what a drafter proposes is accepted, measured in the running system."""

from collections.abc import Sequence
from dataclasses import dataclass

from adaptivespec.local import LocalSystem
from adaptivespec.request import NOTHING_USED, GenerationRequest, Usage
from adaptivespec.shape import Shape

SHAPES = [Shape(3, 4, 4), Shape(7, 1, 8), Shape(5, 4, 16), Shape(6, 8, 32)]
"""Measured unless others are named."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """usage: of all `answers` together; `ended` of them ended before the longest length allowed.
    reached[d]: steps that accepted at least d drafted tokens, from d = 0 on."""

    usage: Usage
    answers: int
    ended: int
    reached: list[int]

    @property
    def length(self) -> float:
        """Tokens per answer."""
        return self.usage.completion_tokens / self.answers

    @property
    def by_depth(self) -> list[float]:
        """Of the steps that accepted the nodes before it, the share that accepted the node at depth
        1, 2, ..."""
        pairs = zip(self.reached[1:], self.reached, strict=False)
        return [here / before for here, before in pairs if before]

    def __add__(self, other: "Measurement") -> "Measurement":
        longest = max(len(self.reached), len(other.reached))
        padded = [m.reached + [0] * (longest - len(m.reached)) for m in (self, other)]
        return Measurement(
            self.usage + other.usage,
            self.answers + other.answers,
            self.ended + other.ended,
            [a + b for a, b in zip(*padded, strict=True)],
        )


NOTHING_MEASURED = Measurement(NOTHING_USED, 0, 0, [])


def measure(
    system: LocalSystem,
    prompts: Sequence[list[int]],
    shape: Shape,
    *,
    kappa: float = 1.0,
    max_tokens: int = 128,
) -> Measurement:
    """Answer all prompts greedily with trees of one shape."""
    requests = [
        GenerationRequest(
            prompt=prompt, max_tokens=max_tokens, mode="static", kappa=kappa, shape=shape
        )
        for prompt in prompts
    ]
    usage, ended, reached = NOTHING_USED, 0, [0] * (shape.depth + 1)
    for deltas in system.generate(requests):
        for delta in deltas[1:]:  # the first token comes with the prompt
            for depth in range(len(delta.tokens)):
                reached[depth] += 1
        if (counts := deltas[-1].usage) is not None:
            usage += counts
        ended += deltas[-1].finish_reason == "stop"
    return Measurement(usage, len(requests), ended, reached)
