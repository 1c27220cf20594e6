"""The contract of a drafter."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from adaptivespec.pricing import Growth, Prices
from adaptivespec.shape import Shape
from adaptivespec.tree import DraftTrees


class Extension(NamedTuple):
    """Tokens that the target has committed to a request since the drafter last heard of it."""

    request: int
    tokens: list[int]


class Drafter(Protocol):
    """Proposes trees for many requests at once. It keeps, per request, the committed tokens (and a
    cache of what it computed for them) and a persistent tree below the last one, which a commit
    re-roots. It is never needed for correctness: any exception makes the caller rebuild it.
    """

    state_size: int
    """Width of the target's projected hidden state that `commit` needs per token; 0: none."""

    def open(self, request: int, token: int, capacity: int) -> None:
        """Start a request whose first token is `token`; at most `capacity` tokens will be held,
        committed and drafted together. Raises ValueError if `request` is already open."""

    def commit(self, extensions: Sequence[Extension], states: Tensor | None) -> Tensor:
        """Append committed tokens, any number per request: a whole prompt, a chunk of it, or what a
        step accepted with its bonus token. `states` [sum of tokens, state_size] are the target's
        projected hidden states, concatenated in the order of `extensions`; row i belongs to the
        position *before* token i (the state that predicted it). None when state_size is 0.
        Returns float32 [len(extensions)] on the CPU: the drafter's probability of its own top-1
        next token after the commit (0: nothing to propose). Raises KeyError: unknown request."""

    @property
    def growth(self) -> Growth:
        """What the last `draft` took."""

    def draft(
        self, requests: Sequence[int], shapes: Sequence[Shape], prices: Prices | None = None
    ) -> DraftTrees:
        """Grow one tree per request, rooted at its last committed token, of at most the given
        shape: the best nodes - 1 candidates by cumulative log-probability over all levels, plus the
        root. With `prices`, by worth, without what is not worth its price. Rows follow `requests`;
        padded to N = max(shape.nodes); siblings come best first."""

    def close(self, request: int) -> None:
        """Forget a request; unknown ones are ignored."""
