"""What limits the margin rule beside kappa: caps on promotions, and tokens it never touches."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from adaptivespec.config import Settings, TokenClass
from adaptivespec.drafting import DraftedSequence
from adaptivespec.tokenizer import Tokenizer


def _is_operator(character: str) -> bool:
    return character in "+-*/%=<>^" or unicodedata.category(character) == "Sm"


_CLASSES: Mapping[TokenClass, Callable[[str], bool]] = {
    "digits": str.isdigit,
    "operators": _is_operator,
}


def token_mask(tokenizer: Tokenizer, classes: Sequence[TokenClass]) -> Tensor:
    """bool [vocab_size + 1]: tokens with a character of one of the classes. The last entry, False,
    stands for ids beyond the vocabulary."""
    spelt = [tokenizer.token_bytes(i).decode(errors="ignore") for i in range(tokenizer.vocab_size)]
    tests = [_CLASSES[name] for name in classes]
    inside = [any(test(c) for c in text for test in tests) for text in spelt]
    return torch.tensor([*inside, False])


class Guards:
    """The limits of one engine; none of them by default."""

    def __init__(
        self,
        per_step: int | None = None,
        per_window: int | None = None,
        window: int = 64,
        never: Tensor | None = None,
    ) -> None:
        """At most `per_step` promotions in a step, and `per_window` in any `window` consecutive
        tokens of an answer; none that involves a token of the mask `never`."""
        self._per_step = per_step
        self._per_window = per_window
        self._window = window
        self._never = never

    @classmethod
    def of(cls, settings: Settings, tokenizer: Callable[[], Tokenizer]) -> "Guards":
        """Those that the settings ask for; a tokenizer is needed for classes of tokens only."""
        classes = settings.never_promote
        return cls(
            settings.max_promotions,
            settings.max_promotions_per_window,
            settings.promotion_window,
            token_mask(tokenizer(), classes) if classes else None,
        )

    def caps(self, sequences: Sequence[DraftedSequence]) -> list[int] | None:
        """How many promotions each may have in its next step; None: any number."""
        if self._per_window is None:
            return None if self._per_step is None else [self._per_step] * len(sequences)
        caps = []
        for sequence in sequences:
            # Any window that ends in this step reaches back no further than one less than its size.
            start = len(sequence.tokens) - (self._window - 1)
            left = self._per_window - sum(place >= start for place in sequence.promotions)
            caps.append(left if self._per_step is None else min(left, self._per_step))
        return caps

    def forbid(self, gap: Tensor, tokens: Tensor, parents: Tensor, target: Tensor) -> Tensor:
        """`gap` as `margin.promote` reads it, -inf at children that must not take the place of
        their parent's own token. All [B, N], as there."""
        if self._never is None:
            return gap
        never = self._never.to(gap.device)
        replaced = target.gather(-1, parents.clamp_min(0).long())
        touched = never[_known(tokens, never)] | never[_known(replaced, never)]
        return torch.where(touched, -torch.inf, gap)


def _known(tokens: Tensor, mask: Tensor) -> Tensor:
    beyond = len(mask) - 1
    return torch.where((tokens >= 0) & (tokens < beyond), tokens, beyond).long()


NO_GUARDS = Guards()
