"""The speculative step, over a target and a drafter that may be anywhere.

One controller drives one target. It is pure logic over two ports: the orchestrator gives it ports
to actors, `adaptivespec generate` gives it ports to workers in its own process. `step` reads top to
bottom as the life of a step; it is meant to be called by one thread, again and again.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from adaptivespec.acceptance import accept
from adaptivespec.config import UNGUARDED, GuardSettings
from adaptivespec.cost import StepWork
from adaptivespec.drafting import Drafting, Fed, Grown, choose_prices, choose_shapes, expect
from adaptivespec.errors import DrafterLost, Overloaded, TargetLost
from adaptivespec.guards import Guards
from adaptivespec.limits import Limits
from adaptivespec.messages import (
    AcceptedPath,
    Chunk,
    Ping,
    Pong,
    TargetCommit,
    TargetOpen,
    UseLink,
    Verified,
    Verify,
)
from adaptivespec.output import OutputStream
from adaptivespec.policy import Policy
from adaptivespec.port import DraftPort, TargetPort
from adaptivespec.request import NOTHING_USED, GenerationRequest, Origin, StepSeconds, Usage
from adaptivespec.sequence import Sequence, Sink
from adaptivespec.shape import NO_DRAFT, Shape
from adaptivespec.signals import Rule
from adaptivespec.step_trace import StepTrace
from adaptivespec.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class _Plan(NamedTuple):
    """Who does what in a step. `shapes` go with `drafting`."""

    drafting: list[Sequence]
    shapes: list[Shape]
    plain: list[Sequence]

    @property
    def batch(self) -> list[Sequence]:
        """All that verify, in the order of the rows."""
        return self.drafting + self.plain


class Controller:
    """Continuous batching of prefill, drafting and verification over all running requests."""

    def __init__(
        self,
        target: TargetPort,
        limits: Limits,
        tokenizer: Tokenizer,
        policy: Policy,
        guards: GuardSettings = UNGUARDED,
        on_drafter_lost: Callable[[str], None] = log.warning,
    ) -> None:
        self.limits = limits
        self.times: deque[StepSeconds] = deque(maxlen=1024)
        self._target = target
        self._drafting: Drafting | None = None
        self._tokenizer = tokenizer
        self._policy = policy
        self._guards = Guards(guards, tokenizer)
        self._ids = count()
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._opened: list[Sequence] = []
        self._closed: list[Sequence] = []
        self._past = NOTHING_USED
        self._trace = StepTrace()
        self._on_drafter_lost = on_drafter_lost

    # -- requests ---------------------------------------------------------------------------------

    def submit(self, request: GenerationRequest, sink: Sink) -> int:
        """Queue a request; its deltas go to `sink` from within `step`. Returns its id. Raises
        Overloaded when the queue is full, RequestError when it can never fit."""
        self.limits.check(request)
        output = OutputStream(
            self._tokenizer,
            stop=request.stop,
            eos=frozenset() if request.ignore_eos else self._tokenizer.eos_ids,
            max_tokens=request.max_tokens,
        )
        sequence = Sequence(
            next(self._ids),
            request,
            output,
            self._policy.signals(Rule.of(request.kappa, request.sampling)),
            len(request.prompt) + request.max_tokens + self.limits.max_nodes,
            sink,
        )
        self._waiting.append(sequence)
        self._admit()
        if len(self._waiting) > self.limits.max_queued:
            self._waiting.pop()
            raise Overloaded(
                f"{len(self._running)} requests are running and {len(self._waiting)} waiting; "
                f"max_running is {self.limits.max_running}, max_queued {self.limits.max_queued}"
            )
        return sequence.id

    def cancel(self, id: int) -> None:
        """Forget a request wherever it stands; unknown ids are ignored."""
        self._waiting = deque(s for s in self._waiting if s.id != id)
        if id in self._running:
            self._finish(self._running[id])

    def fail_all(self, error: Exception) -> None:
        """End every request with `error` and hang up on both sides: the target is gone. Sinks are
        called on the calling thread, as by `step`."""
        self.detach()
        self._target.close()
        self._past = self.totals
        for sequence in [*self._running.values(), *self._waiting]:
            sequence.sink(error)
        self._running.clear()
        self._waiting.clear()

    @property
    def running(self) -> int:
        """Requests being prefilled or decoded."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests not admitted yet."""
        return len(self._waiting)

    @property
    def kv_used(self) -> int:
        """Cache tokens reserved by running requests."""
        return sum(s.capacity for s in self._running.values())

    @property
    def totals(self) -> Usage:
        """Counts over all requests, ended ones and running ones."""
        return sum((s.usage() for s in self._running.values()), self._past)

    def overhead_s(self) -> float | None:
        """Median over recent steps of what is neither drafting nor verifying; None before any."""
        return statistics.median(t.overhead for t in self.times) if self.times else None

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting or self._closed)

    # -- the drafter ------------------------------------------------------------------------------

    def attach(self, drafter: DraftPort, generation: int, needs_states: bool) -> None:
        """Use a drafter over the link of this generation. Running requests are fed to it from
        their first token on; they speculate again once it has caught up."""
        self.detach()
        self._target.post(UseLink(generation))
        try:
            drafter.post(UseLink(generation))
        except DrafterLost as error:
            self._lose_drafter(error)
            return
        self._drafting = Drafting(drafter, needs_states, self.limits.max_state_rows)

    def detach(self) -> None:
        """Go on without the drafter."""
        if self._drafting is not None:
            self._drafting.close()
        self._drafting = None
        for sequence in self._running.values():
            sequence.fed = 0

    def _lose_drafter(self, error: DrafterLost) -> None:
        self.detach()
        self._on_drafter_lost(str(error))

    def ping(self) -> tuple[Pong, Pong | None]:
        """Ask both sides what they hold. Raises TargetLost; a lost drafter is detached."""
        self._target.post(Ping())
        target = expect(Pong, self._target.reply(), TargetLost)
        drafter = None
        if self._drafting is not None:
            try:
                drafter = self._drafting.ping()
            except DrafterLost as error:
                self._lose_drafter(error)
        return target, drafter

    # -- the step ---------------------------------------------------------------------------------

    def step(self) -> None:
        """One pass of everything: admit, settle, draft, verify, accept. Raises TargetLost."""
        started = time.perf_counter()
        self._admit()
        self._trace.begin(self._running.values())
        try:
            fed = self._settle()
            chunks = self._next_chunks()
            plan = self._plan()
            if not plan.batch and not chunks:
                return
            verified, grown = self._draft_and_verify(chunks, plan)
            so_far = StepSeconds.of(
                time.perf_counter() - started,
                fed.seconds + grown.seconds,
                fed.transfer_s + grown.transfer_s,
                verified.forward_s,
            )
            nodes, emitted = self._accept(plan.batch, verified, so_far) if plan.batch else (0, 0)
            self._start(chunks, verified.first_tokens)
        finally:
            self._trace.end()
        total_s = time.perf_counter() - started
        rest = StepSeconds(other=total_s - so_far.total)
        for sequence in plan.batch:
            sequence.tally.seconds += rest
        self.times.append(so_far + rest)
        if not chunks:
            adaptive = [s for s in plan.batch if s.mode == "adaptive"]
            self._policy.stepped(
                StepWork(
                    requests=len(plan.batch),
                    nodes=nodes,
                    tokens=emitted,
                    fed=fed.tokens,
                    feed_s=fed.seconds,
                    growth=grown.growth,
                    draft_s=grown.seconds,
                    verify_s=verified.forward_s,
                    total_s=total_s,
                    adaptive=bool(adaptive),
                    behind=sum(s.behind for s in adaptive if s.id in self._running),
                )
            )

    def _admit(self) -> None:
        """Start waiting requests, in order, while slots and cache tokens last."""
        used = self.kv_used
        while (
            self._waiting
            and len(self._running) < self.limits.max_running
            and used + self._waiting[0].capacity <= self.limits.kv_tokens
        ):
            sequence = self._waiting.popleft()
            used += sequence.capacity
            self._running[sequence.id] = sequence
            self._opened.append(sequence)

    def _settle(self) -> Fed:
        """Tell the target what was accepted, and both sides who came and went; feed the drafter
        what it lacks: new tokens, prompt chunks, or everything after its return."""
        fed = Fed()
        drafting, followed = self._drafting, self._policy.followed
        feeds = drafting.feeds(self._running.values(), followed) if drafting else []
        commit = TargetCommit(
            closed=[s.id for s in self._closed],
            opened=[TargetOpen(s.id, s.capacity, s.request.sampling) for s in self._opened],
            paths=[AcceptedPath(s.id, s.unsettled) for s in self._running.values() if s.unsettled],
            states=[rows for _, rows in feeds] if drafting and drafting.needs_states else [],
        )
        if commit.closed or commit.opened or commit.paths or commit.states:
            self._target.post(commit)
        if drafting is not None:
            try:
                fed = drafting.extend(feeds, [s.id for s in self._closed if s.drafts])
            except DrafterLost as error:
                self._lose_drafter(error)
        for sequence in self._running.values():
            sequence.unsettled = []
        self._opened.clear()
        self._closed.clear()
        return fed

    def _next_chunks(self) -> list[Chunk]:
        """The next prompt tokens of prefilling requests, first come first served."""
        chunks, budget = [], self.limits.prefill_chunk
        for sequence in self._running.values():
            if not sequence.decoding and budget > 0:
                prompt = sequence.request.prompt
                tokens = prompt[sequence.cached : sequence.cached + budget]
                budget -= len(tokens)
                final = sequence.cached + len(tokens) == len(prompt)
                chunks.append(Chunk(sequence.id, tokens, final))
        return chunks

    def _plan(self) -> _Plan:
        """Which requests draft, in what shapes, and which decode plainly in this step."""
        decoding = [s for s in self._running.values() if s.decoding]
        plan = _Plan([], [], [])
        for sequence, shape in zip(decoding, choose_shapes(self._policy, decoding), strict=True):
            self._trace.planned(sequence, shape)
            if shape == NO_DRAFT:
                plan.plain.append(sequence)
            else:
                plan.drafting.append(sequence)
                plan.shapes.append(shape)
        return plan

    def _draft_and_verify(self, chunks: list[Chunk], plan: _Plan) -> tuple[Verified, Grown]:
        """One forward pass of the target. It waits for the trees itself, so a drafter that dies
        here costs its trees and nothing else. Also returns what these took."""
        grown, asked = Grown(), time.perf_counter()
        if plan.drafting and self._drafting is not None:
            traces = self._trace.contexts(plan.drafting)
            prices = choose_prices(self._policy, plan.drafting, len(plan.batch))
            try:
                self._drafting.draft([s.id for s in plan.drafting], plan.shapes, traces, prices)
            except DrafterLost as error:
                self._lose_drafter(error)
        self._target.post(
            Verify(
                requests=[s.id for s in plan.batch],
                roots=[s.tokens[-1] for s in plan.batch],
                drafted=len(plan.drafting) if self._drafting else 0,
                nodes=max((s.nodes for s in plan.shapes), default=1),
                chunks=chunks,
                traces=self._trace.contexts(self._running.values()),
            )
        )
        posted = time.perf_counter()
        verified = expect(Verified, self._target.reply(), TargetLost)
        if plan.drafting and self._drafting is not None:
            try:
                if verified.link_down:
                    raise DrafterLost(verified.link_down)
                grown = self._drafting.drafted(posted - asked + verified.wait_s)
            except DrafterLost as error:
                self._lose_drafter(error)
        return verified, grown

    def _accept(
        self, batch: list[Sequence], verified: Verified, so_far: StepSeconds
    ) -> tuple[int, int]:
        """Apply the margin rule, and hand every request its new tokens. Returns the nodes that were
        verified, and the tokens that came of them."""
        kappas = [s.kappa for s in batch]
        verdict = accept(verified, kappas, self._guards.of_step(batch))
        self._policy.verified(verdict.trees, verdict.path, [s.signals.rule for s in batch])
        for sequence, outcome in zip(batch, verdict.outcomes, strict=True):
            self._trace.accepted(sequence, outcome)
            if sequence.advance(outcome, so_far):
                self._finish(sequence)
        outcomes = verdict.outcomes
        return sum(o.drafted + 1 for o in outcomes), sum(len(o.path) for o in outcomes)

    def _start(self, chunks: list[Chunk], first_tokens: list[int]) -> None:
        """Account for prefilled chunks, and emit the first token of finished prompts."""
        firsts = iter(first_tokens)
        for chunk in chunks:
            sequence = self._running[chunk.request]
            sequence.cached += len(chunk.tokens)
            self._trace.prefilled(sequence, len(chunk.tokens))
            if chunk.final and sequence.emit([next(firsts)], [Origin.TARGET]):
                self._finish(sequence)

    def _finish(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        if sequence in self._opened:  # nobody has heard of it yet
            self._opened.remove(sequence)
        else:
            self._closed.append(sequence)
        self._past += sequence.usage()
