"""Msgspec's errors in words that name the key, the value and what is allowed."""

from typing import Any

import msgspec
from msgspec import inspect


def explain(error: msgspec.ValidationError, args: dict[str, Any], kind: Any) -> str:
    """Turn the error of converting `args` to `kind`, "... - at `$.a.b`", into "a.b: value ...",
    with what is allowed there."""
    text, _, path = str(error).partition(" - at ")
    path = path.strip("`").removeprefix("$").replace("[", ".").replace("]", "")
    keys = [k for k in path.split(".") if k]
    value: Any = args
    kinds: list[Any] = [inspect.type_info(kind)]
    for key in keys:
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and key.isdigit():
            value = value[int(key)]
        kinds = [kind for parent in kinds for kind in _below(parent, key)]
    shown = "" if isinstance(value, dict) or not keys else f" {value!r} is not allowed:"
    allowed = ", ".join(name for kind in kinds for name in _names(kind))
    return f"{'.'.join(keys) or 'args'}:{shown} {text}" + (
        f"; allowed: {allowed}" if allowed else ""
    )


def _below(kind: Any, key: str) -> list[Any]:
    """The types that a key of `kind` may have; of the key that tells alternatives apart, its
    values."""
    if isinstance(kind, inspect.UnionType):
        return [found for each in kind.types for found in _below(each, key)]
    if isinstance(kind, inspect.VarTupleType):
        return [kind.item_type]
    if not isinstance(kind, inspect.StructType):
        return []
    if key == kind.tag_field:
        return [inspect.LiteralType((kind.tag,))]
    return [field.type for field in kind.fields if field.encode_name == key]


def _names(kind: Any) -> list[str]:
    """What may stand in the place of `kind`, where that is a list of names."""
    if isinstance(kind, inspect.LiteralType):
        return [str(value) for value in kind.values]
    if isinstance(kind, inspect.StructType):
        return [field.encode_name for field in kind.fields]
    return []
