"""Trees of any size on GPUs, where SGLang's attention backends and CUDA graphs each know one size.

For each of a few node counts there is an attention backend and a runner with graphs of that width;
a step uses the smallest that its trees fit, padded with nodes that no path reaches. Modelled on
what SGLang does for its own adaptive chains (EAGLEWorkerV2.build_adaptive_runtime_state and
apply_runtime_state, 0.5.23), for the target's side alone. On a CPU, trees keep their size.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

log = logging.getLogger(__name__)

_STEP = 8
"""Nodes between two widths, above those that a policy reaches: at most so many are padding."""


def bucket_widths(reachable: Sequence[int], largest: int) -> list[int]:
    """The node counts to capture: each that the policy reaches, plain decoding's 1, and coarse
    steps up to `largest`, for what requests ask for themselves."""
    coarse = range(_STEP, largest, _STEP)
    widest = max(reachable, default=1)
    return sorted({1, *reachable, *(width for width in coarse if width > widest), largest})


class _Bucket(NamedTuple):
    attention: Any
    graphs: Any


class WidthBuckets:
    """The target's attention backend and graph runner by tree size; none on a CPU."""

    def __init__(self, runner: "ModelRunner") -> None:
        self._runner = runner
        self._widths: list[int] = []
        self._buckets: dict[int, _Bucket] = {}

    def capture(self, widths: Sequence[int]) -> None:
        """Build a bucket per width; call it after SGLang has captured its own graphs, those of the
        largest width, which are used as they are."""
        if self._runner.device == "cpu":
            return
        from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

        runner = self._runner
        own = _Bucket(runner.attn_backend, runner.decode_cuda_graph_runner)
        self._widths = sorted(widths)
        for width in self._widths[:-1]:
            with self._override(width):
                attention, graphs = self._new_backend(), own.graphs
                if isinstance(own.graphs, DecodeCudaGraphRunner):
                    graphs = DecodeCudaGraphRunner(
                        runner, attn_backend=attention, speculative_num_draft_tokens=width
                    )
            self._buckets[width] = _Bucket(attention, graphs)
            log.info("ready for trees of %d nodes", width)
        self._buckets[self._widths[-1]] = own

    def width(self, nodes: int) -> int:
        """The size that trees of `nodes` are padded to."""
        if not self._widths:
            return nodes
        return self._widths[bisect_left(self._widths, nodes)]

    @contextmanager
    def using(self, width: int) -> Iterator[None]:
        """Run the target with the bucket of this width."""
        bucket = self._buckets.get(width)
        if bucket is None:
            yield
            return
        runner = self._runner
        saved = runner.attn_backend, runner.decode_cuda_graph_runner
        runner.attn_backend, runner.decode_cuda_graph_runner = bucket
        try:
            yield
        finally:
            runner.attn_backend, runner.decode_cuda_graph_runner = saved

    def _new_backend(self) -> Any:
        saved = self._runner.init_new_workspace
        try:
            return self._runner._get_attention_backend(init_new_workspace=True)
        finally:
            self._runner.init_new_workspace = saved

    @contextmanager
    def _override(self, width: int) -> Iterator[None]:
        """SGLang's own idea of a tree's size: backends and graphs read it when they are made."""
        from sglang.srt.runtime_context import get_context, get_spec

        saved = get_spec().speculative_num_draft_tokens
        get_context().override("adaptivespec.capture", speculative_num_draft_tokens=width)
        try:
            yield
        finally:
            get_context().override("adaptivespec.restore", speculative_num_draft_tokens=saved)
