"""Layers ready for the kernels: packed weights, working memory, and batches laid out."""

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from adaptivespec.engine.cache import KVCache
from adaptivespec.kernels import attention, passes
from adaptivespec.kernels.emit import LANES, WIDE_ROWS
from adaptivespec.kernels.layer import PHASES, Batch, Buffers, Layers, Sizes
from adaptivespec.kernels.linear import PANEL, Array, as_array, packed
from adaptivespec.kernels.products import MOST_ROWS, PANELS, QUERIES
from adaptivespec.kernels.team import Team
from adaptivespec.models.attention import Segment
from adaptivespec.models.config import DecoderConfig
from adaptivespec.models.rope import Rope

Weights = dict[str, Tensor]


@cache
def _team(threads: int) -> Team:
    return Team(threads)


def team() -> Team:
    """As many threads as torch has now, shared by all that asks for so many."""
    return _team(torch.get_num_threads())


def compiles(dtype: torch.dtype, device: torch.device, *sizes: int) -> bool:
    """Whether there are kernels: on a CPU, in bfloat16 or float32, for sizes that fill vectors."""
    known = device.type == "cpu" and dtype in (torch.bfloat16, torch.float32)
    return known and all(size % LANES == 0 for size in sizes)


def compiles_layers(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there are kernels for such layers."""
    sizes = config.hidden_size, config.intermediate_size, config.head_dim
    return compiles(dtype, device, *sizes)


class Linear:
    """x [R, in] -> float32 x @ weight.T [R, out]."""

    def __init__(self, weight: Tensor) -> None:
        self.out = len(weight)
        self.weight = as_array(packed(weight))
        self.bias = np.zeros(len(self.weight) * PANEL, np.float32)
        self._team = team()
        self._counters = self._team.counters(1)
        self._tile = np.empty((self._team.threads, MOST_ROWS, PANELS * PANEL), np.float32)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty((len(x), len(self.bias)))
        rows = x.float() if WIDE_ROWS else x
        arrays = as_array(rows.contiguous()), self.weight, self.bias, out.numpy(), self._tile
        self._team.run(passes.linear, self._counters, *arrays)
        return out[:, : self.out]


class RMSNorm:
    """x [R, H] / rms(x) * weight."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps = weight.float().numpy(), eps
        self._wide = np.empty_like(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        passes.rms_norm(as_array(x), self._weight, self._eps, self._wide, as_array(out))
        return out


class Stack:
    """Layers of one shape on a CPU. One pass at a time."""

    def __init__(self, config: DecoderConfig, layers: Iterable[Weights], rope: Rope) -> None:
        """`layers`: config.layers times the weights of a layer, by Hugging Face's names within one.
        Their first linear map may be wider than the hidden size (an EAGLE-3 head's is)."""
        self.sizes = Sizes(
            config.heads,
            config.kv_heads,
            config.head_dim,
            config.hidden_size,
            config.intermediate_size,
            config.rms_norm_eps,
            np.float32(config.head_dim**-0.5),
        )
        self.layers = Layers(*map(as_array, _stacked(map(_fields(config), layers), config.layers)))
        self.team = team()
        self.counters = self.team.counters(PHASES * config.layers + passes.EXTRA_PHASES)
        self._rope = rope
        self._angles: tuple[Array, ...] = (np.empty(0), np.empty(0))  # of positions 0, 1, ...
        self._widest = self.layers.qkv.shape[2] * self.layers.qkv.shape[-1]
        self._buffers = self._allocate(16, 512)

    def batch(
        self, positions: Tensor, cache: KVCache, segments: Sequence[Segment]
    ) -> tuple[Batch, Buffers]:
        """Reserve the rows of `segments` in the cache, and say what they see."""
        sizes = self.sizes
        group = sizes.heads // sizes.kv_heads
        table = np.empty((len(segments), attention.COLUMNS), np.int64)
        masks: list[Array] = []
        slots = np.empty(len(positions), np.int64)
        units = seen = longest = 0
        for line, segment in zip(table, segments, strict=True):
            rows = segment.stop - segment.start
            start, end = cache.extend(segment.request, rows)
            slots[segment.start : segment.stop] = np.arange(end - rows, end)
            mask, covered = -1, 0
            if segment.mask is not None:
                mask, covered = seen, segment.mask.shape[1]
                masks.append(segment.mask.numpy().ravel())
                seen += rows * covered
            line[:] = segment.start, segment.stop, start, end, mask, covered, units
            units += attention.units(rows, group, sizes.kv_heads)
            longest = max(longest, end - start)
        flat = np.concatenate(masks).view(np.uint8) if masks else np.empty(0, np.uint8)
        batch = Batch(slots, *self._angles_at(positions.numpy()), table, flat, units)
        rows, keys = len(self._buffers.x), self._buffers.scores.shape[1]
        if len(positions) > rows or longest > keys:
            more = (
                max(n, 2 * m) if n > m else m for n, m in ((len(positions), rows), (longest, keys))
            )
            self._buffers = self._allocate(*more)
        return batch, self._buffers

    def _angles_at(self, positions: Array) -> tuple[Array, Array]:
        """cos and sin, float32 [T, head_dim / 2] each, of positions int64 [T]."""
        cos, sin = self._angles
        if (last := int(positions.max(initial=0))) >= len(cos):
            more = torch.arange(2 * last + 512)
            cos, sin = self._angles = tuple(half.numpy() for half in self._rope.halves(more))
        return cos[positions], sin[positions]

    def _allocate(self, rows: int, keys: int) -> Buffers:
        """For passes of up to `rows` rows over up to `keys` keys of a request."""
        s, kind = self.sizes, self.layers.qkv.dtype
        per_step, threads = self.layers.qkv.shape[-1], self.team.threads

        def wide(*shape: int) -> Array:
            return np.zeros(shape, np.float32)

        def factors(*shape: int) -> Array:
            return np.zeros(shape, np.float32 if WIDE_ROWS else kind)

        return Buffers(
            x=wide(rows, _panels(s.hidden))[:, : s.hidden],
            normed=factors(rows, self._widest),
            qkv=wide(rows, _panels((s.heads + 2 * s.kv_heads) * s.head_dim)),
            attended=factors(rows, s.heads * s.head_dim),
            gated=factors(rows, s.intermediate),
            tile=wide(threads, MOST_ROWS, PANELS * PANEL),
            zeros=wide(LANES),
            scores=wide(threads, keys, LANES),
            panel=np.zeros((threads, s.head_dim // per_step, LANES, per_step), kind),
            sums=wide(threads, LANES),
            block=wide(threads, QUERIES, s.head_dim),
        )


def _panels(outputs: int) -> int:
    """The outputs of whole panels."""
    return -(-outputs // PANEL) * PANEL


def _fields(config: DecoderConfig) -> Callable[[Weights], list[Tensor]]:
    """A function from the weights of one layer to the fields of `Layers` for it."""

    def bias(weights: Weights, name: str, size: int) -> Tensor:
        own = weights.get(f"{name}.bias")
        return torch.zeros(size) if own is None else own.float()

    def whole(bias: Tensor) -> Tensor:
        return F.pad(bias, (0, _panels(len(bias)) - len(bias)))

    def fields(w: Weights) -> list[Tensor]:
        qkv = [f"self_attn.{name}_proj" for name in "qkv"]
        weights = [w[f"{name}.weight"] for name in qkv]
        norms: list[Tensor] = []
        if config.qk_norm:
            norms = [w["self_attn.q_norm.weight"]] * config.heads
            norms += [w["self_attn.k_norm.weight"]] * config.kv_heads
        hidden, intermediate = config.hidden_size, config.intermediate_size
        mlp = ("mlp.gate_proj", "mlp.up_proj")
        gate_up = torch.stack([w[f"{name}.weight"].unflatten(0, (-1, LANES)) for name in mlp], 1)
        gate_up_bias = [bias(w, name, intermediate).unflatten(0, (-1, LANES)) for name in mlp]
        return [
            w["input_layernorm.weight"].float(),
            packed(torch.cat(weights)),
            whole(torch.cat([bias(w, n, len(p)) for n, p in zip(qkv, weights, strict=True)])),
            torch.stack(norms).float() if norms else torch.zeros(0, config.head_dim),
            packed(w["self_attn.o_proj.weight"]),
            whole(bias(w, "self_attn.o_proj", hidden)),
            w["post_attention_layernorm.weight"].float(),
            packed(gate_up.flatten(0, 2)),
            whole(torch.stack(gate_up_bias, 1).flatten()),
            packed(w["mlp.down_proj.weight"]),
            whole(bias(w, "mlp.down_proj", hidden)),
        ]

    return fields


def _stacked(layers: Iterable[list[Tensor]], count: int) -> list[Tensor]:
    """The fields of all layers, each [count, ...], made one layer at a time."""
    stacked: list[Tensor] = []
    for i, fields in enumerate(layers):
        if not stacked:
            stacked = [field.new_empty((count, *field.shape)) for field in fields]
        for whole, field in zip(stacked, fields, strict=True):
            whole[i] = field
    return stacked
