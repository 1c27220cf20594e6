"""What an EAGLE-3 head is: read from either public layout of config.json, checked against its
target."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig

from adaptivespec.errors import ConfigError
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.decoder import eagle3_layers
from adaptivespec.models.sources import read_json

FAMILIES = ("llama", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Architecture of a head for one target.

    layer: its decoder layer. aux_layers: target layers whose inputs it reads.
    norm_before_residual: the residual is the normed state. norm_before_fc: one norm over all
    auxiliary states; fc_norm: one norm each. norm_output: the state that is fed back is normed.
    """

    layer: DecoderConfig
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def read_head_config(folder: Path, target: DecoderConfig) -> HeadConfig:
    """Read a head's config.json. Raises ConfigError naming the file, the key and both values where
    the head does not fit the target or cannot be computed."""
    raw = read_json(folder / "config.json")
    try:
        return _parse(raw, target)
    except ConfigError as error:
        raise ConfigError(f"EAGLE-3 head {folder}: {error}") from error


def _parse(raw: dict[str, Any], target: DecoderConfig) -> HeadConfig:
    layer = _layer(raw.get("transformer_layer_config") or raw)
    if layer.layers != 1:
        raise ConfigError(f"num_hidden_layers: {layer.layers} is not supported; only 1")
    if layer.vocab_size != target.vocab_size:
        raise ConfigError(
            f"vocab_size: {layer.vocab_size} for a target with {target.vocab_size} tokens"
        )
    state = raw.get("target_hidden_size") or layer.hidden_size
    if state != target.hidden_size:
        raise ConfigError(f"made for a target of hidden size {state}, not {target.hidden_size}")
    nested = raw.get("eagle_config") or {}
    if not nested.get("use_aux_hidden_state", True):
        raise ConfigError("use_aux_hidden_state: false is not supported")

    def flag(name: str) -> bool:
        return bool(raw.get(name, nested.get(name, False)))

    return HeadConfig(
        layer=layer,
        draft_vocab_size=raw.get("draft_vocab_size") or layer.vocab_size,
        target_hidden_size=state,
        aux_layers=_aux_layers(raw, nested, target),
        norm_before_residual=flag("norm_before_residual"),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm"),
        norm_output=flag("norm_output"),
    )


def _layer(given: dict[str, Any]) -> DecoderConfig:
    """The decoder layer. transformers' classes fill in what the file leaves out, as they did when
    it was written: RoPE base 10000 among it, which the target's must not replace."""
    family = given.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(f"model_type: {family!r} is not supported; one of {list(FAMILIES)}")
    try:
        filled = AutoConfig.for_model(**given).to_dict()
    except StrictDataclassError as error:
        raise ConfigError(f"config.json: {' '.join(str(error).split())}") from error
    return DecoderConfig.from_hf(filled)


def _aux_layers(
    raw: dict[str, Any], nested: dict[str, Any], target: DecoderConfig
) -> tuple[int, ...]:
    """Target layers whose inputs are read. The key at the top (speculators, vLLM) names inputs; in
    `eagle_config` (SpecForge, SGLang) it names outputs, and the output of layer i is the input of
    i + 1."""
    key = "eagle_aux_hidden_state_layer_ids"
    if raw.get(key):
        layers = tuple(raw[key])
    elif nested.get(key):
        layers = tuple(i + 1 for i in nested[key])
    else:
        layers = eagle3_layers(target.layers)
    if not all(0 <= i < target.layers for i in layers):
        raise ConfigError(
            f"{key}: the inputs of layers {list(layers)} are asked for, of {target.layers} layers"
        )
    return layers
