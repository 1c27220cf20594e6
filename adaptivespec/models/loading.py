"""Weights of a model, by their Hugging Face names, from any source that `resolve` knows."""

import pickle
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from adaptivespec.errors import ConfigError
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.gguf import GGUF
from adaptivespec.models.sources import is_gguf, read_config, read_json, resolve


def load_model(
    path: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    only: Collection[str] | None = None,
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Load a decoder by folder, hub id, GGUF file or "smollm2".

    Returns its architecture and its weights by Hugging Face name ("model.embed_tokens.weight"),
    floating-point ones in `dtype`. `only` names the tensors to load; nothing else is read. Raises
    ConfigError naming what is missing or unusable.
    """
    location = resolve(path)
    config = DecoderConfig.from_hf(read_config(location))
    return config, load_tensors(location, dtype, device, only)


def load_tensors(
    location: Path,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    only: Collection[str] | None = None,
) -> dict[str, Tensor]:
    """The tensors of a resolved folder or GGUF file, as `load_model` returns them; integer and
    boolean ones keep their type. Unchanged CPU tensors are views of the mapped file."""
    tensors = _from_gguf(location, only) if is_gguf(location) else _from_folder(location, only)
    loaded = {
        name: tensor.to(device, dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors
    }
    missing = set(only or ()) - loaded.keys()
    if missing:
        raise ConfigError(f"{location}: has no tensor {', '.join(sorted(missing))}")
    return loaded


def _from_gguf(file: Path, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
    model = GGUF(file)
    for name, stored in model.names().items():
        if only is None or name in only:
            yield name, torch.from_numpy(model.array(stored))


def _from_folder(folder: Path, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
    for stem, suffix, read in (
        ("model", ".safetensors", _from_safetensors),
        ("pytorch_model", ".bin", _from_bin),
    ):
        index = folder / f"{stem}{suffix}.index.json"
        if index.exists():
            shards = read_json(index)["weight_map"]
            wanted = {shard for name, shard in shards.items() if only is None or name in only}
            files = [folder / shard for shard in sorted(wanted)]
        elif (folder / f"{stem}{suffix}").exists():
            files = [folder / f"{stem}{suffix}"]
        else:
            continue
        for file in files:
            if not file.exists():
                raise ConfigError(f"{folder}: lacks the shard {file.name} that its index names")
            yield from read(file, only)
        return
    raise ConfigError(f"{folder}: has neither model.safetensors nor pytorch_model.bin")


def _from_safetensors(file: Path, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a mapping
                if only is None or name in only:
                    yield name, tensors.get_tensor(name)
    except SafetensorError as error:
        raise ConfigError(f"{file}: not a readable safetensors file: {error}") from error


def _from_bin(file: Path, only: Collection[str] | None) -> Iterator[tuple[str, Tensor]]:
    """A pickle, of which nothing but tensors is accepted."""
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        raise ConfigError(f"{file}: not a plain file of tensors: {error}") from error
    yield from ((n, t) for n, t in tensors.items() if only is None or n in only)
