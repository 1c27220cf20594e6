"""Whether the installed SGLang is the one that this plugin was written against.

What the plugin overrides, calls or reads in the scheduler is listed here, but for what SGLang's
objects only have once they are made. Between SGLang's releases any of it may move; then the engine
must not start and break in the middle of a request.
"""

import dataclasses
import importlib
import inspect
from importlib import metadata
from typing import NamedTuple

from adaptivespec.errors import ConfigError

SUPPORTED = "0.5.23"


class Used(NamedTuple):
    """An attribute, and the parameters, or for a dataclass the fields, that are used of it."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()


_SPEC = "sglang.srt.speculative"
_KERNELS = "sglang.kernels.ops.speculative"

USED = (
    Used(f"{_SPEC}.spec_info", "SpeculativeAlgorithm.register", ("name", "spec_class")),
    Used(f"{_SPEC}.spec_info", "SpeculativeAlgorithm.from_string", ("name",)),
    Used(f"{_SPEC}.spec_registry", "CustomSpecAlgo", ("name", "factory", "validate_server_args")),
    Used(f"{_SPEC}.spec_registry", "CustomSpecAlgo.handle_server_args", ("server_args",)),
    Used(f"{_SPEC}.base_spec_worker", "BaseSpecWorker"),
    Used(
        f"{_SPEC}.base_spec_worker",
        "BaseSpecWorker.alloc_memory_pool",
        ("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
    ),
    Used(f"{_SPEC}.base_spec_worker", "BaseSpecWorker.init_attention_backends"),
    Used(f"{_SPEC}.base_spec_worker", "BaseSpecWorker.init_cuda_graphs"),
    Used(f"{_SPEC}.base_spec_worker", "BaseSpecWorker.clear_cache_pool"),
    Used(
        f"{_SPEC}.base_spec_worker",
        "BaseSpecWorker.note_request_finished",
        ("rid", "natural_stop"),
    ),
    Used(
        f"{_SPEC}.ngram_info",
        "NgramVerifyInput",
        (
            "draft_token",
            "custom_mask",
            "positions",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "draft_token_num",
            "new_seq_lens",
            "accept_tokens",
            "accept_lens",
        ),
    ),
    Used(
        f"{_SPEC}.spec_utils",
        "move_accept_tokens_to_target_kvcache",
        ("batch", "accept_index", "num_correct_drafts", "token_to_kv_pool_allocator"),
    ),
    Used(
        f"{_KERNELS}.spec_tree",
        "verify_tree_greedy_func",
        (
            "predicts",
            "accept_index",
            "accept_token_num",
            "candidates",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
            "target_predict",
        ),
    ),
    Used(
        f"{_KERNELS}.cache_locs",
        "assign_extend_cache_locs_uniform_func",
        (
            "req_pool_indices",
            "req_to_token",
            "start_offset",
            "batch_size",
            "draft_token_num",
            "device",
        ),
    ),
    Used(
        "sglang.srt.managers.tp_worker",
        "TpModelWorker.forward_batch_generation",
        ("batch", "is_verify"),
    ),
    Used(
        "sglang.srt.managers.utils",
        "GenerationBatchResult",
        (
            "logits_output",
            "next_token_ids",
            "can_run_cuda_graph",
            "accept_lens",
            "new_seq_lens",
            "next_draft_input",
            "speculative_num_draft_tokens",
        ),
    ),
    Used(
        "sglang.srt.layers.logits_processor",
        "LogitsProcessorOutput",
        ("next_token_logits", "hidden_states"),
    ),
    Used(
        "sglang.srt.managers.schedule_batch",
        "ScheduleBatch",
        (
            "reqs",
            "forward_mode",
            "input_ids",
            "seq_lens",
            "seq_lens_cpu",
            "out_cache_loc",
            "req_pool_indices",
            "req_to_token_pool",
            "spec_info",
            "tree_cache",
        ),
    ),
    Used("sglang.srt.managers.schedule_batch", "Req.finished"),
    Used("sglang.srt.model_executor.forward_batch_info", "ForwardMode.TARGET_VERIFY"),
    Used("sglang.srt.managers.overlap_utils", "FutureMap", ("device", "spec_algo")),
    Used(
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
        "DecodeCudaGraphRunner.__init__",
        ("model_runner", "attn_backend", "speculative_num_draft_tokens"),
    ),
    Used("sglang.srt.model_executor.model_runner", "ModelRunner._get_attention_backend"),
    Used("sglang.srt.runtime_context", "get_context"),
    Used("sglang.srt.runtime_context", "RuntimeContext.override", ("source", "fields")),
    Used("sglang.srt.runtime_context", "get_parallel"),
    Used("sglang.srt.runtime_context", "get_spec"),
    Used("sglang.srt.utils", "is_cpu"),
)


def check_compatibility() -> None:
    """Raises ConfigError naming the attribute that differs, and the version that works."""
    try:
        installed = metadata.version("sglang")
    except metadata.PackageNotFoundError as error:
        raise ConfigError(
            "engine: 'sglang' needs SGLang, which is not installed: "
            f"pip install sglang=={SUPPORTED}"
        ) from error
    for used in USED:
        if problem := _problem(used):
            raise ConfigError(
                f"SGLang {installed} is installed, whose {used.module}.{used.name} {problem}; "
                f"this plugin works with sglang=={SUPPORTED}"
            )


def _problem(used: Used) -> str | None:
    """What is wrong with an attribute, None if nothing."""
    try:
        found = importlib.import_module(used.module)
        for part in used.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        return f"does not exist ({error})"
    missing = set(used.parameters) - _parameters(found)
    return f"has no {', '.join(sorted(missing))}" if missing else None


def _parameters(found: object) -> set[str]:
    if dataclasses.is_dataclass(found):
        return {field.name for field in dataclasses.fields(found)}
    return set(inspect.signature(found).parameters) if callable(found) else set()
