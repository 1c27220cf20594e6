"""CUDA graphs for trees of any size, where each of SGLang's knows one.

For each of a few node counts there is a runner with graphs of that width; a step uses the smallest
that its trees fit, padded with nodes that no path reaches. Modelled on what SGLang does for its own
adaptive chains (EAGLEWorkerV2.build_adaptive_runtime_state and apply_runtime_state, 0.5.23), for
the target's side alone. Without graphs, as on a CPU, trees keep their size: SGLang's attention
takes any.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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


class WidthBuckets:
    """The target's graph runners by tree size; none where SGLang has captured no graphs."""

    def __init__(self, runner: "ModelRunner") -> None:
        self._runner = runner
        self._widths: list[int] = []
        self._graphs: dict[int, Any] = {}

    def capture(self, widths: Sequence[int]) -> None:
        """Capture graphs of every width; call it after SGLang has captured its own, those of the
        largest width, which are used as they are."""
        runner, own = self._runner, self._runner.decode_cuda_graph_runner
        if runner.device == "cpu" or own is None:
            return
        self._widths = sorted(widths)
        self._graphs[self._widths[-1]] = own
        for width in reversed(self._widths[:-1]):  # the larger first: their memory is reused
            with self._override(width):
                # Its workspace is shared with SGLang's own backend: scratch of one kernel at a
                # time, and hundreds of megabytes.
                attention = runner._get_attention_backend()
                self._graphs[width] = type(own)(
                    runner, attn_backend=attention, speculative_num_draft_tokens=width
                )
            log.info("captured graphs for trees of %d nodes", width)

    def width(self, nodes: int) -> int:
        """The size that trees of `nodes` are padded to."""
        if not self._widths:
            return nodes
        return self._widths[bisect_left(self._widths, nodes)]

    @contextmanager
    def using(self, width: int) -> Iterator[None]:
        """Run the target with the graphs of this width. A batch of more requests than any graph has
        runs without one, by SGLang's own attention backend."""
        runner = self._runner
        own = runner.decode_cuda_graph_runner
        runner.decode_cuda_graph_runner = self._graphs.get(width, own)
        try:
            yield
        finally:
            runner.decode_cuda_graph_runner = own

    @contextmanager
    def _override(self, width: int) -> Iterator[None]:
        """SGLang's own idea of a tree's size: attention backends read it when they are made, and
        size their buffers for graphs by it."""
        from sglang.srt.runtime_context import get_context, get_spec

        saved = get_spec().speculative_num_draft_tokens
        get_context().override("adaptivespec.capture", speculative_num_draft_tokens=width)
        try:
            yield
        finally:
            get_context().override("adaptivespec.restore", speculative_num_draft_tokens=saved)
