"""Recorded conversations of random numbers."""

from collections.abc import Sequence

import torch

from adaptivespec.training.corpus import Conversation


def conversation(
    prompt: Sequence[int], answer: Sequence[int], hidden: int, *, number: int = 0
) -> Conversation:
    """A conversation of these tokens, with random states of size `hidden`; zero at its end, as the
    last token was never fed."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.tensor([*prompt, *answer], dtype=torch.int32)
    aux = torch.randn(len(tokens), 3 * hidden, generator=generator)
    final = torch.randn(len(tokens), hidden, generator=generator)
    aux[-1], final[-1] = 0, 0
    return Conversation(number, tokens, len(prompt), aux, final)


def random_conversation(
    prompt: int, answer: int, hidden: int, vocabulary: int, *, number: int = 0
) -> Conversation:
    """One of random tokens, `prompt` and `answer` many."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(vocabulary, (prompt + answer,), generator=generator).tolist()
    return conversation(tokens[:prompt], tokens[prompt:], hidden, number=number)
