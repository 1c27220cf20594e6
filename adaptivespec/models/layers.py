"""The parts of a decoder layer, for inference: linear maps, attention block, gated MLP.

A packed batch has T rows. Weights are given as a dict by Hugging Face's names; `weights` of a part
are looked up behind its prefix.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from adaptivespec.models.attention import Context
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.rope import rotate

Linear = Callable[[Tensor], Tensor]
Weights = dict[str, Tensor]

_PACK_ROWS = 16
"""Batch rows that packed weights are laid out for; measured: no loss from 1 to 256 rows."""


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """x [T, in] -> x @ weight.T + bias, [T, out]. bf16 weights on a CPU are laid out once as
    oneDNN wants them (same results): without it every call does so anew, at twice the time."""
    if (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        linear = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: linear(x, packed, bias, "none", [], "")
    return partial(F.linear, weight=weight, bias=bias)


def fused_linear(weights: Weights, *names: str) -> Linear:
    """One linear map that computes those named `names` side by side, biases where they have any."""
    weight = torch.cat([weights[f"{name}.weight"] for name in names])
    biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
    return make_linear(weight, torch.cat(biases) if biases else None)


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

    def __call__(self, x: Tensor, angles: tuple[Tensor, Tensor], context: Context) -> Tensor:
        """x [T, in] -> [T, hidden]; hands the rows' keys and values to `context`."""
        qkv = self._qkv(x).unflatten(1, (-1, self._dim))
        qk = qkv[:, : self._rotated]
        if self._qk_norm is not None:
            qk.copy_(F.rms_norm(qk, (self._dim,), None, self._eps).mul_(self._qk_norm))
        rotate(qk, *angles)
        context.write(self._layer, qkv[:, self._heads :])
        return self._out(context.attend(self._layer, qkv[:, : self._heads], self._scale))


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
        self._shape = tuple(weight.shape)
        self._scaled = weight.float() * weight.numel() ** 0.5
        self._least = torch.tensor(weight.numel() * eps, device=weight.device).sqrt()

    def __call__(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return F.rms_norm(x, self._shape, self._weight, self._eps)
        # torch has no kernel for CPUs and composes ten operators; these are six.
        wide = x.float()
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).hypot_(self._least)
        return (wide / length).mul_(self._scaled).to(x.dtype)
