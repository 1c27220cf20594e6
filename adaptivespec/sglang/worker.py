"""The speculative worker in SGLang's scheduler: one step of the method for one of its batches.

SGLang decides which requests run; here, every decode batch becomes trees from the remote drafter,
one TARGET_VERIFY pass, the margin rule and SGLang's own walk. Under tensor parallelism every rank
runs this; rank 0 alone talks to the drafter, and the others get its trees and choices by broadcast.
"""

import time
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.ngram_info import NgramVerifyInput
from sglang.srt.speculative.spec_utils import move_accept_tokens_to_target_kvcache
from torch import Tensor

from adaptivespec import tracing
from adaptivespec.acceptance import Acceptance, outcomes
from adaptivespec.cost import StepWork
from adaptivespec.drafting import Fed, Grown
from adaptivespec.guards import Guards
from adaptivespec.policy import make_policy
from adaptivespec.request import StepSeconds
from adaptivespec.sglang.counts import Counts
from adaptivespec.sglang.graphs import WidthBuckets, bucket_widths
from adaptivespec.sglang.launch import published
from adaptivespec.sglang.messages import Hello, State
from adaptivespec.sglang.owner import answer_owner
from adaptivespec.sglang.ranks import Ranks
from adaptivespec.sglang.records import record_prefill, record_step
from adaptivespec.sglang.remote import RemoteDrafter
from adaptivespec.sglang.requests import Requests, ServedSequence
from adaptivespec.sglang.states import StatePool, capture, head_projector
from adaptivespec.sglang.tree_source import TreeSource
from adaptivespec.sglang.verify import Walked, choose, nothing_carried, prepare, walk
from adaptivespec.step_trace import StepTrace
from adaptivespec.tokenizer import load_tokenizer
from adaptivespec.tree import DraftTrees, roots, widen

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tp_worker import TpModelWorker
    from sglang.srt.server_args import ServerArgs


class AdaptiveSpecWorker(BaseSpecWorker):
    """SGLang's contract of a speculative worker, without a draft model of its own."""

    def __init__(
        self,
        server_args: "ServerArgs",
        gpu_id: int,
        nccl_port: int,
        target_worker: "TpModelWorker",
    ) -> None:
        super().__init__()
        self._target_worker = target_worker
        self._draft_worker = None
        self._config = published()
        self._settings = settings = self._config.settings
        runner = target_worker.model_runner
        device = runner.device
        self._device = torch.device(device, gpu_id) if device == "cuda" else torch.device(device)
        self._ranks = Ranks(get_parallel().tp_group)
        self._policy = make_policy(settings.policy)
        self._guards = Guards(settings, load_tokenizer(settings.model.path))
        self._requests = Requests(settings, self._policy)
        self._buckets = WidthBuckets(runner)
        self._projector = head_projector(settings, self._device)
        self._states: StatePool | None = None
        self._remote: RemoteDrafter | None = None  # this and the source: on rank 0
        self._source: TreeSource | None = None
        self._trace = StepTrace()
        self._counts = Counts()
        self._tree_cache: Any = None
        if self._projector is not None:
            capture(runner.model, self._projector)
        if self._ranks.first:
            tracing.configure("adaptivespec-target")

    # -- set-up -----------------------------------------------------------------------------------

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        super().alloc_memory_pool(memory_pool_config, req_to_token_pool, token_to_kv_pool_allocator)
        if not self._ranks.first:
            return
        runner, settings = self._target_worker.model_runner, self._settings
        if self._projector is not None:
            slots = token_to_kv_pool_allocator.size + token_to_kv_pool_allocator.page_size
            dtype = getattr(torch, settings.model.dtype)
            self._states = StatePool(self._projector, slots, dtype, self._device)
        state_size = self._projector.state_size if self._projector else 0
        owner = self._config.owner
        self._remote = RemoteDrafter(settings, owner.host, state_size, self._device)
        self._source = TreeSource(
            self._remote, self._requests, self._policy, self._states, self._trace, self._device
        )
        hello = Hello(
            context=runner.model_config.context_len,
            kv_tokens=token_to_kv_pool_allocator.size,
            page_size=token_to_kv_pool_allocator.page_size,
            vocab_size=runner.model_config.vocab_size,
            state_size=state_size,
        )
        answer_owner(owner, settings.startup_timeout_s, hello, self._remote, self.state)

    def init_cuda_graphs(self) -> None:
        """Called after SGLang has captured the target's graphs, for the largest trees."""
        reachable = [shape.nodes for shape in self._policy.reachable]
        self._buckets.capture(bucket_widths(reachable, self._settings.max_shape.nodes))

    def clear_cache_pool(self) -> None:
        """Called when SGLang flushes its cache, which it does only when nothing runs."""

    # -- for the owner ----------------------------------------------------------------------------

    def state(self) -> State:
        """Called from the owner's thread: plain numbers that the scheduler's thread keeps."""
        remote, cache = self._remote, self._tree_cache
        assert remote is not None
        used = 0
        if cache is not None:
            allocator = self.token_to_kv_pool_allocator
            used = allocator.size - allocator.available_size() - cache.evictable_size()
        running, counts = len(self._requests), self._counts
        return State(
            requests=running,
            kv_tokens_used=used,
            drafter_requests=self._requests.held if remote.drafting else 0,
            steps=counts.steps,
            drafted_tokens=counts.drafted,
            accepted_tokens=counts.accepted,
            promoted_tokens=counts.promoted,
            passes=counts.passes,
            graph_passes=counts.graph_passes,
            drafter_s=counts.drafter_s,
            verify_s=counts.verify_s,
            step_overhead_s=counts.overhead_s,
            stalled_s=counts.quiet_s if running else 0.0,
            lost=remote.lost,
        )

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """SGLang's word that a request has ended, however it did."""
        self._requests.forget(rid)
        if not self._requests and self._source is not None:
            self._source.idle()

    # -- the step ---------------------------------------------------------------------------------

    def forward_batch_generation(
        self,
        batch: "ScheduleBatch",
        on_publish: Any = None,
        grammar_barrier: Any = None,
        pp_proxy_tensors: Any = None,
    ) -> GenerationBatchResult:
        """SGLang's call for every batch; the last three serve schedules that are refused."""
        self._tree_cache = batch.tree_cache
        self._counts.active()  # it may have been idle for long
        sequences = self._requests.of(batch.reqs)
        self._trace.begin(sequences)
        try:
            if batch.forward_mode.is_decode():
                return self._step(batch, sequences)
            return self._prefill(batch, sequences)
        finally:
            self._trace.end()
            self._counts.active()

    def _prefill(
        self, batch: "ScheduleBatch", sequences: list[ServedSequence]
    ) -> GenerationBatchResult:
        """Prompt chunks, without trees; their states go to the drafter at once."""
        lengths = batch.seq_lens_cpu.tolist()
        ours = any(not s.sampling.greedy for s in sequences)
        result = self._target_worker.forward_batch_generation(batch, is_verify=ours)
        output = result.logits_output
        if self._states is not None:
            self._states.write(batch.out_cache_loc, output.hidden_states)
        output.hidden_states = None
        first = result.next_token_ids
        if ours:
            first = self._draw_first(sequences, lengths, output.next_token_logits)
        for sequence, length in zip(sequences, lengths, strict=True):
            self._trace.prefilled(sequence, length - sequence.cached)
            sequence.cached = length
            sequence.prefilling = sequence.req.inflight_middle_chunks > 0
            if not sequence.prefilling:
                record_prefill(sequence.req)
        self._feed(batch, sequences)
        ones = torch.ones(len(sequences), dtype=torch.int32, device=self._device)
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=first,
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=ones,
            new_seq_lens=batch.seq_lens,
            next_draft_input=nothing_carried(batch.seq_lens, ones),
            speculative_num_draft_tokens=1,
        )

    def _draw_first(
        self, sequences: list[ServedSequence], lengths: list[int], logits: Tensor
    ) -> Tensor:
        """The tokens after prompts of which some sample: seeded draws, by seed and position as in
        every step to come."""
        last = roots([s.tokens[-1] for s in sequences], self._device)
        sampling = [s.sampling for s in sequences]
        chosen, _ = choose(logits, last, sampling, [length - 1 for length in lengths])
        return self._ranks.agree(chosen.flatten())

    def _step(
        self, batch: "ScheduleBatch", sequences: list[ServedSequence]
    ) -> GenerationBatchResult:
        """Feed the drafter, draft, verify, accept; the KV of accepted nodes is moved to its place,
        and their states with it."""
        started = time.perf_counter()
        for sequence, length in zip(sequences, batch.seq_lens_cpu.tolist(), strict=True):
            sequence.cached = length
            sequence.prefilling = False
        self._requests.keep(sequences)
        fed = self._feed(batch, sequences)
        trees, grown = self._source.draft(sequences) if self._source else (None, Grown())
        shared = self._ranks.share(trees, len(sequences), self._device)
        shared = widen(shared, self._buckets.width(shared.tokens.shape[1]))

        drafted_at, drafted_wall = time.perf_counter(), time.time()
        spec = prepare(batch, shared, self._device)
        with self._buckets.using(spec.draft_token_num):
            result = self._target_worker.forward_batch_generation(batch, is_verify=True)
        output = result.logits_output
        accepted, walked = self._accept(sequences, shared, spec, output.next_token_logits)
        if self._states is not None:
            layers = output.hidden_states
            self._states.write_accepted(batch.out_cache_loc, layers, walked.accept_index)
        output.hidden_states = None
        move_accept_tokens_to_target_kvcache(
            batch, walked.accept_index, walked.accept_lens - 1, self.token_to_kv_pool_allocator
        )
        verify_s = time.perf_counter() - drafted_at

        self._trace_verify(sequences, accepted, drafted_wall, verify_s)
        for sequence, outcome in zip(sequences, accepted, strict=True):
            self._trace.accepted(sequence, outcome)
            sequence.note_promotions(outcome.promoted)
            sequence.signals.update(outcome.depth, len(outcome.tokens))
            self._counts.tree(outcome)
        batch.forward_mode = ForwardMode.DECODE
        seconds = StepSeconds.of(
            time.perf_counter() - started,
            fed.seconds + grown.seconds,
            fed.transfer_s + grown.transfer_s,
            verify_s,
        )
        for sequence, outcome in zip(sequences, accepted, strict=True):
            record_step(sequence.req, outcome, seconds)
        self._counts.step(seconds, bool(result.can_run_cuda_graph))
        self._policy.stepped(
            StepWork(
                requests=len(sequences),
                nodes=shared.tokens.numel(),  # padding is computed like nodes
                tokens=sum(len(outcome.path) for outcome in accepted),
                fed=fed.tokens,
                feed_s=fed.seconds,
                growth=grown.growth,
                draft_s=grown.seconds,
                verify_s=verify_s,
                total_s=seconds.total,
                adaptive=any(sequence.mode == "adaptive" for sequence in sequences),
                behind=sum(s.behind for s in sequences if s.mode == "adaptive"),
            )
        )
        new_seq_lens = batch.seq_lens + walked.accept_lens
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=walked.predict[walked.accept_index.long()].flatten(),
            can_run_cuda_graph=result.can_run_cuda_graph,
            accept_lens=walked.accept_lens,
            new_seq_lens=new_seq_lens,
            next_draft_input=nothing_carried(new_seq_lens, walked.accept_lens),
            speculative_num_draft_tokens=spec.draft_token_num,
        )

    def _accept(
        self,
        sequences: list[ServedSequence],
        trees: DraftTrees,
        spec: NgramVerifyInput,
        logits: Tensor,
    ) -> tuple[list[Acceptance], Walked]:
        """The margin rule on the device, and SGLang's walk."""
        sampling, starts = [s.sampling for s in sequences], [s.cached for s in sequences]
        target, gap = choose(logits, trees, sampling, starts)
        kappa = torch.tensor([s.kappa for s in sequences], device=self._device)
        guards = self._guards.of_step(sequences, self._device)
        predict, promoted = guards.promote(trees.tokens, trees.parents, target, gap, kappa)
        walked = walk(spec, self._ranks.agree(predict))
        plain = walked.plain()
        self._policy.verified(trees, plain.path, [s.signals.rule for s in sequences])
        return outcomes(trees.tokens, trees.parents, plain, promoted, gap), walked

    def _feed(self, batch: "ScheduleBatch", sequences: list[ServedSequence]) -> Fed:
        if self._source is None:
            return Fed()
        return self._source.feed(sequences, batch.req_to_token_pool.req_to_token)

    def _trace_verify(
        self,
        sequences: list[ServedSequence],
        accepted: list[Acceptance],
        started_at: float,
        seconds: float,
    ) -> None:
        attributes = {
            "adaptivespec.verify.forward_s": seconds,
            "adaptivespec.batch.requests": len(sequences),
            "adaptivespec.batch.nodes": sum(outcome.drafted + 1 for outcome in accepted),
        }
        for trace in self._trace.contexts(sequences):
            tracing.record_span(
                trace, "adaptivespec.verify", started_at, started_at + seconds, attributes
            )
