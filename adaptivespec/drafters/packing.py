"""From committed tokens, or a level of trees, to the rows of one forward pass over a KV cache."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from adaptivespec.drafters.growth import Level
from adaptivespec.engine.cache import KVCache
from adaptivespec.models.attention import Segment


class Rows(NamedTuple):
    """tokens and positions int64 [T], cut into segments."""

    tokens: Tensor
    positions: Tensor
    segments: list[Segment]

    @property
    def last(self) -> list[int]:
        """The last row of each segment."""
        return [segment.stop - 1 for segment in self.segments]


def pack_chains(chains: Iterable[tuple[int, list[int]]], cache: KVCache) -> Rows:
    """Tokens to be appended to requests that have no pending rows: (request, tokens) pairs."""
    tokens: list[int] = []
    positions: list[int] = []
    segments = []
    for request, added in chains:
        length, first = cache.length(request), len(tokens)
        tokens += added
        positions += range(length, length + len(added))
        segments.append(Segment(request, first, len(tokens)))
    device = cache.device
    return Rows(
        torch.tensor(tokens, device=device), torch.tensor(positions, device=device), segments
    )


def commit_chains(rows: Rows, cache: KVCache) -> None:
    """Commit what a pass over `pack_chains` has written."""
    for segment in rows.segments:
        cache.commit(segment.request, range(segment.stop - segment.start))


def pack_level(level: Level, cache: KVCache) -> Rows:
    """A level of trees whose root is the last committed row of its request, and whose expanded
    nodes 1, 2, ... are the pending rows; those of a tree that was forgotten are dropped."""
    roots: list[int] = []
    segments = []
    for request, start, size, mask in zip(
        level.requests, level.starts, level.sizes, level.masks, strict=True
    ):
        if start == 1:
            cache.commit(request, ())
        first = len(roots)
        roots += [cache.length(request) - 1] * size
        segments.append(Segment(request, first, len(roots), mask[:, 1:]))
    positions = torch.tensor(roots, device=cache.device) + level.depths
    return Rows(level.tokens, positions, segments)
