"""From the bytes of a request to its typed body, with errors that name the parameter."""

import re
from typing import Any, TypeVar, get_args

import msgspec

from adaptivespec.config import TokenClass
from adaptivespec.request import Mode
from deployments.openai import neutral
from deployments.openai.errors import ApiError, invalid, shown
from deployments.openai.requests import ChatBody, CompletionBody, Role

Body = TypeVar("Body")

ALLOWED = {
    "role": get_args(Role),
    "mode": get_args(Mode),
    "type": ("text",),
    "never_promote": get_args(TokenClass),
}
"""What msgspec's message on an enumeration leaves out, by the last name in its path."""


def parse_chat(body: bytes) -> ChatBody:
    """Raises ApiError (400) naming the parameter, its value and what is allowed."""
    fields = neutral.without_neutral(_fields(body), neutral.CHAT)
    messages = fields.get("messages")
    if isinstance(messages, list):
        fields["messages"] = [
            neutral.without_neutral(message, neutral.MESSAGE, f"messages[{i}].")
            for i, message in enumerate(messages)
        ]
    chat = _convert(fields, ChatBody)
    lengths = (chat.max_tokens, chat.max_completion_tokens)
    if None not in lengths and lengths[0] != lengths[1]:
        message = f"max_completion_tokens: {lengths[1]} differs from max_tokens {lengths[0]}"
        raise invalid(message, "max_completion_tokens")
    return chat


def parse_completion(body: bytes) -> CompletionBody:
    """Raises ApiError (400) naming the parameter, its value and what is allowed."""
    fields = neutral.without_neutral(_fields(body), neutral.COMPLETION)
    return _convert(fields, CompletionBody)


def _fields(body: bytes) -> dict[str, Any]:
    """The values of a JSON object by name. Each is decoded on its own, so that an error in one can
    name it."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the body is not a JSON object: {error}") from error
    fields = {}
    for name, value in raw.items():
        try:
            fields[name] = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            reason = str(error).partition(" - at ")[0]
            raise invalid(f"{shown(name)}: {reason}", name) from error
    return fields


def _convert(fields: dict[str, Any], kind: type[Body]) -> Body:
    options = fields.get("stream_options")
    if options is not None:
        if not fields.get("stream"):
            raise invalid(
                f"stream_options: {shown(options)} is allowed with stream true only",
                "stream_options",
            )
        options = neutral.without_neutral(options, neutral.STREAM_OPTIONS, "stream_options.")
        fields = fields | {"stream_options": options}
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), fields) from error


def _explain(message: str, fields: dict[str, Any]) -> ApiError:
    """Turn msgspec's "Expected ... - at `$.a[0].b`" into an error about the parameter a[0].b."""
    reason, at, path = message.rpartition(" - at `$")
    if not at:
        reason, path = message, ""
    path = path.removesuffix("`").removesuffix("[...]").removeprefix(".")
    if named := re.fullmatch(r"Object (.*) field `(.*)`", reason, flags=re.DOTALL):
        param = f"{path}.{named[2]}" if path else named[2]
        if named[1] == "missing required":
            return invalid(f"{param}: missing", param, "missing_required_parameter")
        return invalid(f"{shown(param)}: unknown parameter", param, "unknown_parameter")
    value: Any = fields
    key = ""
    for name, index in re.findall(r"(\w+)|\[(\d+)\]", path):
        value = value[int(index)] if index else value[name]
        key = name or key
    allowed = f"; allowed: {', '.join(ALLOWED[key])}" if key in ALLOWED else ""
    return invalid(f"{path}: {shown(value)} is not allowed: {reason}{allowed}", path)
