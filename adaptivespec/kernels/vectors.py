"""What the kernels' inner loops are made of, as LLVM code: numba turns loops over arrays into
vectors only where it can prove enough, and knows neither bf16 nor atomics.

Addresses and strides are int64, in bytes. A vector is 16 float32 lanes; on a CPU with smaller
registers LLVM splits it. Element types are named by the dtype that numpy has for them: float32, and
uint16 for the bits of a bfloat16.

Every result is computed in one order that depends on its own operands alone, not on how many rows
or keys there are beside it: so a token has the same bits in a batch, in a tree and alone.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

LANES = 16

_FEATURES = llvm.get_host_cpu_features()
_DOT_BF16 = bool(_FEATURES.get("avx512bf16"))
MOST_ROWS = 12 if _FEATURES.get("avx512f") else 3
"""Rows of a product that are computed at once: as many as registers hold."""

_PREFETCH = 8192
"""Bytes that weights are fetched ahead of their use; measured, of 1 to 8 KiB the best."""

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_F32 = ir.FloatType()
_BYTE = ir.IntType(8).as_pointer()

Builder = Any
Value = Any


class _BFloat16(ir.types._BaseFloatType):  # which llvmlite does not have
    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    _to_string = __str__


_BFloat16._create_instance()


def _vector(element: Any) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def _constant(kind: Any, value: float) -> Value:
    """`value` of a scalar type, or in every lane of a vector type."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def _like(kind: Any, element: Any) -> Any:
    """The type with `element` in the place of the elements of `kind`."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _splat(b: Builder, scalar: Value) -> Value:
    kind = _vector(scalar.type)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
    return b.shuffle_vector(one, one, ir.Constant(_vector(_I32), [_I32(0)] * LANES))


def _at(b: Builder, address: Value, kind: Any) -> Value:
    return b.inttoptr(address, kind.as_pointer())


def _load(b: Builder, address: Value, kind: Any) -> Value:
    return b.load(_at(b, address, kind), align=2)


def _store(b: Builder, value: Value, address: Value) -> None:
    b.store(value, _at(b, address, value.type), align=2)


def _offset(b: Builder, address: Value, stride: Value, count: int) -> Value:
    return b.add(address, b.mul(stride, _I64(count)))


def _call(b: Builder, name: str, result: Any, *args: Value) -> Value:
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def _math(b: Builder, name: str, *args: Value) -> Value:
    """One of LLVM's intrinsics that are overloaded on one type."""
    kind = args[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    return _call(b, f"llvm.{name}.{suffix}", kind, *args)


def _fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    return _math(b, "fma", x, y, z)


def _widen(b: Builder, bits: Value) -> Value:
    """bfloat16 bits, i16 -> float32."""
    wide = b.zext(bits, _like(bits.type, _I32))
    return b.bitcast(b.shl(wide, _constant(wide.type, 16)), _like(bits.type, _F32))


def _narrow(b: Builder, x: Value) -> Value:
    """float32 -> bfloat16 bits, i16, to nearest even; not a number stays that."""
    kind = _like(x.type, _I32)
    bits = b.bitcast(x, kind)
    sixteen = _constant(kind, 16)
    odd = b.and_(b.lshr(bits, sixteen), _constant(kind, 1))
    rounded = b.add(bits, b.add(odd, _constant(kind, 0x7FFF)))
    quiet = b.or_(bits, _constant(kind, 0x400000))
    bits = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
    return b.trunc(b.lshr(bits, sixteen), _like(x.type, _I16))


def _exp(b: Builder, x: Value) -> Value:
    """e^x in float32 to 2 units in the last place, 0 below -87.3: 2^n e^r with |r| <= ln(2) / 2,
    the latter by its series."""
    kind = x.type

    def c(value: float) -> Value:
        return _constant(kind, float(np.float32(value)))

    clipped = _math(b, "minnum", _math(b, "maxnum", x, c(-87.3)), c(88.0))
    n = _math(b, "rint", b.fmul(clipped, c(1 / np.log(2))))
    high = 0.693359375  # ln 2 in two parts, of which n times the first is exact
    r = _fma(b, n, c(-high), clipped)
    r = _fma(b, n, c(high - np.log(2)), r)
    series = c(1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        series = _fma(b, series, r, c(1 / factorial))
    integer = _like(kind, _I32)
    exponent = b.add(b.fptosi(n, integer), _constant(integer, 127))
    power = b.bitcast(b.shl(exponent, _constant(integer, 23)), kind)
    return b.select(b.fcmp_ordered("olt", x, c(-87.3)), c(0.0), b.fmul(series, power))


def _loop(
    b: Builder,
    count: Value,
    carried: list[Value],
    body: Callable[[Value, list[Value]], list[Value]],
) -> list[Value]:
    """`for i in range(count)` with `carried` values in registers; `count` is at least 1."""
    before = b.block
    loop, done = b.append_basic_block(), b.append_basic_block()
    b.branch(loop)
    b.position_at_end(loop)
    i = b.phi(_I64)
    i.add_incoming(_I64(0), before)
    phis = [b.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, before)
    results = body(i, phis)
    following = b.add(i, _I64(1))
    i.add_incoming(following, b.block)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    return results


def _code(emit: Callable[..., Value], arguments: int, result: Any = types.void) -> Any:
    """What a numba intrinsic of int64 `arguments` returns; `emit` takes a builder and them."""

    def generate(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        value = emit(b, *args)
        return context.get_dummy_value() if result is types.void else value

    return result(*[types.int64] * arguments), generate


# -- between threads ----------------------------------------------------------------------------


@intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address, for all threads at once; what it was before."""

    def emit(b: Builder, address: Value, value: Value) -> Value:
        return b.atomic_rmw("add", _at(b, address, _I64), value, "acq_rel")

    return _code(emit, 2, types.int64)


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """The int64 at an address, and with it all that its writer had written before."""

    def emit(b: Builder, address: Value) -> Value:
        return b.load_atomic(_at(b, address, _I64), "acquire", 8)

    return _code(emit, 1, types.int64)


# -- one element --------------------------------------------------------------------------------


@intrinsic
def widen(typing: Any, x: Any) -> Any:
    """An element of an activation, as float32."""
    if x == types.uint16:
        return types.float32(x), lambda context, b, signature, args: _widen(b, args[0])
    return types.float32(types.float32), lambda context, b, signature, args: args[0]


@intrinsic
def narrow(typing: Any, x: Any, like: Any) -> Any:
    """A float32 as an element like `like`."""

    def generate(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        return _narrow(b, args[0]) if like == types.uint16 else args[0]

    return like(types.float32, like), generate


# -- rows of vectors ----------------------------------------------------------------------------


def _product(bf16: bool, vectors: int, most_rows: int) -> Callable[..., None]:
    """What `product` and `narrow_product` emit."""
    kind, element = _vector(_F32), _I32 if bf16 else _F32

    def multiply(b: Builder, x: Value, w: Value, total: Value) -> Value:
        if not bf16:
            return _fma(b, x, w, total)
        if _DOT_BF16:
            pairs = ir.VectorType(_BFloat16(), 2 * LANES)
            operands = [b.bitcast(v, pairs) for v in (x, w)]
            return _call(b, "llvm.x86.avx512bf16.dpbf16ps.512", kind, total, *operands)
        sixteen, high = _constant(_vector(_I32), 16), _constant(_vector(_I32), 0xFFFF0000)
        for part in (lambda v: b.shl(v, sixteen), lambda v: b.and_(v, high)):
            total = _fma(b, b.bitcast(part(x), kind), b.bitcast(part(w), kind), total)
        return total

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
        biases = [_load(b, b.add(bias, _I64(64 * n)), kind) for n in range(vectors)]
        starts = [_offset(b, x, x_stride, m) for m in range(rows)]

        def body(i: Value, totals: list[Value]) -> list[Value]:
            weights = []
            for n in range(vectors):
                address = b.add(w, b.add(b.mul(i, _I64(64 * vectors)), _I64(64 * n)))
                weights.append(_load(b, address, _vector(element)))
                ahead = b.inttoptr(b.add(address, _I64(_PREFETCH)), _BYTE)
                _call(b, "llvm.prefetch.p0", ir.VoidType(), ahead, _I32(0), _I32(3), _I32(1))
            results = []
            for m, start in enumerate(starts):
                shared = _splat(b, _load(b, b.add(start, b.mul(i, _I64(4))), element))
                for n, weight in enumerate(weights):
                    results.append(multiply(b, shared, weight, totals[m * vectors + n]))
            return results

        totals = _loop(b, steps, biases * rows, body)
        for m in range(rows):
            for n in range(vectors):
                address = b.add(_offset(b, out, out_stride, m), _I64(64 * n))
                _store(b, totals[m * vectors + n], address)

    def emit(b: Builder, rows: Value, *args: Value) -> None:
        done = b.append_basic_block()
        switch = b.switch(rows, done)
        for count in range(1, most_rows + 1):
            switch.add_case(_I64(count), case := b.append_basic_block())
            b.position_at_end(case)
            rows_of(b, count, *args)
            b.branch(done)
        b.position_at_end(done)

    return emit


def _for_dtype(like: Any, emit: Callable[[bool], Callable[..., None]], arguments: int) -> Any:
    """What an intrinsic returns whose first argument is an element of the dtype to work on."""

    def generate(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        emit(like == types.uint16)(b, *args[1:])
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * arguments), generate


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
    return _for_dtype(like, lambda bf16: _product(bf16, 2, MOST_ROWS), 8)


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
    """`product` for LANES outputs."""
    return _for_dtype(like, lambda bf16: _product(bf16, 1, MOST_ROWS), 8)


QUERIES = 4
"""Sums that `weighted` makes at once."""


def _weighted(bf16: bool, vectors: int) -> Callable[..., None]:
    kind = _vector(_F32)

    def emit(
        b: Builder,
        weights: Value,
        values: Value,
        stride: Value,
        out: Value,
        out_stride: Value,
        count: Value,
    ) -> None:
        def load(row: Value, n: int) -> Value:
            if bf16:
                return _widen(b, _load(b, b.add(row, _I64(2 * LANES * n)), _vector(_I16)))
            return _load(b, b.add(row, _I64(4 * LANES * n)), kind)

        def body(i: Value, totals: list[Value]) -> list[Value]:
            row = b.add(values, b.mul(i, stride))
            loaded = [load(row, n) for n in range(vectors)]
            results = []
            for q in range(QUERIES):
                address = b.add(weights, b.add(b.mul(i, _I64(4 * LANES)), _I64(4 * q)))
                weight = _splat(b, _load(b, address, _F32))
                for n, value in enumerate(loaded):
                    results.append(_fma(b, weight, value, totals[q * vectors + n]))
            return results

        totals = _loop(b, count, [_constant(kind, 0.0)] * (QUERIES * vectors), body)
        for q in range(QUERIES):
            for n in range(vectors):
                address = b.add(_offset(b, out, out_stride, q), _I64(64 * n))
                _store(b, totals[q * vectors + n], address)

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
    4 * LANES values a row. weights: float32 [count, LANES]. values: rows of elements."""
    return _for_dtype(like, lambda bf16: _weighted(bf16, 4), 6)


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
    return _for_dtype(like, lambda bf16: _weighted(bf16, 1), 6)


@intrinsic
def softmax(typing: Any, scores: Any, count: Any, scale: Any, sums: Any) -> Any:
    """Replace float32 scores [count, LANES] by exp(scale * (score - the lane's largest)), and store
    their sums [LANES]. What is hidden has the score -inf; in no lane all are."""
    kind = _vector(_F32)

    def generate(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        scores, count, scale, sums = args

        def row(i: Value) -> Value:
            return b.add(scores, b.mul(i, _I64(4 * LANES)))

        least = _constant(kind, float("-inf"))
        (top,) = _loop(
            b, count, [least], lambda i, t: [_math(b, "maxnum", t[0], _load(b, row(i), kind))]
        )
        factor = _splat(b, scale)

        def body(i: Value, totals: list[Value]) -> list[Value]:
            below = b.fsub(_load(b, row(i), kind), top)
            weight = _exp(b, b.fmul(below, factor))
            _store(b, weight, row(i))
            return [b.fadd(totals[0], weight)]

        (total,) = _loop(b, count, [_constant(kind, 0.0)], body)
        _store(b, total, sums)
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
                to = b.add(b.add(out, b.mul(out_stride, i)), _I64(4 * LANES * n))
                added = b.add(b.add(x, b.mul(x_stride, i)), _I64(4 * LANES * n))
                kind = _vector(_F32)
                _store(b, b.fadd(_load(b, to, kind), _load(b, added, kind)), to)
            return []

        _loop(b, rows, [], body)

    return _code(emit, 5)


@intrinsic
def gate_rows(
    typing: Any, like: Any, rows: Any, x: Any, x_stride: Any, out: Any, out_stride: Any
) -> Any:
    """out [rows, LANES] = silu(g) * u of float32 rows x [rows, 2 * LANES], g and u."""
    kind = _vector(_F32)

    def emit(bf16: bool) -> Callable[..., None]:
        def emit(
            b: Builder, rows: Value, x: Value, x_stride: Value, out: Value, out_stride: Value
        ) -> None:
            one = _constant(kind, 1.0)

            def body(i: Value, nothing: list[Value]) -> list[Value]:
                row = b.add(x, b.mul(x_stride, i))
                g, up = _load(b, row, kind), _load(b, b.add(row, _I64(4 * LANES)), kind)
                sigmoid = b.fdiv(one, b.fadd(one, _exp(b, b.fneg(g))))
                value = b.fmul(b.fmul(g, sigmoid), up)
                to = b.add(out, b.mul(out_stride, i))
                _store(b, _narrow(b, value) if bf16 else value, to)
                return []

            _loop(b, rows, [], body)

        return emit

    return _for_dtype(like, emit, 5)


@intrinsic
def sum_of_squares(typing: Any, x: Any, vectors: Any) -> Any:
    """Of `vectors` * LANES float32."""
    kind = _vector(_F32)

    def emit(b: Builder, x: Value, vectors: Value) -> Value:
        def body(i: Value, totals: list[Value]) -> list[Value]:
            value = _load(b, b.add(x, b.mul(i, _I64(4 * LANES))), kind)
            return [_fma(b, value, value, totals[0])]

        (total,) = _loop(b, vectors, [_constant(kind, 0.0)], body)
        lanes = [b.extract_element(total, _I32(j)) for j in range(LANES)]
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [b.fadd(x, y) for x, y in zip(lanes[:half], lanes[half:], strict=True)]
        return lanes[0]

    return _code(emit, 2, types.float32)
