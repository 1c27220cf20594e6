"""What SGLang runs at the start of each of its processes, as it does with every plugin."""

from sglang.srt.runtime_context import override_platform


def keep_tree_attention() -> None:
    """Let `attention_backend="intel_amx"` be used on any CPU.

    It is SGLang's only CPU backend that takes a tree mask. SGLang replaces it by another one where
    Intel's AMX kernels are absent; here the stand-in's kernels do their work. Only the choice of
    the backend asks this fact of the platform: layers ask the processor, and stay with plain torch.
    """
    override_platform(has_amx=True).__enter__()
