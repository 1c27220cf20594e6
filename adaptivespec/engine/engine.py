"""The target engine: prefill, verification, commit and release over one decoder and its cache."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from adaptivespec.errors import ConfigError
from adaptivespec.kernels.packing import pack
from adaptivespec.messages import Chunk, StateRows
from adaptivespec.models.attention import Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.decoder import Decoder, eagle3_layers
from adaptivespec.sampling import SamplingParams, gaps, target_tokens, uniforms
from adaptivespec.tree import DraftTrees

Projector = Callable[[Tensor], Tensor]
Ints = NDArray[np.int64]


class Forwarded(NamedTuple):
    """What one pass says, on the CPU. target int32 [B, N]: the target's own token after every node,
    -1 at padding. gap float32 [B, N]: ln p(node) - ln p(top-1 of its parent), -inf at roots and
    padding. first_tokens: one per final chunk, in their order."""

    target: Tensor
    gap: Tensor
    first_tokens: list[int]


class TargetEngine:
    """Continuous batching on one device: a pass mixes prompt chunks and trees of any requests.

    A request's cache holds every token before the root of its next tree; the root is the last
    committed token, whose keys and values the pass itself computes.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_tokens: int,
        projector: Projector | None = None,
        aux_layers: Sequence[int] | None = None,
    ) -> None:
        """Reserve a cache of `kv_tokens` positions. `projector` maps the inputs of the `aux_layers`
        (an EAGLE-3 head's by default), [T, 3 * H], to the states [T, state_size] that the drafter
        reads; without it no states are kept. Raises ConfigError when a layer does not exist."""
        self._decoder = decoder
        self._projector = projector
        self._aux_layers: tuple[int, ...] = ()
        self.state_size = width = 0
        """Width of the states for a drafter; 0: none."""
        layers = decoder.config.layers
        if projector is not None:
            self._aux_layers = tuple(aux_layers or eagle3_layers(layers))
            if not all(0 <= layer < layers for layer in self._aux_layers):
                raise ConfigError(f"aux layers {self._aux_layers}: the target has {layers} layers")
            width = len(self._aux_layers) * decoder.config.hidden_size
            probe = torch.zeros((1, width), dtype=decoder.dtype, device=decoder.device)
            self.state_size = projector(probe).shape[1]
        # Kept as they are, and projected when a drafter asks: what it never asks for, of a request
        # that decodes plainly, is not worth a product in every pass.
        self._cache = decoder.new_cache(kv_tokens, width)
        self._sampling: dict[int, SamplingParams] = {}

    @property
    def config(self) -> DecoderConfig:
        """The target's architecture."""
        return self._decoder.config

    @property
    def requests(self) -> int:
        """Open requests."""
        return len(self._sampling)

    @property
    def used(self) -> int:
        """Cache positions reserved by open requests."""
        return self._cache.used

    def open(self, request: int, capacity: int, sampling: SamplingParams) -> None:
        """Reserve `capacity` cache positions: prompt, output and the tree under verification.
        Raises CacheFull, or ValueError if `request` is open."""
        self._cache.open(request, capacity)
        self._sampling[request] = sampling

    def close(self, request: int) -> None:
        """Release a request; unknown ones are ignored."""
        self._cache.close(request)
        self._sampling.pop(request, None)

    def length(self, request: int) -> int:
        """Committed positions of a request."""
        return self._cache.length(request)

    def commit(self, request: int, path: Sequence[int]) -> None:
        """Keep the nodes `path` of the request's last tree (root first, each the child of the one
        before) and drop the others."""
        self._cache.commit(request, path)

    def states(self, rows: Sequence[StateRows]) -> Tensor:
        """Projected states [sum of stop - start, state_size] of committed positions."""
        assert self._projector is not None
        kept = [self._cache.states(each.request, each.start, each.stop) for each in rows]
        return self._projector(torch.cat(kept))

    @torch.inference_mode()
    def forward(
        self, chunks: Sequence[Chunk], requests: Sequence[int], trees: DraftTrees
    ) -> Forwarded:
        """Run prompt chunks and the trees [B, N] of `requests` in one pass; chunks are committed at
        once, trees wait for `commit` (the request's next pass drops a tree that never got one).
        Raises KeyError for an unknown request, ValueError when a capacity is exceeded."""
        for request in (*requests, *(chunk.request for chunk in chunks)):
            if self._cache.pending(request):
                self._cache.commit(request, ())
        nodes, parents = trees.tokens.cpu().numpy(), trees.parents.cpu().numpy()
        starts = np.array([self._cache.length(r) for r in requests], dtype=np.int64)
        rows, sizes = np.empty((3, nodes.size), np.int64), np.empty(len(requests), np.int64)
        visible = np.empty((*nodes.shape, nodes.shape[1]), np.bool_)
        verified = pack(nodes, parents, starts, rows, sizes, visible)
        tokens, positions, above = rows[:, :verified]
        segments, owners, first = [], [], 0
        for request, size, mask in zip(requests, sizes.tolist(), visible, strict=True):
            seen = torch.from_numpy(mask[:size, :size]) if size > 1 else None
            segments.append(Segment(request, first, first + size, seen))
            owners += [request] * size
            first += size
        wanted = list(range(verified))
        for chunk in chunks:
            start, length = self._cache.length(chunk.request), len(chunk.tokens)
            segments.append(Segment(chunk.request, first, first + length))
            first += length
            tokens = np.concatenate([tokens, np.array(chunk.tokens, np.int64)])
            positions = np.concatenate([positions, np.arange(start, start + length)])
            if chunk.final:
                wanted.append(first - 1)
                owners.append(chunk.request)

        target = np.full(nodes.shape, -1, np.int32)
        gap = np.full(nodes.shape, -np.inf, np.float32)
        first_tokens: list[int] = []
        if first:
            hidden = self._run(tokens, positions, segments)
            for chunk in chunks:
                self._cache.commit(chunk.request, range(len(chunk.tokens)))
            parents = np.append(above, np.full(len(wanted) - verified, -1))
            chosen, ratio = self._choose(hidden, wanted, tokens, positions, parents, owners)
            real = nodes >= 0
            target[real], gap[real] = chosen[:verified], ratio[:verified]
            first_tokens = chosen[verified:].tolist()
        return Forwarded(torch.from_numpy(target), torch.from_numpy(gap), first_tokens)

    def _run(self, tokens: Ints, positions: Ints, segments: Sequence[Segment]) -> Tensor:
        """Final hidden states [T, H] of a packed batch; what a drafter may read of the others goes
        to the cache."""
        device = self._decoder.device
        hidden = self._decoder.forward(
            torch.from_numpy(tokens).to(device),
            torch.from_numpy(positions).to(device),
            self._cache,
            segments,
            self._aux_layers,
        )
        if hidden.aux is not None:
            self._cache.write_states(hidden.slots, hidden.aux)
        return hidden.final

    def _choose(
        self,
        hidden: Tensor,
        wanted: list[int],
        tokens: Ints,
        positions: Ints,
        parents: Ints,
        owners: list[int],
    ) -> tuple[Ints, NDArray[np.float32]]:
        """The target's tokens [R] after the rows `wanted` of `hidden` [T, H], which are at
        `positions` [T] of their requests `owners` [R], and the gaps [R] of these rows' `tokens`
        [T]. The logits stay on the device."""
        if not wanted:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        device = hidden.device
        rows = hidden if len(wanted) == len(hidden) else hidden[torch.tensor(wanted, device=device)]
        logits = self._decoder.logits(rows)
        asked = (torch.from_numpy(each).to(device) for each in (tokens[wanted], parents))
        gap, argmax = gaps(logits, *asked)
        params = [self._sampling[request] for request in owners]
        chosen = target_tokens(logits, params, _draws(positions[wanted] + 1, params), argmax)
        return chosen.cpu().numpy(), gap.cpu().numpy()


def _draws(positions: Ints, params: Sequence[SamplingParams]) -> Tensor:
    """The uniform draws float64 [R] for tokens at `positions` [R]; greedy ones need none."""
    draws = np.zeros(len(positions))
    for i, sampling in enumerate(params):
        if not sampling.greedy:
            draws[i] = uniforms(sampling.seed, int(positions[i]), 1)[0]
    return torch.from_numpy(draws)
