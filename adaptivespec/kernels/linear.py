"""Weights, laid out once in the order in which products read them."""

from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from adaptivespec.kernels.emit import LANES

VECTORS = 2
PANEL = VECTORS * LANES
"""Outputs of a chunk."""

Array = NDArray[Any]


def as_array(tensor: Tensor) -> Array:
    """A tensor's memory: float32, or the bits of bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def packed(weight: Tensor) -> Tensor:
    """weight [out, in] -> [panels, steps, VECTORS, LANES, elements of a step], as `product` reads
    it. Outputs beyond the last are zeros; an odd input in bfloat16 is none of ours."""
    out, inputs = weight.shape
    per_step = elements_per_step(weight.dtype)
    panels = -(-out // PANEL)
    padded = F.pad(weight, (0, 0, 0, panels * PANEL - out))
    blocks = padded.view(panels, VECTORS, LANES, inputs // per_step, per_step)
    return blocks.permute(0, 3, 1, 2, 4).contiguous()


def elements_per_step(dtype: torch.dtype) -> int:
    """Inputs that one step of a product takes (see `product`)."""
    return 2 if dtype == torch.bfloat16 else 1
