"""Plans of prompts that are given as lists."""

from collections.abc import Sequence

from adaptivespec.training.generate import Job, plan
from adaptivespec.training.prompts import Excluded, PromptSet, SelfWritten


def planned(
    files: Sequence[Sequence[str]],
    own: Sequence[SelfWritten] = (),
    excluded: Sequence[str] = (),
    *,
    sampled: float = 0.0,
    seed: int = 0,
) -> list[Job]:
    sets = [PromptSet("file", list(messages)) for messages in files]
    return plan(sets, own, Excluded(excluded), sampled, 0.7, seed)
