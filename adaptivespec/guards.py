"""What limits the margin rule beside kappa: caps on promotions, and tokens it never touches."""

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from adaptivespec.config import LARGEST, UNGUARDED, GuardSettings, TokenClass
from adaptivespec.drafting import DraftedSequence
from adaptivespec.margin import promote
from adaptivespec.tokenizer import Tokenizer

_ANY = LARGEST.nodes  # promotions: more than a step can have
_CPU = torch.device("cpu")


def _is_operator(character: str) -> bool:
    return character in "+-*/%=<>^" or unicodedata.category(character) == "Sm"


_CLASSES: Mapping[TokenClass, Callable[[str], bool]] = {
    "digits": str.isdigit,
    "operators": _is_operator,
}
_BITS: Mapping[TokenClass, int] = {name: 1 << i for i, name in enumerate(_CLASSES)}


def class_bits(classes: Iterable[TokenClass]) -> int:
    """A set of classes as a number: a bit for each."""
    return sum(_BITS[name] for name in set(classes))


@lru_cache(maxsize=1)
def token_classes(tokenizer: Tokenizer) -> Tensor:
    """uint8 [vocab_size + 1], as `class_bits`: the classes of which a token has a character. The
    last entry, none, stands for ids beyond the vocabulary."""

    def classes(text: str) -> int:
        return class_bits(name for name, test in _CLASSES.items() if any(map(test, text)))

    spelt = (tokenizer.token_bytes(i).decode(errors="ignore") for i in range(tokenizer.vocab_size))
    return torch.tensor([*map(classes, spelt), 0], dtype=torch.uint8)


class StepGuards(NamedTuple):
    """The guards of one step, on the device of its trees; None where nothing is limited.

    caps     int64 [B]: promotions that each sequence may have
    never    uint8 [B]: classes, as `class_bits`, that it has none in
    classes  uint8 [V + 1]: the classes of each token
    """

    caps: Tensor | None = None
    never: Tensor | None = None
    classes: Tensor | None = None

    def promote(
        self, tokens: Tensor, parents: Tensor, target: Tensor, gap: Tensor, kappa: Tensor
    ) -> tuple[Tensor, Tensor]:
        """`margin.promote` within the guards."""
        gap = self.allowed(tokens, parents, target, gap)
        return promote(tokens, parents, target, gap, kappa, self.caps)

    def allowed(self, tokens: Tensor, parents: Tensor, target: Tensor, gap: Tensor) -> Tensor:
        """`gap`, -inf where the guards forbid a node to be promoted."""
        if self.never is None:
            return gap
        replaced = target.gather(-1, parents.clamp_min(0).long())
        touched = (self._classes(tokens) | self._classes(replaced)) & self.never[:, None]
        return torch.where(touched != 0, -torch.inf, gap)

    def _classes(self, tokens: Tensor) -> Tensor:
        assert self.classes is not None
        beyond = len(self.classes) - 1
        return self.classes[torch.where((tokens >= 0) & (tokens < beyond), tokens, beyond).long()]


NO_STEP_GUARDS = StepGuards()


class Guards:
    """The limits of one engine. They hold for every request, beside those that it has of its own:
    what a request asks for can tighten them, and never loosen."""

    def __init__(self, own: GuardSettings, tokenizer: Tokenizer) -> None:
        self._own = own.guards
        self._classes = token_classes(tokenizer)  # now: it takes a step's time and more

    def of_step(
        self, sequences: Sequence[DraftedSequence], device: torch.device = _CPU
    ) -> StepGuards:
        """What they leave to each of these in its next step."""
        if self._own == UNGUARDED and all(s.guards == UNGUARDED for s in sequences):
            return NO_STEP_GUARDS
        self._classes = self._classes.to(device)
        caps = [min(_cap(self._own, s), _cap(s.guards, s)) for s in sequences]
        own = class_bits(self._own.never_promote)
        never = [own | class_bits(s.guards.never_promote) for s in sequences]
        return StepGuards(
            torch.tensor(caps, device=device) if min(caps) < _ANY else None,
            torch.tensor(never, dtype=torch.uint8, device=device) if any(never) else None,
            self._classes,
        )


def _cap(guards: GuardSettings, sequence: DraftedSequence) -> int:
    """How many promotions the sequence may have in its next step."""
    per_step, per_window = guards.max_promotions, guards.max_promotions_per_window
    cap = _ANY if per_step is None else per_step
    if per_window is not None:
        # Any window that ends in this step reaches back no further than one less than its size.
        start = len(sequence.tokens) - (guards.promotion_window - 1)
        cap = min(cap, per_window - sum(place >= start for place in sequence.promotions))
    return cap
