"""Elements and rows of them: conversion, softmax, SiLU, sums. An element is float32, or the bits of
a bfloat16, as uint16.
"""

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.extending import intrinsic

from adaptivespec.kernels.emit import (
    F32,
    I32,
    I64,
    LANES,
    VECTOR,
    WIDE_ROWS,
    Builder,
    Value,
    code,
    code_for,
    constant,
    exponential,
    fma,
    load,
    loop,
    narrowed,
    overloaded,
    splat,
    store,
    vector_of,
    widened,
)


@intrinsic
def widen(typing: Any, x: Any) -> Any:
    """An element of an activation, as float32."""
    if x == types.uint16:
        return types.float32(x), lambda context, b, signature, args: widened(b, args[0])
    return types.float32(types.float32), lambda context, b, signature, args: args[0]


@intrinsic
def narrow(typing: Any, x: Any, like: Any, to: Any) -> Any:
    """A float32, rounded to what an element like `like` can be, as one like `to`."""

    def generate(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        if like != types.uint16:
            return args[0]
        bits = narrowed(b, args[0])
        return bits if to == types.uint16 else widened(b, bits)

    return to(types.float32, like, to), generate


@intrinsic
def softmax(typing: Any, scores: Any, count: Any, scale: Any, sums: Any) -> Any:
    """Replace float32 scores [count, LANES] by exp(scale * (score - the lane's largest)), and store
    their sums [LANES]. What is hidden has the score -inf; in no lane all are."""
    kind = vector_of(F32)

    def generate(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        scores, count, scale, sums = args

        def row(i: Value) -> Value:
            return b.add(scores, b.mul(i, I64(VECTOR)))

        least = constant(kind, float("-inf"))
        (top,) = loop(
            b, count, [least], lambda i, t: [overloaded(b, "maxnum", t[0], load(b, row(i), kind))]
        )
        factor = splat(b, scale)

        def body(i: Value, totals: list[Value]) -> list[Value]:
            below = b.fsub(load(b, row(i), kind), top)
            weight = exponential(b, b.fmul(below, factor))
            store(b, weight, row(i))
            return [b.fadd(totals[0], weight)]

        (total,) = loop(b, count, [constant(kind, 0.0)], body)
        store(b, total, sums)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@intrinsic
def add_rows(typing: Any, rows: Any, x: Any, x_stride: Any, out: Any, out_stride: Any) -> Any:
    """Add float32 x [rows, 2 * LANES] to out."""

    def emit(
        b: Builder, rows: Value, x: Value, x_stride: Value, out: Value, out_stride: Value
    ) -> None:
        def body(i: Value, nothing: list[Value]) -> list[Value]:
            for n in range(2):
                to = b.add(b.add(out, b.mul(out_stride, i)), I64(VECTOR * n))
                added = b.add(b.add(x, b.mul(x_stride, i)), I64(VECTOR * n))
                kind = vector_of(F32)
                store(b, b.fadd(load(b, to, kind), load(b, added, kind)), to)
            return []

        loop(b, rows, [], body)

    return code(emit, 5)


@intrinsic
def gate_rows(
    typing: Any, like: Any, rows: Any, x: Any, x_stride: Any, out: Any, out_stride: Any
) -> Any:
    """out [rows, LANES] = silu(g) * u of float32 rows x [rows, 2 * LANES], g and u; as rows of a
    product with weights like `like`."""
    kind = vector_of(F32)

    def emit(bf16: bool) -> Callable[..., None]:
        def emit(
            b: Builder, rows: Value, x: Value, x_stride: Value, out: Value, out_stride: Value
        ) -> None:
            one = constant(kind, 1.0)

            def body(i: Value, nothing: list[Value]) -> list[Value]:
                row = b.add(x, b.mul(x_stride, i))
                g, up = load(b, row, kind), load(b, b.add(row, I64(VECTOR)), kind)
                sigmoid = b.fdiv(one, b.fadd(one, exponential(b, b.fneg(g))))
                value = b.fmul(b.fmul(g, sigmoid), up)
                to = b.add(out, b.mul(out_stride, i))
                if bf16:
                    bits = narrowed(b, value)
                    value = widened(b, bits) if WIDE_ROWS else bits
                store(b, value, to)
                return []

            loop(b, rows, [], body)

        return emit

    return code_for(like, emit, 5)


def _folded(b: Builder, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """All lanes of a vector, combined in pairs."""
    lanes = [b.extract_element(vector, I32(j)) for j in range(LANES)]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [combine(x, y) for x, y in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


@intrinsic
def sum_of_squares(typing: Any, x: Any, vectors: Any) -> Any:
    """Of `vectors` * LANES float32."""
    kind = vector_of(F32)

    def emit(b: Builder, x: Value, vectors: Value) -> Value:
        def body(i: Value, totals: list[Value]) -> list[Value]:
            value = load(b, b.add(x, b.mul(i, I64(VECTOR))), kind)
            return [fma(b, value, value, totals[0])]

        (total,) = loop(b, vectors, [constant(kind, 0.0)], body)
        return _folded(b, total, b.fadd)

    return code(emit, 2, types.float32)


@intrinsic
def largest(typing: Any, x: Any, vectors: Any) -> Any:
    """Of `vectors` * LANES float32."""
    kind = vector_of(F32)

    def emit(b: Builder, x: Value, vectors: Value) -> Value:
        def larger(x: Value, y: Value) -> Value:
            return overloaded(b, "maxnum", x, y)

        def body(i: Value, tops: list[Value]) -> list[Value]:
            return [larger(tops[0], load(b, b.add(x, b.mul(i, I64(VECTOR))), kind))]

        (top,) = loop(b, vectors, [constant(kind, float("-inf"))], body)
        return _folded(b, top, larger)

    return code(emit, 2, types.float32)


@intrinsic
def sum_of_exponentials(typing: Any, x: Any, vectors: Any, top: Any) -> Any:
    """Of exp(x - top), over `vectors` * LANES float32."""
    kind = vector_of(F32)

    def generate(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        x, vectors, top = args
        highest = splat(b, top)

        def body(i: Value, totals: list[Value]) -> list[Value]:
            value = load(b, b.add(x, b.mul(i, I64(VECTOR))), kind)
            return [b.fadd(totals[0], exponential(b, b.fsub(value, highest)))]

        (total,) = loop(b, vectors, [constant(kind, 0.0)], body)
        return _folded(b, total, b.fadd)

    return types.float32(types.int64, types.int64, types.float32), generate
