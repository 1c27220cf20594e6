"""Products of rows with packed weights or queries, and weighted sums of rows.

Every result is computed in one order that depends on its own operands alone, not on how many rows
or keys there are beside it: so a token has the same bits in a batch, in a tree and alone.
"""

from collections.abc import Callable
from itertools import product as product_of
from typing import Any, NamedTuple

from llvmlite import ir
from numba.extending import intrinsic

from adaptivespec.kernels.emit import (
    BYTE,
    DOT_BF16,
    F32,
    FEATURES,
    I16,
    I32,
    I64,
    LANES,
    VECTOR,
    WIDE_ROWS,
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

_REGISTERS = 32 if FEATURES.get("avx512f") else 16
MOST_ROWS = 14 if _REGISTERS == 32 else 4
"""Rows of a product that are computed at once: as many as registers hold, measured."""
FEW_ROWS = 2 if _REGISTERS == 16 else 6 if WIDE_ROWS else 7
"""The same of a `wide_product`."""
MOST_KEYS = 12 if _REGISTERS == 32 else 8
"""Rows of a `narrow_product`."""
PANELS = 2
"""Panels of a `wide_product`: with few sums at a time, a processor waits for each before it can add
the next term."""
WIDE_FROM_MEMORY = _REGISTERS == 16
"""Whether that is so where weights come from memory, too; else the memory is what is waited for,
and gives one panel after the other faster than two at once."""

_LINE = 64
"""Bytes of a cache line."""
_AHEAD = 8192
"""Bytes that weights are fetched ahead of their use, where that is waited for: 4096 and 16384 are
slower."""


class _Terms(NamedTuple):
    """How the elements of one step are multiplied: as so many `terms`, one after the other. `wide`:
    rows are float32 beside weights in bfloat16."""

    bf16: bool
    wide: bool

    @property
    def dot(self) -> bool:
        return self.bf16 and DOT_BF16 and not self.wide

    @property
    def terms(self) -> int:
        return 2 if self.bf16 and not self.dot else 1

    @property
    def row_bytes(self) -> int:
        """Of a row, per step."""
        return 8 if self.bf16 and self.wide else 4

    def of_row(self, b: Builder, address: Value, k: int) -> Value:
        """The k-th term of a row's step at `address`, in every lane."""
        if self.bf16 and self.wide:
            return splat(b, load(b, b.add(address, I64(4 * k)), F32))
        return self._term(b, splat(b, load(b, address, I32 if self.bf16 else F32)), k)

    def of_weights(self, b: Builder, address: Value, k: int) -> Value:
        """The k-th term of a vector of weights."""
        return self._term(b, load(b, address, vector_of(I32 if self.bf16 else F32)), k)

    def _term(self, b: Builder, x: Value, k: int) -> Value:
        if not self.bf16:
            return x
        if self.dot:
            return b.bitcast(x, ir.VectorType(BFloat16(), 2 * LANES))
        kind = vector_of(I32)
        part = b.and_(x, constant(kind, 0xFFFF0000)) if k else b.shl(x, constant(kind, 16))
        return b.bitcast(part, vector_of(F32))

    def add(self, b: Builder, x: Value, w: Value, total: Value) -> Value:
        if self.dot:
            return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", total.type, total, x, w)
        return fma(b, x, w, total)


def _product(terms: _Terms, panels: int, vectors: int, most_rows: int) -> Callable[..., None]:
    """What the products emit: of `panels` panels with `vectors` vectors of outputs each."""
    kind = vector_of(F32)

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
        order = _order(rows, panels * vectors, terms.terms, panels > 1)

        def weights(i: Value) -> list[Value]:
            """Where those of one step are, vector by vector; later ones are fetched meanwhile."""
            step, following = b.mul(i, I64(VECTOR * vectors)), b.mul(w_stride, I64(panels))
            addresses = []
            for start, n in product_of(panel_starts, range(vectors)):
                address = b.add(start, b.add(step, I64(VECTOR * n)))
                addresses.append(address)
                if vectors > 1 and VECTOR * n % _LINE == 0:
                    to, cache = (following, 2) if WIDE_FROM_MEMORY else (I64(_AHEAD), 3)
                    ahead = b.inttoptr(b.add(address, to), BYTE)
                    call(b, "llvm.prefetch.p0", ir.VoidType(), ahead, I32(0), I32(cache), I32(1))
            return addresses

        def body(i: Value, totals: list[Value]) -> list[Value]:
            step = b.mul(i, I64(terms.row_bytes))
            rows_at, weights_at = [b.add(start, step) for start in starts], weights(i)
            xs: dict[tuple[int, int], Value] = {}
            ws: dict[tuple[int, int], Value] = {}
            totals = list(totals)
            for m, n, k in order:
                if (n, k) not in ws:
                    ws[n, k] = terms.of_weights(b, weights_at[n], k)
                if (m, k) not in xs:
                    xs[m, k] = terms.of_row(b, rows_at[m], k)
                at = m * len(weights_at) + n
                totals[at] = terms.add(b, xs[m, k], ws[n, k], totals[at])
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


def _order(rows: int, vectors: int, terms: int, few: bool) -> list[tuple[int, int, int]]:
    """Of the products of rows, vectors of weights and terms, so that as little as can be is in
    registers at a time. Of 32, sums take most: a term after the other, and a row after the other,
    whose factors are then read as they are multiplied. Of 16 it is the same, but of few rows all
    factors are kept, and a vector of weights comes after the other."""
    order = [*product_of(range(rows), range(vectors), range(terms))]
    order.sort(key=(lambda mnk: mnk[1:]) if few and _REGISTERS == 16 else (lambda mnk: mnk[2]))
    return order


def _intrinsic(panels: int, vectors: int, most_rows: int, wide: bool) -> Any:
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
        return code_for(
            like, lambda bf16: _product(_Terms(bf16, wide), panels, vectors, most_rows), 9
        )

    return made


product = _intrinsic(1, 2, MOST_ROWS, WIDE_ROWS)
"""out[m, n] = bias[n] + sum over k of x[m, k] * w[k, n], float32, for `rows` <= MOST_ROWS rows and
2 * LANES outputs. x: rows of elements, or of float32 if WIDE_ROWS. w: at every step the elements of
every output, lane by lane. A step is one k in float32, a pair of them in bfloat16. `w_stride`:
bytes from a panel of weights to the next."""

wide_product = _intrinsic(PANELS, 2, FEW_ROWS, WIDE_ROWS)
"""`product` for PANELS panels, whose biases and outputs are side by side, and FEW_ROWS rows at
most."""

narrow_product = _intrinsic(1, 1, MOST_KEYS, wide=False)
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
