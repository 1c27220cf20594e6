"""A lean decoder of the Llama, Qwen2 and Qwen3 families, for packed batches of many requests."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adaptivespec.engine.cache import KVCache
from adaptivespec.errors import ConfigError
from adaptivespec.models.attention import Context, Packing, Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.layers import MLP, RMSNorm, SelfAttention, Weights, make_linear
from adaptivespec.models.rope import Rope


class Hidden(NamedTuple):
    """final [T, H]: normed output, what the head reads. aux [T, len(aux layers) * H]: inputs of the
    asked layers side by side, None if none were asked for. slots int64 [T]: the rows' places in the
    cache."""

    final: Tensor
    aux: Tensor | None
    slots: Tensor


class Decoder:
    """Embedding, layers, norm and head, on one device. Reads no gradient and keeps no state: keys
    and values live in the caller's `KVCache`."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        """`weights` by Hugging Face's names, in any dtype and on any device. Raises ConfigError
        naming every missing, surplus or wrongly shaped tensor."""
        check_weights(weights, expected_shapes(config))
        self.config = config
        self.dtype, self.device = dtype, torch.device(device)
        with torch.inference_mode():

            def part(prefix: str) -> Weights:
                chosen = {k: v for k, v in weights.items() if k.startswith(prefix)}
                return {k: v.to(device=device, dtype=dtype) for k, v in chosen.items()}

            outer = part("model.embed_tokens.") | part("lm_head.")
            self._embedding = outer["model.embed_tokens.weight"]
            self._layers = [
                _Layer(config, part(f"model.layers.{i}."), i) for i in range(config.layers)
            ]
            self._norm = RMSNorm(part("model.norm.")["model.norm.weight"], config.rms_norm_eps)
            self._head = make_linear(output_rows(config, outer))
            self._rope = Rope(
                config.head_dim, config.rope_theta, config.rope_scaling, dtype, self.device
            )

    def new_cache(self, tokens: int, state_size: int = 0) -> KVCache:
        """A cache of `tokens` positions that fits this decoder."""
        c = self.config
        return KVCache(
            c.layers, c.kv_heads, c.head_dim, tokens, self.dtype, self.device, state_size
        )

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        aux_layers: Sequence[int] = (),
    ) -> Hidden:
        """One pass over tokens int64 [T] at positions int64 [T], cut into `segments` that cover all
        rows in order. Their keys and values become pending rows of the cache."""
        packing = Packing(cache, segments, self.config.heads // self.config.kv_heads)
        return self.run(tokens, positions, packing, aux_layers)

    @torch.inference_mode()
    def run(
        self, tokens: Tensor, positions: Tensor, context: Context, aux_layers: Sequence[int] = ()
    ) -> Hidden:
        """One pass over tokens int64 [T] at positions int64 [T] that attend to `context`."""
        angles = self._rope.angles(positions)
        x = self.embed(tokens)
        inputs: dict[int, Tensor] = {}
        for i, layer in enumerate(self._layers):
            if i in aux_layers:
                inputs[i] = x
            x = layer(x, angles, context)
        aux = torch.cat([inputs[i] for i in aux_layers], -1) if aux_layers else None
        return Hidden(self._norm(x), aux, context.slots)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings [T, H]."""
        return F.embedding(tokens, self._embedding)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden rows [R, H] -> logits [R, V]."""
        return self._head(hidden)


class _Layer:
    def __init__(self, config: DecoderConfig, weights: Weights, index: int) -> None:
        prefix = f"model.layers.{index}."

        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights[f"{prefix}{name}.weight"], config.rms_norm_eps)

        self._input_norm = norm("input_layernorm")
        self._attention = SelfAttention(config, weights, f"{prefix}self_attn.", index)
        self._mlp_norm = norm("post_attention_layernorm")
        self._mlp = MLP(weights, f"{prefix}mlp.")

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], context: Context) -> Tensor:
        x = x + self._attention(self._input_norm(x), angles, context)
        return x + self._mlp(self._mlp_norm(x))


def output_rows(config: DecoderConfig, weights: Weights) -> Tensor:
    """The weight [V, H] of the output layer; `weights` by Hugging Face's names."""
    tied = config.tie_word_embeddings
    return weights["model.embed_tokens.weight" if tied else "lm_head.weight"]


def eagle3_layers(layers: int) -> tuple[int, int, int]:
    """The layers whose inputs an EAGLE-3 head reads: 2, the middle one, the last but two; of a
    target with fewer than six layers, the nearest that there are behind the first. Raises
    ConfigError for a target of one layer, which has none behind it."""
    if layers < 2:
        raise ConfigError("an EAGLE-3 head needs a target of two layers or more")
    low, middle, high = (max(min(i, layers - 1), 1) for i in (2, layers // 2, layers - 3))
    return low, middle, high


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a checkpoint, by Hugging Face's names."""
    c = config
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.hidden_size,),
        "post_attention_layernorm.weight": (c.hidden_size,),
    }
    for name, out, into, bias in (
        ("self_attn.q_proj", queries, c.hidden_size, c.attention_bias),
        ("self_attn.k_proj", keys, c.hidden_size, c.attention_bias),
        ("self_attn.v_proj", keys, c.hidden_size, c.attention_bias),
        ("self_attn.o_proj", c.hidden_size, queries, c.o_bias),
        ("mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
    ):
        layer[f"{name}.weight"] = (out, into)
        if bias:
            layer[f"{name}.bias"] = (out,)
    if c.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (c.head_dim,)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for i in range(c.layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


_LISTED = 8  # names per kind of fault in an error message


def check_weights(weights: Weights, expected: dict[str, tuple[int, ...]]) -> None:
    """Raises ConfigError unless `weights` are exactly the `expected` tensors. A head beside tied
    embeddings and stored rotary frequencies are redundant, so they may be there."""
    redundant = {k for k in weights if k == "lm_head.weight" or k.endswith("rotary_emb.inv_freq")}
    faults = {
        "missing": [name for name in expected if name not in weights],
        "surplus": [name for name in weights if name not in expected and name not in redundant],
        "wrong shape": [
            f"{name} {list(weights[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in weights and tuple(weights[name].shape) != shape
        ],
    }
    messages = []
    for kind, names in faults.items():
        if names:
            more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
            messages.append(f"{kind}: {', '.join(names[:_LISTED])}{more}")
    if messages:
        raise ConfigError(f"the weights do not fit the configuration; {'; '.join(messages)}")
