"""The phases of a decoder layer (see `Team`), over the rows of a packed batch.

Activations are float32 between linear maps; what enters a linear map or the cache has the weights'
dtype.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from adaptivespec.kernels import attention
from adaptivespec.kernels.emit import LANES
from adaptivespec.kernels.linear import PANEL, Array
from adaptivespec.kernels.products import (
    FEW_ROWS,
    MOST_ROWS,
    PANELS,
    WIDE_FROM_MEMORY,
    product,
    wide_product,
)
from adaptivespec.kernels.team import Counters, claim, finish
from adaptivespec.kernels.vectors import add_rows, gate_rows, narrow, sum_of_squares

PHASES = 8
"""Of one layer."""


class Layers(NamedTuple):
    """Weights of L layers, packed (see `linear.packed`), and float32 biases and norms."""

    input_norm: Array  # [L, hidden]
    qkv: Array
    qkv_bias: Array  # [L, (heads + 2 * kv_heads) * head_dim]
    qk_norm: Array  # [L, heads + kv_heads, head_dim]; [L, 0, head_dim]: none
    out: Array
    out_bias: Array
    mlp_norm: Array
    gate_up: Array  # a panel is LANES gates, then their ups
    gate_up_bias: Array
    down: Array
    down_bias: Array


class Sizes(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    eps: float
    scale: np.float32


class Batch(NamedTuple):
    """The rows of one pass, and what they see."""

    slots: Array  # int64 [T], arena positions that the rows' keys and values go to
    cos: Array  # float32 [T, head_dim / 2]
    sin: Array
    segments: Array  # int64 [S, attention.COLUMNS]
    masks: Array  # uint8
    units: int


class Buffers(NamedTuple):
    """What the phases of a pass hand on, for T rows at least, and what each thread works in. What
    `project` writes to has room for whole panels."""

    x: Array  # float32 [T, hidden], the residual stream
    normed: Array  # [T, widest input]; this and the next two: rows of products
    qkv: Array  # float32 [T, (heads + 2 * kv_heads) * head_dim]
    attended: Array  # [T, heads * head_dim]
    gated: Array  # [T, intermediate]
    tile: Array  # float32 [threads, MOST_ROWS, PANELS * PANEL]
    zeros: Array  # float32 [LANES]
    scores: Array  # float32 [threads, keys, LANES]
    panel: Array  # [threads, steps, LANES, elements]
    sums: Array  # float32 [threads, LANES]
    block: Array  # float32 [threads, attention.QUERIES, head_dim]


@njit(nogil=True)
def normalise(x: Any, weight: Any, eps: float, like: Any, out: Any) -> None:
    """out = x / rms(x) * weight over one row, float32, rounded to elements like `like`."""
    mean = sum_of_squares(x.ctypes.data, len(x) // LANES) / np.float32(len(x))
    share = np.float32(1) / np.sqrt(mean + np.float32(eps))
    for i in range(len(x)):
        out[i] = narrow(x[i] * share * weight[i], like, out[0])


@njit(nogil=True)
def normalise_rows(
    counters: Counters, phase: int, rows: int, x: Any, weight: Any, eps: float, like: Any, out: Any,
    rank: int,
) -> int:  # fmt: skip
    """A phase: `normalise` for every row."""
    done = 0
    m = claim(counters, phase, rows, rank)
    while m < rows:
        normalise(x[m], weight, eps, like, out[m])
        done += 1
        m = claim(counters, phase, rows, rank)
    return finish(counters, phase, done, rows)


STORE, ADD, GATE = range(3)
"""What becomes of a product: `out` is it, it is added to `out`, or it is gates and ups, and `out`
is silu(gate) * up."""


@njit(nogil=True)
def project(
    counters: Counters, phase: int, rows: int, x: Any, w: Any, bias: Any, out: Any, tile: Any,
    what: int, rank: int,
) -> int:  # fmt: skip
    """A phase: x @ w.T + bias, and `what` becomes of it. `out` is float32, elements for GATE; its
    rows have room for whole panels."""
    panels, done, like = len(w), 0, w[0, 0, 0, 0, 0]
    chunks = -(-panels // PANELS)
    from_x, x_stride, from_w, w_stride = x.ctypes.data, x.strides[0], w.ctypes.data, w.strides[0]
    from_bias, temporary, tile_stride = bias.ctypes.data, tile.ctypes.data, tile.strides[0]
    to, stride, width = out.ctypes.data, out.strides[0], PANEL * out.itemsize
    if what == GATE:
        width //= 2
    chunk = claim(counters, phase, chunks, rank)
    while chunk < chunks:
        first, last = PANELS * chunk, min(PANELS * (chunk + 1), panels)
        m = 0
        while m < rows:
            count = min(MOST_ROWS, rows - m)
            few = count <= FEW_ROWS and last - first == PANELS
            together = PANELS if few and (WIDE_FROM_MEMORY or m > 0) else 1
            for p in range(first, last, together):
                place = to + m * stride + p * width
                made, made_stride = temporary, tile_stride
                if what == STORE:
                    made, made_stride = place, stride
                if together == PANELS:
                    wide_product(
                        like, count, from_x + m * x_stride, x_stride, from_w + p * w_stride,
                        w_stride, from_bias + p * 4 * PANEL, made, made_stride, w.shape[1],
                    )  # fmt: skip
                else:
                    product(
                        like, count, from_x + m * x_stride, x_stride, from_w + p * w_stride,
                        w_stride, from_bias + p * 4 * PANEL, made, made_stride, w.shape[1],
                    )  # fmt: skip
                if what != STORE:
                    for i in range(together):
                        one, its_place = made + i * 4 * PANEL, place + i * width
                        if what == ADD:
                            add_rows(count, one, made_stride, its_place, stride)
                        else:
                            gate_rows(like, count, one, made_stride, its_place, stride)
            m += count
        done += 1
        chunk = claim(counters, phase, chunks, rank)
    return finish(counters, phase, done, chunks)


@njit(nogil=True)
def _rotate_and_store(
    m: int, layer: int, sizes: Sizes, layers: Layers, batch: Batch, qkv: Any, arena: Any
) -> None:
    """Turn a row's queries and keys by its position, and put keys and values into the cache."""
    dim, half = sizes.head_dim, sizes.head_dim // 2
    turned = sizes.heads + sizes.kv_heads
    cos, sin, slot = batch.cos[m], batch.sin[m], batch.slots[m]
    for head in range(turned):
        part = qkv[m, head * dim : (head + 1) * dim]
        if layers.qk_norm.shape[1]:
            mean = sum_of_squares(part.ctypes.data, dim // LANES) / np.float32(dim)
            share = np.float32(1) / np.sqrt(mean + np.float32(sizes.eps))
            for d in range(dim):
                part[d] *= share * layers.qk_norm[layer, head, d]
        for d in range(half):
            low, high = part[d], part[half + d]
            part[d] = low * cos[d] - high * sin[d]
            part[half + d] = high * cos[d] + low * sin[d]
    for head in range(2 * sizes.kv_heads):
        part = qkv[m, (sizes.heads + head) * dim : (sizes.heads + head + 1) * dim]
        to = arena[head, slot]
        for d in range(dim):
            to[d] = narrow(part[d], arena[0, 0, 0], arena[0, 0, 0])


@njit(nogil=True)
def run_layer(
    counters: Counters, phase: int, layer: int, rows: int, sizes: Sizes, layers: Layers,
    batch: Batch, buffers: Buffers, arena: Any, rank: int,
) -> int:  # fmt: skip
    """All phases but the first norm: buffers.normed -> buffers.x. arena: [2 * kv_heads, positions,
    head_dim], this layer's."""
    x, tile = buffers.x, buffers.tile[rank]
    phase = project(
        counters, phase, rows, buffers.normed, layers.qkv[layer], layers.qkv_bias[layer],
        buffers.qkv, tile, STORE, rank,
    )  # fmt: skip

    done = 0
    m = claim(counters, phase, rows, rank)
    while m < rows:
        _rotate_and_store(m, layer, sizes, layers, batch, buffers.qkv, arena)
        done += 1
        m = claim(counters, phase, rows, rank)
    phase = finish(counters, phase, done, rows)

    done, group = 0, sizes.heads // sizes.kv_heads
    unit = claim(counters, phase, batch.units, rank)
    while unit < batch.units:
        attention.attend(
            unit, buffers.qkv, arena, batch.segments, batch.masks, group, sizes.scale,
            buffers.scores[rank], buffers.panel[rank], buffers.zeros, buffers.sums[rank],
            buffers.block[rank], buffers.attended,
        )  # fmt: skip
        done += 1
        unit = claim(counters, phase, batch.units, rank)
    phase = finish(counters, phase, done, batch.units)

    phase = project(
        counters, phase, rows, buffers.attended, layers.out[layer], layers.out_bias[layer], x, tile,
        ADD, rank,
    )  # fmt: skip
    phase = normalise_rows(
        counters, phase, rows, x, layers.mlp_norm[layer], sizes.eps, arena[0, 0, 0], buffers.normed,
        rank,
    )  # fmt: skip
    phase = project(
        counters, phase, rows, buffers.normed, layers.gate_up[layer], layers.gate_up_bias[layer],
        buffers.gated, tile, GATE, rank,
    )  # fmt: skip
    return project(
        counters, phase, rows, buffers.gated, layers.down[layer], layers.down_bias[layer], x, tile,
        ADD, rank,
    )  # fmt: skip
