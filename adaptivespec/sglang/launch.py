"""Starting an SGLang engine with the plugin: its arguments, and what the worker must know.

SGLang has no argument for an algorithm's own settings, so they travel in a file whose path is in
the environment of the engine's processes.
"""

import difflib
import logging
import os
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec

from adaptivespec import tracing
from adaptivespec.config import EagleSettings, Settings
from adaptivespec.errors import ConfigError
from adaptivespec.models.sources import resolve
from adaptivespec.sglang.plugin import ALGORITHM
from transport.channel import Address

log = logging.getLogger(__name__)

_VARIABLE = "ADAPTIVESPEC_SGLANG"


class WorkerConfig(msgspec.Struct, frozen=True):
    """What the worker in the scheduler is given: the application's settings, and where its owner
    listens."""

    settings: Settings
    owner: Address


def publish(config: WorkerConfig) -> Path:
    """Leave `config` for the engine that this process starts next; returns the file, which may go
    once the worker has connected."""
    # SGLang's traces would leave by gRPC, and ours do not.
    os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    with NamedTemporaryFile(prefix="adaptivespec-", suffix=".json", delete=False) as file:
        file.write(msgspec.json.encode(config))
    os.environ[_VARIABLE] = file.name
    return Path(file.name)


def published() -> WorkerConfig:
    """The config that was left for this process. Raises ConfigError when there is none."""
    path = os.environ.get(_VARIABLE)
    if path is None:
        raise ConfigError(
            f"{ALGORITHM} runs in engines that this project starts (engine: sglang in "
            f"serve_config.yaml); {_VARIABLE} is not set"
        )
    return msgspec.json.decode(Path(path).read_bytes(), type=WorkerConfig)


def check_options(settings: Settings) -> None:
    """Raises ConfigError for an option that has another place in the settings, or none in SGLang,
    which must be installed."""
    from sglang.srt.server_args import ServerArgs

    ours, known = _ours(settings), ServerArgs.__struct_fields__
    for name in settings.sglang:
        if name in ours:
            raise ConfigError(f"sglang: {name!r} is set by the application's other settings")
        if name not in known:
            meant = ", ".join(map(repr, difflib.get_close_matches(name, known)))
            raise ConfigError(
                f"sglang: SGLang has no argument {name!r}" + (f"; it has {meant}" if meant else "")
            )


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """The arguments of sglang.Engine for these settings. Raises ConfigError."""
    check_options(settings)
    model = {"model_path": str(resolve(settings.model.path))}
    return _defaults(settings) | settings.sglang | _ours(settings) | model


def _ours(settings: Settings) -> dict[str, Any]:
    """What the settings say elsewhere, or what the plugin needs."""
    target, largest = settings.target, settings.max_shape
    return {
        "model_path": settings.model.path,
        "dtype": settings.model.dtype,
        "device": target.compute.device,
        "max_running_requests": target.max_running,
        "max_total_tokens": target.kv_tokens,
        "chunked_prefill_size": target.prefill_chunk,
        "speculative_algorithm": ALGORITHM,
        # For a step SGLang reserves twice the larger of nodes and steps * width: twice the nodes.
        "speculative_num_steps": max(1, largest.nodes // largest.width),
        "speculative_eagle_topk": min(largest.width, largest.nodes),
        "speculative_num_draft_tokens": largest.nodes,
        # Text and stops are made where the answer is, by the same code for every engine.
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "stream_interval": 1,
        "disable_overlap_schedule": True,
        # It also tells the graphs that are captured to keep the layers that the drafter reads.
        "enable_return_hidden_states": isinstance(settings.drafter, EagleSettings),
    }


def _defaults(settings: Settings) -> dict[str, Any]:
    """What `sglang` in the settings may say otherwise."""
    common = {"log_level": "warning", "skip_server_warmup": True} | _traces()
    if settings.target.compute.device == "cpu":
        return common | {
            "attention_backend": "intel_amx",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "sleep_on_idle": True,  # a scheduler that polls takes a core from whoever computes
        }
    # FlashInfer has no fp32.
    exact = settings.model.dtype == "float32"
    return common | {"attention_backend": "triton" if exact else "flashinfer"}


def _traces() -> dict[str, Any]:
    """SGLang's own spans of a request, beside ours and when these are wanted."""
    if not tracing.wanted():
        return {}
    if find_spec("opentelemetry.exporter.otlp.proto.grpc") is None:
        log.warning("traces go without SGLang's own spans: these need pip install sglang[tracing]")
        return {}
    return {
        "enable_trace": True,
        "otlp_traces_endpoint": "",  # as the OTEL_* variables say
        "otlp_service_name": os.environ.get("OTEL_SERVICE_NAME") or "adaptivespec-sglang",
    }
