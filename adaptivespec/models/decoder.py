"""A lean decoder of the Llama, Qwen2 and Qwen3 families, for packed batches of many requests."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adaptivespec.engine.cache import KVCache
from adaptivespec.errors import ConfigError
from adaptivespec.kernels import passes
from adaptivespec.kernels.linear import as_array
from adaptivespec.kernels.stack import Stack, compiles_layers
from adaptivespec.models.attention import Packing, Segment
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
    and values live in the caller's `KVCache`.

    On a CPU kernels of our own run it (`adaptivespec.kernels`), elsewhere torch's operators.
    """

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

            def ready(tensor: Tensor) -> Tensor:
                return tensor.to(device=device, dtype=dtype)

            def part(prefix: str) -> Weights:
                names = [name for name in weights if name.startswith(prefix)]
                return {name.removeprefix(prefix): ready(weights[name]) for name in names}

            self._head = make_linear(ready(output_rows(config, weights)))
            parts = (
                ready(weights["model.embed_tokens.weight"]),
                (part(f"model.layers.{i}.") for i in range(config.layers)),
                ready(weights["model.norm.weight"]),
            )
            rope = Rope(config.head_dim, config.rope_theta, config.rope_scaling, dtype, device)
            layers = (
                _CompiledLayers if compiles_layers(config, dtype, self.device) else _TorchLayers
            )
            self._layers = layers(config, *parts, rope)

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
        return self._layers(tokens, positions, cache, segments, aux_layers)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden rows [R, H] -> logits [R, V], float32 on a CPU."""
        return self._head(hidden)


class _CompiledLayers:
    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: Iterable[Weights],
        norm: Tensor,
        rope: Rope,
    ) -> None:
        self._stack = Stack(config, layers, rope)
        self._embedding = as_array(embedding)
        self._norm = norm.float().numpy()

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        aux_layers: Sequence[int],
    ) -> Hidden:
        stack = self._stack
        rows, hidden = len(tokens), stack.sizes.hidden
        batch, buffers = stack.batch(positions, cache, segments)
        final = torch.empty((rows, hidden), dtype=cache.dtype)
        aux = torch.empty((rows, len(aux_layers), hidden), dtype=cache.dtype)
        stack.team.run(
            passes.decode,
            stack.counters,
            tokens.numpy(),
            self._embedding,
            stack.sizes,
            stack.layers,
            self._norm,
            batch,
            buffers,
            as_array(cache.arena),
            np.array(aux_layers, dtype=np.int64),
            as_array(aux),
            as_array(final),
        )
        states = aux.flatten(1) if aux_layers else None
        return Hidden(final, states, torch.from_numpy(batch.slots))


class _TorchLayers:
    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: Iterable[Weights],
        norm: Tensor,
        rope: Rope,
    ) -> None:
        self._embedding = embedding
        self._layers = [_Layer(config, weights, i) for i, weights in enumerate(layers)]
        self._norm = RMSNorm(norm, config.rms_norm_eps)
        self._rope = rope
        self._group = config.heads // config.kv_heads

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        aux_layers: Sequence[int],
    ) -> Hidden:
        packing = Packing(cache, segments, self._group)
        angles = self._rope.angles(positions)
        x = F.embedding(tokens, self._embedding)
        inputs: dict[int, Tensor] = {}
        for i, layer in enumerate(self._layers):
            if i in aux_layers:
                inputs[i] = x
            x = layer(x, angles, packing)
        aux = torch.cat([inputs[i] for i in aux_layers], -1) if aux_layers else None
        return Hidden(self._norm(x), aux, packing.slots)


class _Layer:
    def __init__(self, config: DecoderConfig, weights: Weights, index: int) -> None:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(weights[f"{name}.weight"], config.rms_norm_eps)

        self._input_norm = norm("input_layernorm")
        self._attention = SelfAttention(config, weights, "self_attn.", index)
        self._mlp_norm = norm("post_attention_layernorm")
        self._mlp = MLP(weights, "mlp.")

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], packing: Packing) -> Tensor:
        x = x + self._attention(self._input_norm(x), angles, packing)
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
