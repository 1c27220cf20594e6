"""Starting an SGLang engine with the plugin: its arguments, and what the worker must know.

SGLang has no argument for an algorithm's own settings, so they travel in a file whose path is in
the environment of the engine's processes.
"""

import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec

from adaptivespec.config import EagleSettings, Settings
from adaptivespec.errors import ConfigError
from adaptivespec.models.sources import resolve
from adaptivespec.sglang.plugin import ALGORITHM
from transport.channel import Address

_VARIABLE = "ADAPTIVESPEC_SGLANG"


class WorkerConfig(msgspec.Struct, frozen=True):
    """What the worker in the scheduler is given: the application's settings, and where its owner
    listens."""

    settings: Settings
    owner: Address


def publish(config: WorkerConfig) -> Path:
    """Leave `config` for the engine that this process starts next; returns the file, which may go
    once the worker has connected."""
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


def engine_arguments(settings: Settings) -> dict[str, Any]:
    """The arguments of sglang.Engine for these settings. Raises ConfigError for an option that has
    another place in the settings."""
    target, largest = settings.target, settings.max_shape
    ours = {
        "model_path": str(resolve(settings.model.path)),
        "dtype": settings.model.dtype,
        "device": target.compute.device,
        "max_running_requests": target.max_running,
        "max_total_tokens": target.kv_tokens,
        "chunked_prefill_size": target.prefill_chunk,
        "speculative_algorithm": ALGORITHM,
        "speculative_num_steps": largest.depth,
        "speculative_eagle_topk": largest.width,
        "speculative_num_draft_tokens": largest.nodes,
        # Text and stops are made where the answer is, by the same code for every engine.
        "skip_tokenizer_init": True,
        "incremental_streaming_output": True,
        "stream_interval": 1,
        "disable_overlap_schedule": True,
        # It also tells the graphs that are captured to keep the layers that the drafter reads.
        "enable_return_hidden_states": isinstance(settings.drafter, EagleSettings),
    }
    if taken := sorted(ours.keys() & settings.sglang.keys()):
        raise ConfigError(f"sglang: {taken[0]!r} is set by the application's other settings")
    return _defaults(settings) | settings.sglang | ours


def _defaults(settings: Settings) -> dict[str, Any]:
    """What `sglang` in the settings may say otherwise."""
    common = {"log_level": "warning", "skip_server_warmup": True}
    if settings.target.compute.device == "cpu":
        return common | {
            "attention_backend": "intel_amx",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
        }
    return common | {"attention_backend": "flashinfer"}
