"""Parameters of the API that this server does not implement.

Each is accepted at the values at which it changes nothing, because clients and frameworks send
those unasked, and refused at any other: no parameter is ever ignored.
"""

from typing import Any

from deployments.openai.errors import invalid, shown

Neutral = dict[str, tuple[Any, ...]]

_BOTH: Neutral = {
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "min_tokens": (None, 0),
}
CHAT: Neutral = _BOTH | {
    "audio": (None,),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None,),
    "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
COMPLETION: Neutral = _BOTH | {
    "best_of": (None, 1),
    "echo": (None, False),
    "logprobs": (None,),
    "suffix": (None, ""),
}
MESSAGE: Neutral = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "name": (None,),
    "refusal": (None,),
    "tool_calls": (None, []),
}
STREAM_OPTIONS: Neutral = {"include_obfuscation": (None, False)}


def without_neutral(fields: Any, neutral: Neutral, prefix: str = "") -> Any:
    """Return `fields` without the parameters in `neutral`, whose names errors show behind `prefix`;
    what is no object comes back as it is. Raises ApiError for a value that would change the
    answer."""
    if not isinstance(fields, dict):
        return fields
    for name in fields.keys() & neutral.keys():
        if not any(_same(fields[name], value) for value in neutral[name]):
            param = prefix + name
            allowed = " or ".join(shown(value) for value in neutral[name])
            raise invalid(f"{param}: {shown(fields[name])} is not supported; {allowed} is", param)
    return {name: value for name, value in fields.items() if name not in neutral}


def _same(value: Any, neutral: Any) -> bool:
    """Equality of JSON values, to which true is not 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)
