"""Writing LLVM code: what numba's intrinsics here are made of.

numba turns loops over arrays into vectors only where it can prove enough, and knows neither bf16
nor atomics. Addresses and strides are int64, in bytes. A vector is LANES float32, which
is a register of AVX-512 or AVX2, and two of most other CPUs.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

FEATURES = llvm.get_host_cpu_features()
LANES = 16 if FEATURES.get("avx512f") else 8
VECTOR = 4 * LANES
"""Bytes of a vector."""

DOT_BF16 = bool(FEATURES.get("avx512bf16"))
"""Whether pairs of bfloat16 are multiplied and added by one instruction."""
WIDE_ROWS = not (DOT_BF16 and llvm.get_host_cpu_name().startswith("znver"))
"""Whether rows that are multiplied with weights in bfloat16 are kept as float32, of values that are
bfloat16's, and weights are widened as they are multiplied. With that instruction AMD's processors
do twice what they do in float32, and Intel's half as much."""

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
BYTE = ir.IntType(8).as_pointer()

Builder = Any
Value = Any


class BFloat16(ir.types._BaseFloatType):  # which llvmlite does not have
    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    _to_string = __str__


BFloat16._create_instance()


def vector_of(element: Any) -> ir.VectorType:
    return ir.VectorType(element, LANES)


def constant(kind: Any, value: float) -> Value:
    """`value` of a scalar type, or in every lane of a vector type."""
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(kind.element, value)] * kind.count)
    return ir.Constant(kind, value)


def shaped_like(kind: Any, element: Any) -> Any:
    """The type with `element` in the place of the elements of `kind`."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def splat(b: Builder, scalar: Value) -> Value:
    kind = vector_of(scalar.type)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(one, one, ir.Constant(vector_of(I32), [I32(0)] * LANES))


def pointer(b: Builder, address: Value, kind: Any) -> Value:
    return b.inttoptr(address, kind.as_pointer())


def load(b: Builder, address: Value, kind: Any) -> Value:
    return b.load(pointer(b, address, kind), align=2)


def store(b: Builder, value: Value, address: Value) -> None:
    b.store(value, pointer(b, address, value.type), align=2)


def offset(b: Builder, address: Value, stride: Value, count: int) -> Value:
    return b.add(address, b.mul(stride, I64(count)))


def call(b: Builder, name: str, result: Any, *args: Value) -> Value:
    kind = ir.FunctionType(result, [a.type for a in args])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), args)


def overloaded(b: Builder, name: str, *args: Value) -> Value:
    """One of LLVM's intrinsics that are overloaded on one type."""
    kind = args[0].type
    suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
    return call(b, f"llvm.{name}.{suffix}", kind, *args)


def fma(b: Builder, x: Value, y: Value, z: Value) -> Value:
    return overloaded(b, "fma", x, y, z)


def widened(b: Builder, bits: Value) -> Value:
    """bfloat16 bits, i16 -> float32."""
    wide = b.zext(bits, shaped_like(bits.type, I32))
    return b.bitcast(b.shl(wide, constant(wide.type, 16)), shaped_like(bits.type, F32))


def narrowed(b: Builder, x: Value) -> Value:
    """float32 -> bfloat16 bits, i16, to nearest even; not a number stays that."""
    kind = shaped_like(x.type, I32)
    bits = b.bitcast(x, kind)
    sixteen = constant(kind, 16)
    odd = b.and_(b.lshr(bits, sixteen), constant(kind, 1))
    rounded = b.add(bits, b.add(odd, constant(kind, 0x7FFF)))
    quiet = b.or_(bits, constant(kind, 0x400000))
    bits = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
    return b.trunc(b.lshr(bits, sixteen), shaped_like(x.type, I16))


def exponential(b: Builder, x: Value) -> Value:
    """e^x in float32 to 2 units in the last place, 0 below -87.3: 2^n e^r with |r| <= ln(2) / 2,
    the latter by its series."""
    kind = x.type

    def c(value: float) -> Value:
        return constant(kind, float(np.float32(value)))

    clipped = overloaded(b, "minnum", overloaded(b, "maxnum", x, c(-87.3)), c(88.0))
    n = overloaded(b, "rint", b.fmul(clipped, c(1 / np.log(2))))
    high = 0.693359375  # ln 2 in two parts, of which n times the first is exact
    r = fma(b, n, c(-high), clipped)
    r = fma(b, n, c(high - np.log(2)), r)
    series = c(1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        series = fma(b, series, r, c(1 / factorial))
    integer = shaped_like(kind, I32)
    exponent = b.add(b.fptosi(n, integer), constant(integer, 127))
    power = b.bitcast(b.shl(exponent, constant(integer, 23)), kind)
    return b.select(b.fcmp_ordered("olt", x, c(-87.3)), c(0.0), b.fmul(series, power))


def loop(
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
    i = b.phi(I64)
    i.add_incoming(I64(0), before)
    phis = [b.phi(value.type) for value in carried]
    for phi, value in zip(phis, carried, strict=True):
        phi.add_incoming(value, before)
    results = body(i, phis)
    following = b.add(i, I64(1))
    i.add_incoming(following, b.block)
    for phi, value in zip(phis, results, strict=True):
        phi.add_incoming(value, b.block)
    b.cbranch(b.icmp_signed("<", following, count), loop, done)
    b.position_at_end(done)
    return results


def code(emit: Callable[..., Value], arguments: int, result: Any = types.void) -> Any:
    """What a numba intrinsic of int64 `arguments` returns; `emit` takes a builder and them."""

    def generate(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        value = emit(b, *args)
        return context.get_dummy_value() if result is types.void else value

    return result(*[types.int64] * arguments), generate


def code_for(like: Any, emit: Callable[[bool], Callable[..., None]], arguments: int) -> Any:
    """What an intrinsic returns whose first argument is an element of the dtype to work on."""

    def generate(context: Any, b: Builder, signature: Any, args: Any) -> Value:
        emit(like == types.uint16)(b, *args[1:])
        return context.get_dummy_value()

    return types.void(like, *[types.int64] * arguments), generate
