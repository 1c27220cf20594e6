"""Products of rows with packed weights or queries, and weighted sums of rows.

Every result is computed in one order that depends on its own operands alone, not on how many rows
or keys there are beside it: so a token has the same bits in a batch, in a tree and alone.
"""

from collections.abc import Callable, Iterator
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
MOST_ROWS = 14 if _REGISTERS == 32 else 4
"""Rows of a product that are computed at once: as many as registers hold, measured."""
MOST_KEYS = 12 if _REGISTERS == 32 else 8
"""Rows of a `narrow_product`."""
PANELS = 2
"""Panels of a `wide_product`, whose rows are so many times fewer: with few sums at a time, a
processor waits for each before it can add the next term."""
WIDE_FROM_MEMORY = _REGISTERS == 16
"""Whether that is so where weights come from memory, too; else the memory is what is waited for,
and gives one panel after the other faster than two at once."""

_LINE = 64
"""Bytes of a cache line."""
_AHEAD = 8192
"""Bytes that weights are fetched ahead of their use, where that is waited for: 4096 and 16384 are
slower."""


def _product(bf16: bool, panels: int, vectors: int, most_rows: int) -> Callable[..., None]:
    """What the products emit: of `panels` panels with `vectors` vectors of outputs each."""
    kind, element = vector_of(F32), I32 if bf16 else F32
    per_step = 2 if bf16 and not _DOT_BF16 else 1

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
        w_stride: Value,
        bias: Value,
        out: Value,
        out_stride: Value,
        steps: Value,
    ) -> None:
        starts = [offset(b, x, x_stride, m) for m in range(rows)]
        panel_starts = [offset(b, w, w_stride, p) for p in range(panels)]
        places = [I64(VECTOR * n) for n in range(panels * vectors)]

        order = [*product_of(range(rows), range(panels * vectors), range(per_step))]
        # So that as few factors as can be are in registers at a time. Of 32, sums take most: a row
        # after the other, whose factors are then read as they are multiplied. Of 16, few rows' all,
        # and one vector of weights after the other; else of all the first term, then the second.
        by_row = _REGISTERS == 32
        if not by_row:
            order.sort(key=(lambda mnk: mnk[1:]) if panels > 1 else (lambda mnk: mnk[2]))

        def weights(i: Value) -> Iterator[Value]:
            """Of one step, vector by vector; later ones are fetched meanwhile."""
            step, following = b.mul(i, I64(VECTOR * vectors)), b.mul(w_stride, I64(panels))
            for start, n in product_of(panel_starts, range(vectors)):
                address = b.add(start, b.add(step, I64(VECTOR * n)))
                yield load(b, address, vector_of(element))
                if vectors > 1 and VECTOR * n % _LINE == 0:
                    to, cache = (following, 2) if WIDE_FROM_MEMORY else (I64(_AHEAD), 3)
                    ahead = b.inttoptr(b.add(address, to), BYTE)
                    call(b, "llvm.prefetch.p0", ir.VoidType(), ahead, I32(0), I32(cache), I32(1))

        def body(i: Value, totals: list[Value]) -> list[Value]:
            def row(m: int) -> list[Value]:
                at_step = b.add(starts[m], b.mul(i, I64(4)))
                return terms(b, splat(b, load(b, at_step, element)))

            xs = {} if by_row else {m: row(m) for m in range(rows)}
            ws = [terms(b, vector) for vector in weights(i)]
            totals = list(totals)
            for m, n, k in order:
                if m not in xs:
                    xs[m] = row(m)
                at = m * len(ws) + n
                totals[at] = add_product(b, xs[m][k], ws[n][k], totals[at])
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


def _intrinsic(panels: int, vectors: int, most_rows: int) -> Any:
    @intrinsic
    def made(
        typing: Any,
        like: Any,
        rows: Any,
        x: Any,
        x_stride: Any,
        w: Any,
        w_stride: Any,
        bias: Any,
        out: Any,
        out_stride: Any,
        steps: Any,
    ) -> Any:
        return code_for(like, lambda bf16: _product(bf16, panels, vectors, most_rows), 9)

    return made


product = _intrinsic(1, 2, MOST_ROWS)
"""out[m, n] = bias[n] + sum over k of x[m, k] * w[k, n], float32, for `rows` <= MOST_ROWS rows and
2 * LANES outputs. x: rows of elements. w: at every step the elements of every output, lane by lane.
A step is one k in float32, a pair of them in bfloat16. `w_stride`: bytes from a panel of weights to
the next."""

wide_product = _intrinsic(PANELS, 2, MOST_ROWS // PANELS)
"""`product` for PANELS panels, whose biases and outputs are side by side, and MOST_ROWS // PANELS
rows at most."""

narrow_product = _intrinsic(1, 1, MOST_KEYS)
"""`product` for LANES outputs of one panel, and up to MOST_KEYS rows."""


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
