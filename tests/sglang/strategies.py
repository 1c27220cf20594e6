"""Random draft trees, and KV pools with requests in them."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

POOL_LEN = 40

seeds = st.integers(0, 2**16).map(lambda seed: torch.Generator().manual_seed(seed))


@st.composite
def parents(draw: st.DrawFn, nodes: int) -> list[int]:
    """The parents of nodes 1 to `nodes` - 1, each before its children."""
    return [draw(st.integers(0, i)) for i in range(nodes - 1)]


@st.composite
def tree_batches(draw: st.DrawFn) -> Tensor:
    """[bs, n, n] bool: whether a node is itself or an ancestor of another, in random trees."""
    n = draw(st.integers(1, 9))
    batch = draw(st.lists(parents(n), min_size=1, max_size=3))
    masks = torch.eye(n, dtype=torch.bool).repeat(len(batch), 1, 1)
    for mask, tree in zip(masks, batch, strict=True):
        for i, parent in enumerate(tree, start=1):
            mask[i] |= mask[parent]
    return masks


class Pool:
    """A random KV pool with requests in it. start and end [bs] are positions in the requests."""

    def __init__(self, bs: int, generator: torch.Generator) -> None:
        slots = torch.randperm((bs + 2) * POOL_LEN, generator=generator)
        self.req_to_token = slots.view(bs + 2, POOL_LEN).int()
        self.rows = torch.randperm(bs + 2, generator=generator)[:bs]
        self.start = torch.randint(0, 20, (bs,), generator=generator)
        self.end = self.start + torch.randint(0, 20, (bs,), generator=generator)

    def spans(self) -> dict[str, Any]:
        return {
            "req_pool_indices": self.rows,
            "start_offset": self.start,
            "end_offset": self.end,
            "pool_len": POOL_LEN,
        }
