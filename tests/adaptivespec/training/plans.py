"""Prompts as lists, and the jobs that they make."""

import random
from collections.abc import Sequence

from adaptivespec.sampling import SamplingParams
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


def texts(count: int) -> list[str]:
    """Short messages of random letters."""
    chance = random.Random(0)
    return ["".join(chance.choices("abcdefgh ", k=chance.randint(1, 12))) for _ in range(count)]


def jobs_for(messages: Sequence[str], temperature: float = 0.0) -> list[Job]:
    return [Job(i, SamplingParams(temperature, seed=i), m) for i, m in enumerate(messages)]
