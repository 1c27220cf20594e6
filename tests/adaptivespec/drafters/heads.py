"""Tiny random EAGLE-3 heads on disk in both public layouts, and their forward pass spelled out."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

Layout = Literal["standard", "speculators"]
Weights = dict[str, Tensor]

HIDDEN, MLP, HEADS, KV_HEADS, HEAD_DIM, EPS = 32, 48, 4, 2, 16, 1e-5
VOCAB, DRAFT_VOCAB = 384, 64


@dataclass(frozen=True)
class Flags:
    """The switches of a head's config.json."""

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclass(frozen=True)
class TinyHead:
    """A head whose weights and settings a test may change before it writes them to disk."""

    weights: Weights
    family: str = "llama"
    flags: Flags = Flags()
    layer_fields: dict[str, Any] = field(default_factory=dict)
    top_fields: dict[str, Any] = field(default_factory=dict)

    @property
    def target_ids(self) -> Tensor:
        return torch.arange(DRAFT_VOCAB) + self.weights["d2t"]

    def without(self, *names: str) -> "TinyHead":
        return self.having({k: v for k, v in self.weights.items() if k not in names})

    def having(self, weights: Weights) -> "TinyHead":
        return replace(self, weights=weights)

    def write(self, folder: Path, layout: Layout = "standard") -> str:
        """Write config.json and model.safetensors; returns the folder's path."""
        layer = {
            "model_type": self.family,
            "hidden_size": HIDDEN,
            "intermediate_size": MLP,
            "num_hidden_layers": 1,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "rms_norm_eps": EPS,
            "vocab_size": VOCAB,
            **self.layer_fields,
        }
        top = {"draft_vocab_size": DRAFT_VOCAB, **vars(self.flags), **self.top_fields}
        weights = self.weights
        if layout == "speculators":
            config = {"transformer_layer_config": layer, "speculators_model_type": "eagle3"} | top
            weights = {k.replace("midlayer.", "layers.0."): v for k, v in weights.items()}
        else:
            config = layer | top
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors")
        return str(folder)


def tiny_head(family: str = "llama", flags: Flags = Flags(), *, seed: int = 0) -> TinyHead:
    """A head for tests.factories' tiny models, without an embedding of its own."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(out: int, into: int) -> Tensor:
        return torch.randn(out, into, generator=generator) * 0.3

    def norm(size: int) -> Tensor:
        return 0.5 + torch.rand(size, generator=generator)

    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    weights = {
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "midlayer.hidden_norm.weight": norm(HIDDEN),
        "midlayer.input_layernorm.weight": norm(HIDDEN),
        "midlayer.post_attention_layernorm.weight": norm(HIDDEN),
        "midlayer.self_attn.q_proj.weight": matrix(queries, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": matrix(keys, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": matrix(keys, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": matrix(HIDDEN, queries),
        "midlayer.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
        "midlayer.mlp.up_proj.weight": matrix(MLP, HIDDEN),
        "midlayer.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": matrix(DRAFT_VOCAB, HIDDEN),
        "d2t": ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }
    if family == "qwen3":
        for name in "qk":
            weights[f"midlayer.self_attn.{name}_norm.weight"] = norm(HEAD_DIM)
    if flags.norm_before_fc:
        weights["input_norm.weight"] = norm(3 * HIDDEN)
    if flags.fc_norm:
        weights |= {f"fc_norm.{i}.weight": norm(HIDDEN) for i in range(3)}
    return TinyHead(weights, family, flags)


class Reference:
    """The head as eagle3's paper and speculators' training code compute it: float32, one sequence,
    everything recomputed at every call."""

    def __init__(self, head: TinyHead, embedding: Tensor, theta: float = 10000.0) -> None:
        self._w, self._flags, self._family = head.weights, head.flags, head.family
        self._embedding, self._theta = embedding, theta

    def _rms(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self._w[f"{name}.weight"], EPS)

    def project(self, states: Tensor) -> Tensor:
        """[T, 3 * HIDDEN] -> [T, HIDDEN]."""
        if self._flags.norm_before_fc:
            states = self._rms(states, "input_norm")
        if self._flags.fc_norm:
            parts = states.chunk(3, -1)
            states = torch.cat([self._rms(x, f"fc_norm.{i}") for i, x in enumerate(parts)], -1)
        return states @ self._w["fc.weight"].T

    def forward(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [T] and the states [T, HIDDEN] before them -> the states after them, and the
        log-probabilities [T, DRAFT_VOCAB] of what follows each."""
        embedded = self._rms(self._embedding[tokens], "midlayer.input_layernorm")
        normed = self._rms(states, "midlayer.hidden_norm")
        residual = normed if self._flags.norm_before_residual else states
        x = residual + self._attention(torch.cat((embedded, normed), -1))
        h = self._rms(x, "midlayer.post_attention_layernorm")
        gate = F.silu(h @ self._w["midlayer.mlp.gate_proj.weight"].T)
        up = h @ self._w["midlayer.mlp.up_proj.weight"].T
        x = x + (gate * up) @ self._w["midlayer.mlp.down_proj.weight"].T
        normed = self._rms(x, "norm")
        logprobs = (normed @ self._w["lm_head.weight"].T).log_softmax(-1)
        return (normed if self._flags.norm_output else x), logprobs

    def _attention(self, x: Tensor) -> Tensor:
        def heads(name: str, count: int) -> Tensor:
            y = x @ self._w[f"midlayer.self_attn.{name}_proj.weight"].T
            y = y.view(len(x), count, HEAD_DIM)
            if self._family == "qwen3" and name in "qk":
                y = self._rms(y, f"midlayer.self_attn.{name}_norm")
            return (y if name == "v" else self._rotate(y)).transpose(0, 1)

        q, k, v = heads("q", HEADS), heads("k", KV_HEADS), heads("v", KV_HEADS)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 0) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(0, 1).reshape(len(x), -1)
        return out @ self._w["midlayer.self_attn.o_proj.weight"].T

    def _rotate(self, x: Tensor) -> Tensor:
        inverse = self._theta ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(len(x))[:, None, None] * inverse
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
