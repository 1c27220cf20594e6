"""Passes over a packed batch: a decoder's, an EAGLE-3 head's, and output layers."""

from typing import Any

from numba import njit

from adaptivespec.kernels.layer import (
    STORE,
    Batch,
    Buffers,
    Layers,
    Sizes,
    normalise,
    normalise_rows,
    project,
    run_layer,
)
from adaptivespec.kernels.team import Counters, claim, finish
from adaptivespec.kernels.vectors import narrow, widen

EXTRA_PHASES = 4
"""Of a pass, beside those of its layers."""


@njit(nogil=True, cache=True)
def decode(
    counters: Counters, tokens: Any, embedding: Any, sizes: Sizes, layers: Layers, norm: Any,
    batch: Batch, buffers: Buffers, arena: Any, aux_layers: Any, aux: Any, final: Any, rank: int,
) -> None:  # fmt: skip
    """tokens int64 [T] -> `final` [T, hidden], normed, and the inputs of the asked layers side by
    side, `aux` [T, len(aux_layers), hidden]. arena: [L, 2 * kv_heads, positions, head_dim]."""
    rows, x, like = len(tokens), buffers.x, embedding[0, 0]
    done = 0
    m = claim(counters, 0, rows, rank)
    while m < rows:
        _widen_row(embedding[tokens[m]], x[m])
        done += 1
        m = claim(counters, 0, rows, rank)
    phase = finish(counters, 0, done, rows)
    for layer in range(len(layers.qkv)):
        done = 0
        m = claim(counters, phase, rows, rank)
        while m < rows:
            inputs = buffers.normed[m, : sizes.hidden]
            normalise(x[m], layers.input_norm[layer], sizes.eps, like, inputs)
            for a in range(len(aux_layers)):
                if aux_layers[a] == layer:
                    _narrow_row(x[m], aux[m, a])
            done += 1
            m = claim(counters, phase, rows, rank)
        phase = finish(counters, phase, done, rows)
        phase = run_layer(
            counters, phase, layer, rows, sizes, layers, batch, buffers, arena[layer], rank
        )
    normalise_rows(counters, phase, rows, x, norm, sizes.eps, like, final, rank)


@njit(nogil=True, cache=True)
def head(
    counters: Counters, tokens: Any, embedding: Any, states: Any, token_norm: Any, state_norm: Any,
    residual_normed: bool, sizes: Sizes, layers: Layers, norm: Any, output: Any, zeros: Any,
    batch: Batch, buffers: Buffers, arena: Any, wanted: Any, out: Any, normed: Any, logits: Any,
    rank: int,
) -> None:  # fmt: skip
    """An EAGLE-3 head: tokens int64 [T], each with the state [T, hidden] before it -> the states
    `out` [T, hidden] after them, those of the rows `wanted` int64 [R] `normed`, and their float32
    logits [R, panels * PANEL] by the packed weights `output`."""
    rows, width, x, like = len(tokens), sizes.hidden, buffers.x, embedding[0, 0]
    done = 0
    m = claim(counters, 0, rows, rank)
    while m < rows:
        inputs = buffers.normed[m]
        _widen_row(embedding[tokens[m]], x[m])
        normalise(x[m], token_norm, sizes.eps, like, inputs[:width])
        _widen_row(states[m], x[m])
        normalise(x[m], state_norm, sizes.eps, like, inputs[width : 2 * width])
        if residual_normed:
            _widen_row(inputs[width : 2 * width], x[m])
        done += 1
        m = claim(counters, 0, rows, rank)
    phase = finish(counters, 0, done, rows)
    phase = run_layer(counters, phase, 0, rows, sizes, layers, batch, buffers, arena[0], rank)
    chunks, done = rows + len(wanted), 0
    m = claim(counters, phase, chunks, rank)
    while m < chunks:
        if m < rows:
            _narrow_row(x[m], out[m])
        else:
            inputs = buffers.normed[m - rows, :width]
            normalise(x[wanted[m - rows]], norm, sizes.eps, like, inputs)
            for i in range(width):
                normed[m - rows, i] = narrow(widen(inputs[i]), like, like)
        done += 1
        m = claim(counters, phase, chunks, rank)
    phase = finish(counters, phase, done, chunks)
    tile = buffers.tile[rank]
    project(counters, phase, len(wanted), buffers.normed, output, zeros, logits, tile, STORE, rank)


@njit(nogil=True, cache=True)
def linear(counters: Counters, x: Any, w: Any, bias: Any, out: Any, tile: Any, rank: int) -> None:
    """float32 out [R, panels * PANEL] = x [R, inputs] @ w.T + bias, w packed."""
    project(counters, 0, len(x), x, w, bias, out, tile[rank], STORE, rank)


@njit(nogil=True, cache=True)
def rms_norm(x: Any, weight: Any, eps: float, wide: Any, out: Any) -> None:
    """`normalise` for rows of elements x [R, H], in one thread; `wide`: float32 [H]."""
    for m in range(len(x)):
        _widen_row(x[m], wide)
        normalise(wide, weight, eps, x[0, 0], out[m])


@njit(nogil=True)
def _widen_row(x: Any, out: Any) -> None:
    for i in range(len(x)):
        out[i] = widen(x[i])


@njit(nogil=True)
def _narrow_row(x: Any, out: Any) -> None:
    for i in range(len(out)):
        out[i] = narrow(x[i], out[0], out[0])
