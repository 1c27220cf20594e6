"""Conversations as padded batches, in an order that a seed and a step number fix."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adaptivespec.training.corpus import Conversation, Entry


@dataclass(frozen=True, slots=True)
class Batch:
    """B texts. Row i of a text pairs the target's state at position i with token i + 1 and predicts
    token i + 2.

    tokens int64 [B, L]: token i + 1 of every row. positions int64 [B, L]. aux [B, L, 3 H].
    answer_rows int64 [B, A]: the rows that predict an answer token, the first excepted (the target
    itself gives that one). answers int64 [B, A]: what they predict. answer_mask bool [B, A]: false
    at padding. final [N, H]: the target's final states behind the predictions, in the order of the
    mask's true places.
    """

    tokens: Tensor
    positions: Tensor
    aux: Tensor
    answer_rows: Tensor
    answers: Tensor
    answer_mask: Tensor
    final: Tensor


def collate(conversations: Sequence[Conversation], device: torch.device | str) -> Batch:
    """Pad conversations, each with an answer of two tokens or more, to one batch."""
    size = len(conversations)
    length = max(len(c.tokens) for c in conversations) - 2
    answer = max(len(c.tokens) - c.prompt for c in conversations) - 1
    width = conversations[0].aux.shape[1]
    tokens = torch.zeros((size, length), dtype=torch.int64)
    aux = torch.zeros((size, length, width), dtype=conversations[0].aux.dtype)
    answers = torch.zeros((size, answer), dtype=torch.int64)
    mask = torch.zeros((size, answer), dtype=torch.bool)
    final = []
    for i, c in enumerate(conversations):
        n, predicted = len(c.tokens) - 2, len(c.tokens) - c.prompt - 1
        tokens[i, :n] = c.tokens[1:-1]
        aux[i, :n] = c.aux[:n]
        answers[i, :predicted] = c.tokens[c.prompt + 1 :]
        mask[i, :predicted] = True
        final.append(c.final[c.prompt : -1])
    starts = torch.tensor([c.prompt - 1 for c in conversations])
    rows = (starts[:, None] + torch.arange(answer)).clamp_max(length - 1)
    positions = torch.arange(length).expand(size, -1)
    parts = (tokens, positions, aux, rows, answers, mask, torch.cat(final))
    return Batch(*(part.to(device) for part in parts))


HELD_OUT = 0.02
"""Share of the prompts that are kept from training."""


def held_out(entry: Entry) -> bool:
    """Whether a conversation is kept from training: decided by its prompt, so that no other answer
    to the same prompt is trained on."""
    return entry.prompt_hash < HELD_OUT * 2**32


class Plan:
    """The batches of every pass over a corpus: entries of similar length, `budget` padded tokens at
    most unless one alone is longer, in a new order every pass."""

    def __init__(self, entries: Sequence[Entry], budget: int, ranks: int, seed: int) -> None:
        """`ranks` processes take turns, each the same number of batches per pass."""
        self._entries = [entry for entry in entries if entry.length - entry.prompt >= 2]
        self._budget, self._ranks, self._seed = budget, ranks, seed

    def epoch(self, number: int) -> list[list[Entry]]:
        """The batches of one pass; the length is a multiple of the number of ranks."""
        chance = random.Random(f"{self._seed}/{number}")
        entries = list(self._entries)
        chance.shuffle(entries)
        batches = []
        for start in range(0, len(entries), _WINDOW):
            window = sorted(entries[start : start + _WINDOW], key=lambda e: e.length)
            batches += _pack(window, self._budget)
        chance.shuffle(batches)
        return batches[: len(batches) // self._ranks * self._ranks]


_WINDOW = 512
"""Conversations sorted by length at a time: little padding, and still batches of chance."""


def _pack(entries: Sequence[Entry], budget: int) -> list[list[Entry]]:
    """Cut entries of ascending length into batches of at most `budget` padded tokens; an entry that
    is longer is a batch of its own."""
    batches: list[list[Entry]] = []
    for entry in entries:
        if not batches or (len(batches[-1]) + 1) * entry.length > budget:
            batches.append([])
        batches[-1].append(entry)
    return batches
