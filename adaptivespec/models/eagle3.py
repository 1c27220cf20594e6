"""EAGLE-3 draft heads (arXiv 2503.01840): one decoder layer that reads the target's hidden states.

A head has two parts on two sides. The `StateProjector` (`fc`) runs beside the target and turns
three of its hidden states into one of the head's size, so that only that one travels. The
`Eagle3Head` runs in the drafter: it pairs a state with the token that follows it and predicts the
token after that.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adaptivespec.engine.cache import KVCache
from adaptivespec.kernels import passes
from adaptivespec.kernels.linear import as_array
from adaptivespec.kernels.stack import Linear, Stack, compiles_layers
from adaptivespec.models.attention import Packing, Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.eagle3_config import HeadConfig, read_head_config
from adaptivespec.models.eagle3_weights import EMBEDDING, load_head_weights, load_projector_weights
from adaptivespec.models.layers import MLP, RMSNorm, SelfAttention, Weights, make_linear, make_norm
from adaptivespec.models.loading import load_model
from adaptivespec.models.rope import Rope
from adaptivespec.models.sources import resolve


class StateProjector:
    """The target's side of a head: hidden states of `layers` -> one row of `state_size`."""

    def __init__(self, config: HeadConfig, weights: Weights) -> None:
        self.layers = config.aux_layers
        """Target layers whose *inputs* are read, in this order."""
        self.state_size = config.layer.hidden_size
        eps = config.layer.rms_norm_eps
        self._fc = make_linear(weights["fc.weight"])
        self._norm = make_norm(weights["input_norm.weight"], eps) if config.norm_before_fc else None
        self._norms = [
            make_norm(weights[f"fc_norm.{i}.weight"], eps)
            for i in range(len(self.layers) if config.fc_norm else 0)
        ]

    @torch.inference_mode()
    def __call__(self, states: Tensor) -> Tensor:
        """states [T, len(layers) * target hidden size], side by side -> [T, state_size]."""
        if self._norm is not None:
            states = self._norm(states)
        if self._norms:
            chunks = states.chunk(len(self._norms), -1)
            normed = (n(c.contiguous()) for n, c in zip(self._norms, chunks, strict=True))
            states = torch.cat(list(normed), -1)
        return self._fc(states).to(states.dtype)


class Eagle3Head:
    """The drafter's side of a head. Keeps no state: keys and values live in the caller's cache."""

    def __init__(self, config: HeadConfig, weights: Weights, embedding: Tensor) -> None:
        layer = config.layer
        self.config = config
        self.dtype, self.device = embedding.dtype, embedding.device
        rope = Rope(layer.head_dim, layer.rope_theta, layer.rope_scaling, self.dtype, self.device)
        midlayer = {
            name.removeprefix("midlayer."): weight
            for name, weight in weights.items()
            if name.startswith("midlayer.")
        }
        compiled = compiles_layers(layer, self.dtype, self.device)
        make = _CompiledHead if compiled else _TorchHead
        outer = weights["norm.weight"], weights["lm_head.weight"]
        self._run = make(config, midlayer, *outer, embedding, rope)
        ids = torch.arange(config.draft_vocab_size, device=self.device)
        self.target_ids = ids + weights["d2t"] if "d2t" in weights else ids
        """int64 [draft vocabulary]: the target's id of each draft token."""

    def new_cache(self, tokens: int) -> KVCache:
        """A cache of `tokens` positions for this head."""
        layer = self.config.layer
        return KVCache(1, layer.kv_heads, layer.head_dim, tokens, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        wanted: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        """One pass over tokens int64 [T], the target's ids, each with the state [T, H] before it: a
        projected one of the target, or this function's own result for the token before. `positions`
        int64 [T] are those of the states. Returns the states [T, H] after the tokens, and the
        logits [R, draft vocabulary] of the R rows `wanted`."""
        return self._run(tokens, states, positions, cache, segments, wanted)


class _CompiledHead:
    def __init__(
        self,
        config: HeadConfig,
        midlayer: Weights,
        norm: Tensor,
        output: Tensor,
        embedding: Tensor,
        rope: Rope,
    ) -> None:
        self._config = config
        self._stack = Stack(config.layer, [midlayer], rope)
        self._norm = norm.float().numpy()
        self._output = Linear(output)
        self._embedding = as_array(embedding)
        self._token_norm = midlayer["input_layernorm.weight"].float().numpy()
        self._state_norm = midlayer["hidden_norm.weight"].float().numpy()

    def __call__(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        wanted: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        stack, output = self._stack, self._output
        batch, buffers = stack.batch(positions, cache, segments)
        # where the states are to be normed, all rows are, whether their logits are wanted or not
        rows = range(len(tokens)) if self._config.norm_output else wanted
        out = torch.empty((len(tokens), stack.sizes.hidden), dtype=cache.dtype)
        normed = torch.empty((len(rows), stack.sizes.hidden), dtype=cache.dtype)
        logits = torch.empty((len(rows), len(output.bias)))
        stack.team.run(
            passes.head,
            stack.counters,
            tokens.numpy(),
            self._embedding,
            as_array(states.contiguous()),
            self._token_norm,
            self._state_norm,
            self._config.norm_before_residual,
            stack.sizes,
            stack.layers,
            self._norm,
            output.weight,
            output.bias,
            batch,
            buffers,
            as_array(cache.arena),
            np.array(rows, dtype=np.int64),
            as_array(out),
            as_array(normed),
            logits.numpy(),
        )
        logits = logits[:, : output.out]
        return (normed, logits[wanted]) if self._config.norm_output else (out, logits)


class _TorchHead:
    def __init__(
        self,
        config: HeadConfig,
        midlayer: Weights,
        norm: Tensor,
        output: Tensor,
        embedding: Tensor,
        rope: Rope,
    ) -> None:
        def make(weight: Tensor) -> RMSNorm:
            return RMSNorm(weight, config.layer.rms_norm_eps)

        self._config = config
        self._embedding = embedding
        self._token_norm = make(midlayer["input_layernorm.weight"])
        self._state_norm = make(midlayer["hidden_norm.weight"])
        self._mlp_norm = make(midlayer["post_attention_layernorm.weight"])
        self._attention = SelfAttention(config.layer, midlayer, "self_attn.", 0)
        self._mlp = MLP(midlayer, "mlp.")
        self._norm, self._output = make(norm), output
        self._rope = rope

    def __call__(
        self,
        tokens: Tensor,
        states: Tensor,
        positions: Tensor,
        cache: KVCache,
        segments: Sequence[Segment],
        wanted: Sequence[int],
    ) -> tuple[Tensor, Tensor]:
        layer = self._config.layer
        packing = Packing(cache, segments, layer.heads // layer.kv_heads)
        normed = self._state_norm(states)
        x = torch.cat((self._token_norm(F.embedding(tokens, self._embedding)), normed), -1)
        residual = normed if self._config.norm_before_residual else states
        x = residual + self._attention(x, self._rope.angles(positions), packing)
        x = x + self._mlp(self._mlp_norm(x))
        final = self._norm(x)
        logits = F.linear(final[torch.tensor(wanted, device=x.device)], self._output)
        return final if self._config.norm_output else x, logits


def load_projector(
    path: str,
    target: DecoderConfig,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> StateProjector:
    """The target's side of the head at `path`, a folder or hub id; nothing else of it is read.
    Raises ConfigError if it does not fit the target, or weights are missing or misshapen."""
    location = resolve(path)
    config = read_head_config(location, target)
    return StateProjector(config, load_projector_weights(location, config, dtype, device))


def load_head(
    path: str,
    target_path: str,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Eagle3Head:
    """The drafter's side of the head at `path`, with the embedding of the target at `target_path`
    unless it has its own. Raises ConfigError if head and target do not fit, or weights are missing,
    surplus or misshapen."""
    location = resolve(path)
    target, embedding = load_model(target_path, dtype, device, only=[EMBEDDING])
    config = read_head_config(location, target)
    weights = load_head_weights(location, config, dtype, device)
    own = weights.get("embed_tokens.weight")
    return Eagle3Head(config, weights, embedding[EMBEDDING] if own is None else own)
