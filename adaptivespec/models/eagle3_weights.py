"""Weights of an EAGLE-3 head, under the names of the standard layout, complete or refused."""

from pathlib import Path

import torch

from adaptivespec.errors import ConfigError
from adaptivespec.models.decoder import check_weights
from adaptivespec.models.eagle3_config import HeadConfig
from adaptivespec.models.layers import Weights
from adaptivespec.models.loading import load_tensors

EMBEDDING = "model.embed_tokens.weight"
"""The target's embedding, by the target's name for it."""

Shapes = dict[str, tuple[int, ...]]


def load_projector_weights(
    folder: Path, config: HeadConfig, dtype: torch.dtype, device: torch.device | str
) -> Weights:
    """The weights on the target's side. Raises ConfigError naming each missing or misshapen one."""
    expected = _projector_shapes(config)
    weights = load_tensors(folder, dtype, device, only=expected)
    _check(weights, expected, folder)
    return weights


def load_head_weights(
    folder: Path, config: HeadConfig, dtype: torch.dtype, device: torch.device | str
) -> Weights:
    """The weights on the drafter's side, as `midlayer.*` in either layout. Raises ConfigError
    naming each missing, surplus or misshapen one, or vocabularies that do not fit."""
    stored = load_tensors(folder, dtype, device)
    weights = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in stored.items()}
    optional = {name: shape for name, shape in _optional_shapes(config).items() if name in weights}
    _check(weights, _projector_shapes(config) | _head_shapes(config) | optional, folder)
    try:
        _check_vocabulary(weights, config)
    except ConfigError as error:
        raise ConfigError(f"EAGLE-3 head {folder}: {error}") from error
    return weights


def _projector_shapes(config: HeadConfig) -> Shapes:
    one, count = config.target_hidden_size, len(config.aux_layers)
    shapes: Shapes = {"fc.weight": (config.layer.hidden_size, count * one)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (count * one,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (one,) for i in range(count)}
    return shapes


def _head_shapes(config: HeadConfig) -> Shapes:
    c = config.layer
    hidden, queries, keys = c.hidden_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    shapes: Shapes = {
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }
    for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (hidden,)
    for name, out, into, bias in (
        ("self_attn.q_proj", queries, 2 * hidden, c.attention_bias),
        ("self_attn.k_proj", keys, 2 * hidden, c.attention_bias),
        ("self_attn.v_proj", keys, 2 * hidden, c.attention_bias),
        ("self_attn.o_proj", hidden, queries, c.o_bias),
        ("mlp.gate_proj", c.intermediate_size, hidden, c.mlp_bias),
        ("mlp.up_proj", c.intermediate_size, hidden, c.mlp_bias),
        ("mlp.down_proj", hidden, c.intermediate_size, c.mlp_bias),
    ):
        shapes[f"midlayer.{name}.weight"] = (out, into)
        if bias:
            shapes[f"midlayer.{name}.bias"] = (out,)
    if c.qk_norm:
        shapes |= {f"midlayer.self_attn.{name}_norm.weight": (c.head_dim,) for name in "qk"}
    if config.draft_vocab_size != c.vocab_size:
        shapes["d2t"] = (config.draft_vocab_size,)
    if c.hidden_size != config.target_hidden_size:
        shapes["embed_tokens.weight"] = (c.vocab_size, hidden)
    return shapes


def _optional_shapes(config: HeadConfig) -> Shapes:
    vocabulary = config.layer.vocab_size
    return {
        "d2t": (config.draft_vocab_size,),
        "t2d": (vocabulary,),
        "embed_tokens.weight": (vocabulary, config.layer.hidden_size),
    }


def _check(weights: Weights, expected: Shapes, folder: Path) -> None:
    try:
        check_weights(weights, expected)
    except ConfigError as error:
        raise ConfigError(f"EAGLE-3 head {folder}: {error}") from error


def _check_vocabulary(weights: Weights, config: HeadConfig) -> None:
    """`d2t` holds offsets: target id = draft id + offset. Two draft tokens of one id would make
    equal siblings."""
    if "d2t" not in weights:
        return
    offsets = weights["d2t"]
    if offsets.is_floating_point():
        raise ConfigError(f"d2t: {offsets.dtype} offsets, not integers")
    ids = torch.arange(len(offsets), device=offsets.device) + offsets
    size = config.layer.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ConfigError(
            f"d2t: names target tokens {int(ids.min())} to {int(ids.max())}, but the target has "
            f"{size}"
        )
    if len(ids.unique()) != len(ids):
        raise ConfigError("d2t: two draft tokens stand for one target token")
