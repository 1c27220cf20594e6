"""Where training begins: a head made of the target's own parts, or an earlier one."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from adaptivespec.errors import ConfigError
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.decoder import eagle3_layers, output_rows
from adaptivespec.models.eagle3_config import HeadConfig, read_head_config
from adaptivespec.models.eagle3_weights import load_head_weights
from adaptivespec.models.layers import Weights

_NOISE = 0.02
"""Standard deviation of the weights that the target has no counterpart of."""


_WIDER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ALIKE = (
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "post_attention_layernorm",
)
"""Parts of a layer that a head's has twice as wide, and that it has as they are."""


def head_config(target: DecoderConfig, draft_vocabulary: int) -> HeadConfig:
    """A head with one layer of the target's own sizes, less what a Llama layer does not have
    (Qwen's biases and norms of queries and keys): the form that SGLang and vLLM load."""
    layer = replace(
        target,
        family="llama",
        layers=1,
        tie_word_embeddings=False,
        attention_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
    )
    return HeadConfig(
        layer=layer,
        draft_vocab_size=draft_vocabulary,
        target_hidden_size=target.hidden_size,
        aux_layers=eagle3_layers(target.layers),
    )


def count_tokens(answers: Iterable[Tensor], vocabulary: int) -> Tensor:
    """How often the answers have every token, int64 [vocabulary]."""
    counts = torch.zeros(vocabulary, dtype=torch.int64)
    for tokens in answers:
        counts += torch.bincount(tokens.long(), minlength=vocabulary)
    return counts


def draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The `size` most frequent tokens, ascending int64; of equals the lower."""
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def warm_start(config: DecoderConfig, target: Weights, target_ids: Tensor, seed: int) -> Weights:
    """Weights of a head that begins as the target's last layer: it reads the last of the auxiliary
    states through `fc`, ignores the token but for some noise, and ends in the target's own norm
    and rows of its output layer. `config` is the target's, `target` its weights by Hugging Face's
    names."""
    chance = torch.Generator().manual_seed(seed)
    hidden = config.hidden_size

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance) * _NOISE

    last = f"model.layers.{config.layers - 1}."
    output = output_rows(config, target)
    weights = {
        "fc.weight": torch.cat((noise(hidden, 2 * hidden), torch.eye(hidden)), 1),
        "midlayer.hidden_norm.weight": target[f"{last}input_layernorm.weight"],
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "norm.weight": target["model.norm.weight"],
        "lm_head.weight": output[target_ids.to(output.device)],
    }
    for name in _WIDER:
        weight = target[f"{last}{name}.weight"].float().cpu()
        weights[f"midlayer.{name}.weight"] = torch.cat((noise(*weight.shape), weight), 1)
    for name in _ALIKE:
        weights[f"midlayer.{name}.weight"] = target[f"{last}{name}.weight"]
    return {name: weight.float().cpu() for name, weight in weights.items()}


def earlier_head(folder: Path, target: DecoderConfig) -> tuple[Tensor, Weights]:
    """Draft vocabulary int64 and weights float32 of a head of the form of `head_config`. Raises
    ConfigError when there is none in `folder`, or it is of another form or for another target."""
    config = read_head_config(folder, target)
    weights = load_head_weights(folder, config, torch.float32, "cpu")
    ids = torch.arange(config.draft_vocab_size)
    ids += weights.pop("d2t", torch.zeros_like(ids))
    weights.pop("t2d", None)
    own = ("hidden_norm", "input_layernorm", *_WIDER, *_ALIKE)
    form = {"fc.weight", "norm.weight", "lm_head.weight", *(f"midlayer.{n}.weight" for n in own)}
    if set(weights) != form or config.aux_layers != eagle3_layers(target.layers):
        raise ConfigError(f"{folder}: not of the form that this command trains")
    return ids, weights
