"""Where a batch's trees come from: the remote drafter, or, while there is none, roots alone."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from adaptivespec.drafting import Fed, Grown, choose_prices, choose_shapes
from adaptivespec.errors import DrafterLost, LinkDown
from adaptivespec.policy import Policy
from adaptivespec.sglang.remote import RemoteDrafter
from adaptivespec.sglang.requests import Requests, ServedSequence
from adaptivespec.sglang.states import StatePool
from adaptivespec.shape import NO_DRAFT, Shape
from adaptivespec.step_trace import StepTrace
from adaptivespec.tree import DraftTrees, pad, roots, trim


class TreeSource:
    """Feeds the drafter and asks it for trees. A drafter that is lost here costs its trees and
    nothing else; the next one is fed every running request from its first token on."""

    def __init__(
        self,
        remote: RemoteDrafter,
        requests: Requests,
        policy: Policy,
        states: StatePool | None,
        trace: StepTrace,
        device: torch.device,
    ) -> None:
        self._remote = remote
        self._requests = requests
        self._policy = policy
        self._states = states
        self._trace = trace
        self._device = device

    def feed(self, sequences: Sequence[ServedSequence], slots: Tensor) -> Fed:
        """Give the drafter what it lacks of these. `slots` is SGLang's table from (request,
        position) to KV slot."""
        remote = self._remote
        if remote.adopt():
            self._requests.unfed()
        if remote.drafting is None or remote.link is None:
            return Fed()
        try:
            held = self._requests.hold(sequences)
            feeds = remote.drafting.feeds(held, self._policy.followed)
            started = time.perf_counter()
            if self._states is not None and feeds:
                remote.link.send_states(self._states.read(feeds, slots))
            sent_s = time.perf_counter() - started
            fed = remote.drafting.extend(feeds, self._requests.take_closed())
            return fed._replace(transfer_s=fed.transfer_s + sent_s)
        except (DrafterLost, LinkDown) as error:
            self._lose(error)
            return Fed()

    def draft(self, sequences: Sequence[ServedSequence]) -> tuple[DraftTrees, Grown]:
        """One tree per sequence, in their order, its root alone where none is drafted; and what
        they took."""
        shapes = choose_shapes(self._policy, sequences)
        for sequence, shape in zip(sequences, shapes, strict=True):
            self._trace.planned(sequence, shape)
        drafting = [i for i, shape in enumerate(shapes) if shape != NO_DRAFT]
        lone = roots([sequence.tokens[-1] for sequence in sequences], self._device)
        try:
            trees, grown = self._drafted(
                [sequences[i] for i in drafting], [shapes[i] for i in drafting], len(sequences)
            )
        except (DrafterLost, LinkDown) as error:
            self._lose(error)
            return lone, Grown()
        if trees is None:
            return lone, grown
        # Row i of the batch is the drafted tree of i, or else its root.
        at = {i: row for row, i in enumerate(drafting)}
        rows = [at.get(i, len(drafting) + i) for i in range(len(sequences))]
        return pad(trees, lone).rows(torch.tensor(rows, device=self._device)), grown

    def _drafted(
        self, asked: list[ServedSequence], shapes: list[Shape], running: int
    ) -> tuple[DraftTrees | None, Grown]:
        remote = self._remote
        if not asked or remote.drafting is None or remote.link is None:
            return None, Grown()
        prices = choose_prices(self._policy, asked, running)
        traces = self._trace.contexts(asked)
        started = time.perf_counter()
        remote.drafting.draft([s.id for s in asked], shapes, traces, prices)
        trees = remote.link.recv_trees(len(asked), max(shape.nodes for shape in shapes))
        grown = remote.drafting.drafted(time.perf_counter() - started)
        if prices is not None:  # they may have ended any tree early; padding is not free here
            trees = trim(trees)
        return trees.to(self._device), grown

    def idle(self) -> None:
        """No step may follow soon: have the drafter forget what has ended."""
        if self._remote.drafting is not None:
            try:
                self._remote.drafting.extend([], self._requests.take_closed())
            except DrafterLost as error:
                self._lose(error)

    def _lose(self, error: DrafterLost | LinkDown) -> None:
        self._remote.lose(error)
        self._requests.unfed()
