"""Rotary position embedding (arXiv 2104.09864) and the ways of stretching it to longer contexts."""

import math
from typing import Any

import torch
from torch import Tensor

from adaptivespec.errors import ConfigError
from adaptivespec.models.config import ROPE_KEYS


class Rope:
    """Turns positions into rotation angles. There is no table, so no position is too large."""

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: dict[str, Any] | None,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        frequencies, self._amplitude = inverse_frequencies(head_dim, theta, scaling)
        self._frequencies = frequencies.to(device)
        self._dtype = dtype

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, head_dim] for int64 positions [T]; sin carries the sign with which
        `rotate` adds the other half."""
        cos, sin = self.halves(positions)
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos[:, None].to(self._dtype), sin[:, None].to(self._dtype)

    def halves(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32 [T, head_dim / 2], for int64 positions [T]."""
        angles = positions[:, None] * self._frequencies
        return angles.cos() * self._amplitude, angles.sin() * self._amplitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [T, heads, head_dim] in place; pairs are (i, i + head_dim / 2), as Hugging Face has
    them."""
    other_half = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(other_half, sin)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: dict[str, Any] | None
) -> tuple[Tensor, float]:
    """Angle per position float32 [head_dim / 2], and the factor on cos and sin (yarn's attention
    temperature, else 1). The formulas are those of transformers' modeling_rope_utils. Raises
    ConfigError for an unknown kind of scaling."""
    plain = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return plain, 1.0
    match scaling["rope_type"]:
        case "linear":
            return plain / scaling["factor"], 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, head_dim, theta, scaling)
        case kind:
            raise ConfigError(f"rope_type: {kind!r} is not supported; one of {list(ROPE_KEYS)}")


def _llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Llama 3.1: long waves are stretched, short ones kept, those between interpolated."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * ((1 - kept) / scaling["factor"] + kept)


def _yarn(
    plain: Tensor, head_dim: int, theta: float, scaling: dict[str, Any]
) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071), sections 3.2 (the ramp) and 3.4 (the attention temperature)."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(scaling.get("beta_fast") or 32)
    high = dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    frequencies = plain * (stretched / factor + 1 - stretched)
    return frequencies, _yarn_amplitude(factor, scaling)


def _yarn_amplitude(factor: float, scaling: dict[str, Any]) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return temperature(mscale) / temperature(all_dims) if mscale and all_dims else temperature(1)
