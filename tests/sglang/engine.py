"""SGLang's real Engine on a CPU, in fp32, where its greedy tokens are transformers' own.

Import this module before SGLang, transformers or torchvision: it puts the shims in their way, for
this process and for those that SGLang spawns.
"""

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHIMS = Path(__file__).parent / "shims"

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(SHIMS), os.environ.get("PYTHONPATH", "")]),
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # SGLang compiles some samplers and masks, which takes minutes here
    "OMP_NUM_THREADS": "1",
    # Upstream's Triton kernels, interpreted: references for the stand-in's, and what SGLang
    # allocates pages of more than one token with.
    "TRITON_INTERPRET": "1",
}

if str(SHIMS) not in sys.path:
    os.environ |= ENVIRONMENT
    sys.path.insert(0, str(SHIMS))
    runpy.run_path(str(SHIMS / "sitecustomize.py"))  # what Python does itself in spawned processes

import sglang  # noqa: E402
from sglang.srt.managers.tokenizer_manager import SignalHandler  # noqa: E402
from sglang.srt.utils import kill_process_tree  # noqa: E402

OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "intel_amx",  # of the CPU backends, the one that verifies trees
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 4096,
    "max_running_requests": 4,
    "context_length": 512,
    # A process of the engine that fails sends SIGQUIT, at which SGLang kills the process that
    # started it, this one. Ignored while the engine starts, it lets the start raise RuntimeError.
    "custom_sigquit_handler": signal.SIG_IGN,
}


class EndTheCall(SignalHandler):
    """For when the engine runs: its event loop stops, and what waits for it raises RuntimeError."""

    def running_phase_sigquit_handler(self, signum: Any = None, frame: Any = None) -> None:
        self.tokenizer_manager.event_loop.stop()


@contextmanager
def running_engine(model: Path, **options: Any) -> Iterator[Any]:
    """An `sglang.Engine` on the model in a folder; `options` are added to OPTIONS or replace them.

    One at a time: when SGLang shuts down an engine it ends every child of this process. A start
    that fails raises RuntimeError, and so does a call when a process of the engine dies.
    """
    try:
        engine = sglang.Engine(model_path=str(model), **OPTIONS | options)
        engine.tokenizer_manager.signal_handler_class = EndTheCall
        yield engine
        engine.shutdown()
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
