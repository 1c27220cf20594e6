"""Products of rows with packed weights or queries, and weighted sums of rows.

Every result is computed in one order that depends on its own operands alone, not on how many rows
or keys there are beside it: so a token has the same bits in a batch, in a tree and alone.
"""

from collections.abc import Callable
from itertools import product as product_of
from typing import Any

from llvmlite import ir
from numba.extending import intrinsic

from adaptivespec.kernels.emit import (
    BYTE,
    F32,
    FEATURES,
    I16,
    I32,
    I64,
    LANES,
    VECTOR,
    BFloat16,
    Builder,
    Value,
    call,
    code_for,
    constant,
    fma,
    load,
    loop,
    offset,
    splat,
    store,
    vector_of,
    widened,
)

_DOT_BF16 = bool(FEATURES.get("avx512bf16"))
_REGISTERS = 32 if FEATURES.get("avx512f") else 16
MOST_ROWS = 12 if _REGISTERS == 32 else 4
"""Rows of a product that are computed at once: as many as registers hold, measured."""
MOST_KEYS = 12 if _REGISTERS == 32 else 8
"""Rows of a `narrow_product`."""

_PREFETCH = 8192
"""Bytes that weights are fetched ahead of their use; measured, of 1 to 8 KiB the best."""


def _product(bf16: bool, vectors: int, most_rows: int) -> Callable[..., None]:
    """What `product` and `narrow_product` emit."""
    kind, element = vector_of(F32), I32 if bf16 else F32

    def terms(b: Builder, x: Value) -> list[Value]:
        """What elements of one step are multiplied as, one after the other."""
        if not bf16:
            return [x]
        if _DOT_BF16:
            return [b.bitcast(x, ir.VectorType(BFloat16(), 2 * LANES))]
        low = b.shl(x, constant(vector_of(I32), 16))
        high = b.and_(x, constant(vector_of(I32), 0xFFFF0000))
        return [b.bitcast(part, kind) for part in (low, high)]

    def add_product(b: Builder, x: Value, w: Value, total: Value) -> Value:
        if bf16 and _DOT_BF16:
            return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", kind, total, x, w)
        return fma(b, x, w, total)

    def rows_of(
        b: Builder,
        rows: int,
        x: Value,
        x_stride: Value,
        w: Value,
        bias: Value,
        out: Value,
        out_stride: Value,
        steps: Value,
    ) -> None:
        starts = [offset(b, x, x_stride, m) for m in range(rows)]
        places = [I64(VECTOR * n) for n in range(vectors)]

        def body(i: Value, totals: list[Value]) -> list[Value]:
            weights = []
            for place in places:
                address = b.add(w, b.add(b.mul(i, I64(VECTOR * vectors)), place))
                weights.append(load(b, address, vector_of(element)))
                ahead = b.inttoptr(b.add(address, I64(_PREFETCH)), BYTE)
                call(b, "llvm.prefetch.p0", ir.VoidType(), ahead, I32(0), I32(3), I32(1))
            shared = [splat(b, load(b, b.add(at, b.mul(i, I64(4))), element)) for at in starts]
            # Term by term, so that of every weight no more than one is in a register.
            for term in zip(*(terms(b, value) for value in shared + weights), strict=True):
                pairs = zip(product_of(term[:rows], term[rows:]), totals, strict=True)
                totals = [add_product(b, *factors, total) for factors, total in pairs]
            return totals

        biases = [load(b, b.add(bias, place), kind) for place in places]
        totals = iter(loop(b, steps, biases * rows, body))
        for m in range(rows):
            for place in places:
                store(b, next(totals), b.add(offset(b, out, out_stride, m), place))

    def emit(b: Builder, rows: Value, *args: Value) -> None:
        done = b.append_basic_block()
        switch = b.switch(rows, done)
        for count in range(1, most_rows + 1):
            switch.add_case(I64(count), case := b.append_basic_block())
            b.position_at_end(case)
            rows_of(b, count, *args)
            b.branch(done)
        b.position_at_end(done)

    return emit


@intrinsic
def product(
    typing: Any,
    like: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    w: Any,
    bias: Any,
    out: Any,
    out_stride: Any,
    steps: Any,
) -> Any:
    """out[m, n] = bias[n] + sum over k of x[m, k] * w[k, n], float32, for `rows` <= MOST_ROWS rows
    and 2 * LANES outputs. x: rows of elements. w: at every step the elements of every output, lane
    by lane. A step is one k in float32, a pair of them in bfloat16."""
    return code_for(like, lambda bf16: _product(bf16, 2, MOST_ROWS), 8)


@intrinsic
def narrow_product(
    typing: Any,
    like: Any,
    rows: Any,
    x: Any,
    x_stride: Any,
    w: Any,
    bias: Any,
    out: Any,
    out_stride: Any,
    steps: Any,
) -> Any:
    """`product` for LANES outputs, and up to MOST_KEYS rows."""
    return code_for(like, lambda bf16: _product(bf16, 1, MOST_KEYS), 8)


QUERIES = 4
"""Sums that `weighted` makes at once."""
WIDE = _REGISTERS // 8
"""Vectors of each of them."""


def _weighted(bf16: bool, vectors: int) -> Callable[..., None]:
    kind = vector_of(F32)

    def emit(
        b: Builder,
        weights: Value,
        values: Value,
        stride: Value,
        out: Value,
        out_stride: Value,
        count: Value,
    ) -> None:
        def values_at(row: Value, n: int) -> Value:
            if bf16:
                return widened(b, load(b, b.add(row, I64(2 * LANES * n)), vector_of(I16)))
            return load(b, b.add(row, I64(VECTOR * n)), kind)

        def body(i: Value, totals: list[Value]) -> list[Value]:
            row = b.add(values, b.mul(i, stride))
            loaded = [values_at(row, n) for n in range(vectors)]
            results = []
            for q in range(QUERIES):
                address = b.add(weights, b.add(b.mul(i, I64(VECTOR)), I64(4 * q)))
                weight = splat(b, load(b, address, F32))
                for n, value in enumerate(loaded):
                    results.append(fma(b, weight, value, totals[q * vectors + n]))
            return results

        totals = loop(b, count, [constant(kind, 0.0)] * (QUERIES * vectors), body)
        for q in range(QUERIES):
            for n in range(vectors):
                address = b.add(offset(b, out, out_stride, q), I64(VECTOR * n))
                store(b, totals[q * vectors + n], address)

    return emit


@intrinsic
def weighted(
    typing: Any,
    like: Any,
    weights: Any,
    values: Any,
    stride: Any,
    out: Any,
    out_stride: Any,
    count: Any,
) -> Any:
    """out[q, :] = sum over l of weights[l, q] * values[l, :], float32, for QUERIES queries and
    WIDE * LANES values a row. weights: float32 [count, LANES]. values: rows of elements."""
    return code_for(like, lambda bf16: _weighted(bf16, WIDE), 6)


@intrinsic
def narrow_weighted(
    typing: Any,
    like: Any,
    weights: Any,
    values: Any,
    stride: Any,
    out: Any,
    out_stride: Any,
    count: Any,
) -> Any:
    """`weighted` for LANES values a row."""
    return code_for(like, lambda bf16: _weighted(bf16, 1), 6)
