"""The standalone drafter: trees from a small language model with the target's vocabulary."""

from collections.abc import Sequence

from torch import Tensor

from adaptivespec.drafters.base import Extension
from adaptivespec.drafters.growth import GrowingTrees, Level, best_children
from adaptivespec.drafters.packing import Rows, commit_chains, pack_chains, pack_level
from adaptivespec.models.decoder import Decoder
from adaptivespec.pricing import Growth, Prices
from adaptivespec.shape import Shape
from adaptivespec.tree import DraftTrees


class LMDrafter:
    """A `Drafter` around a `Decoder`.

    Expanded nodes are the cache's pending rows. A commit keeps the rows of tokens that were
    expanded, and of what lies below the last one, so that nothing is computed twice.
    """

    state_size = 0

    def __init__(self, model: Decoder, kv_tokens: int, max_running: int, largest: Shape) -> None:
        """Room for `max_running` requests whose capacities add up to `kv_tokens`, and for trees up
        to the shape `largest`."""
        self._model = model
        self._trees = GrowingTrees(largest, max_running, model.device)
        self._cache = model.new_cache(kv_tokens + max_running * self._trees.rows)
        self._unseen: dict[int, list[int]] = {}  # committed tokens that the model has yet to see

    def open(self, request: int, token: int, capacity: int) -> None:
        self._trees.open(request, token)
        self._cache.open(request, capacity + self._trees.rows)
        self._unseen[request] = [token]

    def close(self, request: int) -> None:
        self._trees.close(request)
        self._cache.close(request)
        self._unseen.pop(request, None)

    def commit(self, extensions: Sequence[Extension], states: Tensor | None) -> Tensor:
        requests = [extension.request for extension in extensions]
        advances = self._trees.advance(requests, [extension.tokens for extension in extensions])
        for (request, tokens), advance in zip(extensions, advances, strict=True):
            self._cache.commit(
                request, [row - 1 for row in advance.path], [row - 1 for row in advance.below]
            )
            self._unseen[request] += tokens[len(advance.path) :]
        self._catch_up(requests)
        return self._trees.confidence(requests)

    @property
    def growth(self) -> Growth:
        return self._trees.growth

    def draft(
        self, requests: Sequence[int], shapes: Sequence[Shape], prices: Prices | None = None
    ) -> DraftTrees:
        self._catch_up(requests)
        return self._trees.draft(requests, shapes, self._expand, prices)

    def _catch_up(self, requests: Sequence[int]) -> None:
        """Run the model over what it has yet to see, and plant the trees anew there."""
        behind = [request for request in requests if self._unseen[request]]
        if not behind:
            return
        rows = pack_chains([(request, self._unseen[request]) for request in behind], self._cache)
        hidden = self._forward(rows)
        commit_chains(rows, self._cache)
        roots = [self._unseen[request][-1] for request in behind]
        self._trees.plant(behind, roots, *self._best(hidden[rows.last]))
        for request in behind:
            self._unseen[request] = []

    def _expand(self, level: Level) -> tuple[Tensor, Tensor]:
        return self._best(self._forward(pack_level(level, self._cache)))

    def _forward(self, rows: Rows) -> Tensor:
        return self._model.forward(rows.tokens, rows.positions, self._cache, rows.segments).final

    def _best(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return best_children(self._model.logits(hidden), self._trees.width)
