"""The tensor plane between one drafter and one target: its contract, and the in-process twin."""

from collections import deque
from typing import Protocol

from torch import Tensor

from adaptivespec.errors import LinkDown
from adaptivespec.tree import DraftTrees


class Link(Protocol):
    """One end of a two-ended tensor link. Each side knows from its control frames what comes next
    and how large it is, so nothing but the tensors travels. A lost or silent peer raises `LinkDown`
    within the link's timeout; after that the link is unusable and must be closed and rebuilt."""

    def send_trees(self, trees: DraftTrees) -> None:
        """Draft side: send a batch of trees [B, N]."""

    def recv_trees(self, rows: int, nodes: int) -> DraftTrees:
        """Target side: receive a batch of exactly [rows, nodes], on this side's device."""

    def send_states(self, states: Tensor) -> None:
        """Target side: send projected hidden states [rows, hidden] of the link's dtype."""

    def recv_states(self, rows: int) -> Tensor:
        """Draft side: receive [rows, hidden], on this side's device."""

    def close(self) -> None:
        """Release sockets and buffers; idempotent. The peer's pending calls raise `LinkDown`."""


class InProcessLink:
    """Both ends of a link within one thread: what is sent is queued until it is received."""

    def __init__(self) -> None:
        self._trees: deque[DraftTrees] = deque()
        self._states: deque[Tensor] = deque()
        self._closed = False

    def _check(self) -> None:
        if self._closed:
            raise LinkDown("the in-process link is closed")

    def send_trees(self, trees: DraftTrees) -> None:
        self._check()
        self._trees.append(trees)

    def recv_trees(self, rows: int, nodes: int) -> DraftTrees:
        self._check()
        if not self._trees:
            raise LinkDown("no trees were sent")
        trees = self._trees.popleft()
        if trees.tokens.shape != (rows, nodes):
            raise LinkDown(f"expected trees {(rows, nodes)}, got {tuple(trees.tokens.shape)}")
        return trees

    def send_states(self, states: Tensor) -> None:
        self._check()
        self._states.append(states.clone())

    def recv_states(self, rows: int) -> Tensor:
        self._check()
        if not self._states:
            raise LinkDown("no states were sent")
        states = self._states.popleft()
        if len(states) != rows:
            raise LinkDown(f"expected {rows} state rows, got {len(states)}")
        return states

    def close(self) -> None:
        self._closed = True
        self._trees.clear()
        self._states.clear()
