"""Prompt lookup: drafts the continuations of earlier occurrences of the last n tokens. No model.

The committed text itself is the language model. A request's tree is the trie of what followed the
newest earlier occurrences of its suffix, and the probabilities are smoothed counts over it:

    p(child | node) = w(child) / (w(node) + 1)

where w sums the weights of the occurrences that pass through a node. The 1 is the escape mass of
PPM's method A (Cleary & Witten 1984): one occurrence is worth 1/2, ten that agree 10/11. Matches
that are k tokens shorter than `max_ngram` weigh 0.4^k ("stupid backoff", Brants et al. 2007), so
that a long match outranks several short ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from adaptivespec.appraisal import affordable
from adaptivespec.drafters.base import Extension
from adaptivespec.pricing import Growth, Prices
from adaptivespec.shape import Shape
from adaptivespec.tree import DraftTrees

BACKOFF = 0.4
"""Weight of an occurrence per token that its match is shorter than `max_ngram`."""

OCCURRENCES = 16
"""Occurrences merged into one tree, longest match and newest first; bounds a step's cost."""

Occurrence = tuple[int, float]
"""Position of a continuation's first token, and its weight."""


@dataclass(slots=True)
class _Text:
    """A request's committed tokens, and where each of its n-grams has been followed by more."""

    tokens: list[int] = field(default_factory=list)
    followers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    matches: list[Occurrence] = field(default_factory=list)


@dataclass(slots=True)
class _Node:
    """A node of the tree being grown. `parent` is the creation index, 0 the root's."""

    token: int
    parent: int
    logprob: float
    total: float  # log-probability of the path
    matches: list[Occurrence]  # the occurrences that pass through, at the next token's position


class LookupDrafter:
    """A `Drafter` that needs no states and no device."""

    state_size = 0
    growth = Growth()

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"need 1 <= min_ngram <= max_ngram, got {min_ngram}, {max_ngram}")
        self._orders = range(max_ngram, min_ngram - 1, -1)
        self._weights = {n: BACKOFF ** (max_ngram - n) for n in self._orders}
        self._texts: dict[int, _Text] = {}

    def open(self, request: int, token: int, capacity: int) -> None:
        if request in self._texts:
            raise ValueError(f"request {request} is already open")
        text = self._texts[request] = _Text()
        self._append(text, token)

    def commit(self, extensions: Sequence[Extension], states: Tensor | None) -> Tensor:
        return torch.tensor([self._extend(*extension) for extension in extensions])

    def draft(
        self, requests: Sequence[int], shapes: Sequence[Shape], prices: Prices | None = None
    ) -> DraftTrees:
        grown = [
            self._grow(self._texts[r], shape) for r, shape in zip(requests, shapes, strict=True)
        ]
        nodes = max((shape.nodes for shape in shapes), default=1)
        padding = _Node(-1, 0, -math.inf, -math.inf, [])
        rows = [tree + [padding] * (nodes - len(tree)) for tree in grown]
        trees = DraftTrees(
            torch.tensor([[n.token for n in row] for row in rows], dtype=torch.int32),
            torch.tensor([[n.parent for n in row] for row in rows], dtype=torch.int32),
            torch.tensor([[n.logprob for n in row] for row in rows], dtype=torch.float32),
        )
        if prices is None:
            return trees
        return affordable(trees, prices, [shape.nodes for shape in shapes])

    def close(self, request: int) -> None:
        self._texts.pop(request, None)

    def _append(self, text: _Text, token: int) -> None:
        text.tokens.append(token)
        end = len(text.tokens)
        for n in self._orders:
            if n <= end:
                text.followers.setdefault(tuple(text.tokens[end - n :]), []).append(end)

    def _extend(self, request: int, tokens: list[int]) -> float:
        """Append `tokens` and find the new suffix's occurrences; the top-1 next token's
        probability."""
        text = self._texts[request]
        for token in tokens:
            self._append(text, token)
        text.matches = self._find(text)
        children = _branch(text.tokens, text.matches)
        best = max((_weight(matches) for matches in children.values()), default=0.0)
        return best / (_weight(text.matches) + 1)

    def _find(self, text: _Text) -> list[Occurrence]:
        """The newest earlier occurrences of the suffix, longest matches first."""
        end = len(text.tokens)
        found: dict[int, float] = {}
        for n in self._orders:
            if n > end:
                continue
            # The last follower is the suffix itself, which nothing follows yet.
            earlier = text.followers[tuple(text.tokens[end - n :])][-2 : -2 - OCCURRENCES : -1]
            for position in earlier:
                if len(found) == OCCURRENCES:
                    return list(found.items())
                found.setdefault(position, self._weights[n])
        return list(found.items())

    def _grow(self, text: _Text, shape: Shape) -> list[_Node]:
        """The tree of one request: root first, parents before children."""
        tokens, width = text.tokens, shape.width
        grown = [_Node(tokens[-1], -1, 0.0, 0.0, text.matches)]
        frontier = [0]
        for _ in range(shape.depth):
            first = len(grown)
            for parent in frontier:
                node = grown[parent]
                scale = math.log(_weight(node.matches) + 1)
                children = [
                    (math.log(_weight(matches)) - scale, token, matches)
                    for token, matches in _branch(tokens, node.matches).items()
                ]
                children.sort(key=lambda child: -child[0])  # stable: newest first among equals
                for logprob, token, matches in children[:width]:
                    onward = [(position + 1, weight) for position, weight in matches]
                    grown.append(_Node(token, parent, logprob, node.total + logprob, onward))
            by_total = sorted(range(first, len(grown)), key=lambda i: -grown[i].total)
            frontier = by_total[:width]
            if not frontier:
                break
        return _prune(grown, shape.nodes)


def _weight(matches: list[Occurrence]) -> float:
    return sum(weight for _, weight in matches)


def _branch(tokens: list[int], matches: list[Occurrence]) -> dict[int, list[Occurrence]]:
    """Group occurrences by the token at their position; those at the end of the text drop out."""
    children: dict[int, list[Occurrence]] = {}
    for match in matches:
        if match[0] < len(tokens):
            children.setdefault(tokens[match[0]], []).append(match)
    return children


def _prune(grown: list[_Node], nodes: int) -> list[_Node]:
    """The best `nodes` by path probability, in their order. A path's probability falls with every
    token, and the sort is stable, so the ancestors of a kept node are kept."""
    kept = sorted(sorted(range(len(grown)), key=lambda i: -grown[i].total)[:nodes])
    place = {old: new for new, old in enumerate(kept)}
    place[-1] = -1
    for old in kept:
        grown[old].parent = place[grown[old].parent]
    return [grown[old] for old in kept]
