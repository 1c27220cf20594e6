"""Counters that several threads use at once."""

from typing import Any

from numba.core import types
from numba.extending import intrinsic

from adaptivespec.kernels.emit import I64, Builder, Value, code, pointer


@intrinsic
def fetch_add(typing: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at an address, for all threads at once; what it was before."""

    def emit(b: Builder, address: Value, value: Value) -> Value:
        return b.atomic_rmw("add", pointer(b, address, I64), value, "acq_rel")

    return code(emit, 2, types.int64)


@intrinsic
def load_acquire(typing: Any, address: Any) -> Any:
    """The int64 at an address, and with it all that its writer had written before."""

    def emit(b: Builder, address: Value) -> Value:
        return b.load_atomic(pointer(b, address, I64), "acquire", 8)

    return code(emit, 1, types.int64)
