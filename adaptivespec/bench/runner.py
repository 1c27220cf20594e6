"""What answers prompts: this process, or an endpoint."""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from adaptivespec.bench.arms import Arm
from adaptivespec.bench.records import Outcome
from adaptivespec.bench.sets import Item


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests have in common. The seed of a prompt is `seed` + its row, whatever the arm;
    it acts at a temperature above 0."""

    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = False

    def seed_of(self, item: Item) -> int:
        return self.seed + item.row


class Runner(Protocol):
    def identity(self) -> dict[str, Any]:
        """What the results depend on beside arms, prompts and options; JSON."""

    def run(self, arm: Arm, items: Sequence[Item], concurrency: int, options: Options) -> Outcome:
        """Answer all prompts, `concurrency` at a time: the next one starts when one has ended.
        Raises AdaptiveSpecError."""

    def status(self) -> dict[str, Any] | None:
        """What the runner says of itself, None if it says nothing; JSON."""

    def close(self) -> None:
        """Release what it holds."""
