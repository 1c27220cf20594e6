"""The parts of a decoder layer, for inference: linear maps, attention block, gated MLP.

A packed batch has T rows. Weights are given as a dict by Hugging Face's names; `weights` of a part
are looked up behind its prefix.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from adaptivespec.kernels import stack as kernels
from adaptivespec.models.attention import Packing
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.rope import rotate

Linear = Callable[[Tensor], Tensor]
Weights = dict[str, Tensor]


def make_linear(weight: Tensor) -> Linear:
    """x [T, in] -> x @ weight.T, [T, out]; float32 where there are kernels for it."""
    compiled = kernels.compiles(weight.dtype, weight.device)
    return kernels.Linear(weight) if compiled else partial(F.linear, weight=weight)


def fused_linear(weights: Weights, *names: str) -> Linear:
    """One linear map that computes those named `names` side by side, biases where they have any."""
    weight = torch.cat([weights[f"{name}.weight"] for name in names])
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    return partial(F.linear, weight=weight, bias=torch.cat(biases) if biases else None)


class SelfAttention:
    """q, k, v, rotation, cache, attention and output projection. The input may be wider than the
    hidden size (an EAGLE-3 head's is twice as wide)."""

    def __init__(self, config: DecoderConfig, weights: Weights, prefix: str, layer: int) -> None:
        self._layer = layer
        self._heads, self._dim = config.heads, config.head_dim
        self._rotated = config.heads + config.kv_heads
        self._scale = config.head_dim**-0.5
        self._qkv = fused_linear(weights, *(f"{prefix}{name}_proj" for name in "qkv"))
        self._out = fused_linear(weights, f"{prefix}o_proj")
        self._eps = config.rms_norm_eps
        self._qk_norm: Tensor | None = None
        if config.qk_norm:
            q, k = weights[f"{prefix}q_norm.weight"], weights[f"{prefix}k_norm.weight"]
            self._qk_norm = torch.stack([q] * config.heads + [k] * config.kv_heads)

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], packing: Packing) -> Tensor:
        """x [T, in] -> [T, hidden]; puts the rows' keys and values into the cache."""
        qkv = self._qkv(x).view(len(x), -1, self._dim)
        qk = qkv[:, : self._rotated]
        if self._qk_norm is not None:
            qk.copy_(F.rms_norm(qk, (self._dim,), None, self._eps).mul_(self._qk_norm))
        rotate(qk, *angles)
        packing.write(self._layer, qkv[:, self._heads :])
        return self._out(packing.attend(self._layer, qkv[:, : self._heads], self._scale))


class MLP:
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._gate_up = fused_linear(weights, f"{prefix}gate_proj", f"{prefix}up_proj")
        self._down = fused_linear(weights, f"{prefix}down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        gate, up = self._gate_up(x).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up))


class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


def make_norm(weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    """x [R, H] / rms(x) * weight."""
    compiled = kernels.compiles(weight.dtype, weight.device, len(weight))
    return (kernels.RMSNorm if compiled else RMSNorm)(weight, eps)
