"""What request bodies may say: it works, or it is refused by the parameter's name."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec.config import UNGUARDED, GuardSettings
from adaptivespec.request import GenerationRequest
from adaptivespec.shape import Shape
from adaptivespec.tokenizer import Tokenizer
from deployments.openai import conversion, neutral
from deployments.openai.errors import ApiError, ErrorDetail
from deployments.openai.parsing import parse_chat, parse_completion
from deployments.openai.requests import ChatBody, CompletionBody
from tests.deployments.echo import STATUS

CHAT: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "echo", "prompt": "hi"}


def chat_of(fields: dict[str, Any], tokenizer: Tokenizer) -> GenerationRequest:
    body = parse_chat(msgspec.json.encode(fields))
    prompt = conversion.chat_prompt(body, tokenizer, STATUS)
    return conversion.generation_request(body, prompt, STATUS, None)


def completion_of(fields: dict[str, Any], tokenizer: Tokenizer) -> GenerationRequest:
    body = parse_completion(msgspec.json.encode(fields))
    prompt = conversion.completion_prompt(body, tokenizer, STATUS)
    return conversion.generation_request(body, prompt, STATUS, None)


def chat(tokenizer: Tokenizer, **parameters: Any) -> GenerationRequest:
    return chat_of(CHAT | parameters, tokenizer)


def completion(tokenizer: Tokenizer, **parameters: Any) -> GenerationRequest:
    return completion_of(COMPLETION | parameters, tokenizer)


def refusal(call: Any, *arguments: Any, **parameters: Any) -> ErrorDetail:
    with pytest.raises(ApiError) as caught:
        call(*arguments, **parameters)
    assert caught.value.status == 400
    assert caught.value.detail.type == "invalid_request_error"
    return caught.value.detail


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"null", b"[]", b'"x"', b"\xff", b'{"model": "echo"} x', b"[" * 100_000),
        b'{"model": %s}' % (b"[" * 5000 + b"]" * 5000),
        b'{"model": "\\ud800"}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert "is not a JSON object" in refusal(parse_chat, body).message
    assert "is not a JSON object" in refusal(parse_completion, body).message


@pytest.mark.parametrize("value", [b"1e999", b"-1e999", b"1" * 5000, b'"\xff"'])
def test_values_that_cannot_be_read_are_refused_by_name(value: bytes) -> None:
    body = msgspec.json.encode(CHAT)[:-1] + b',"temperature":' + value + b"}"
    assert refusal(parse_chat, body).param == "temperature"


@pytest.mark.parametrize("value", [-0.1, 2.1, True, "1", [], 1 << 70])
def test_temperature(tokenizer: Tokenizer, value: Any) -> None:
    detail = refusal(chat, tokenizer, temperature=value)
    assert detail.param == "temperature"
    assert detail.message.startswith("temperature: ")


@pytest.mark.parametrize(
    ("parameter", "values"),
    [
        ("top_p", [0, -1, 1.1, True, "1"]),
        ("top_k", [-2, 1.5, True, "1", 1 << 64]),
        ("min_p", [-0.1, 1.1, True]),
        ("seed", [1.5, True, "1", 1 << 63, -(1 << 63) - 1]),
        ("max_tokens", [0, -1, 1.5, 16.0, True, "1", 1 << 63, 1 << 200]),
        ("stop", [3, "", [""], ["x"] * 17, [3], "x" * 1025]),
        ("stream", [0, 1, "true"]),
        ("user", [3]),
        ("metadata", [{"a": 1}, "x"]),
        ("model", [None, 3]),
        ("stream_options", [{"include_usage": True}]),
        ("speculation", ["off", [], True]),
    ],
)
@pytest.mark.parametrize("call", [chat, completion])
def test_values_that_are_not_allowed(
    tokenizer: Tokenizer, call: Any, parameter: str, values: list[Any]
) -> None:
    for value in values:
        detail = refusal(call, tokenizer, **{parameter: value})
        assert detail.param is not None
        assert detail.param.split("[")[0] == parameter
        assert detail.message.startswith(parameter)


@pytest.mark.parametrize(
    ("call", "table"), [(chat, neutral.CHAT), (completion, neutral.COMPLETION)]
)
def test_unsupported_parameters_pass_at_their_neutral_values_only(
    tokenizer: Tokenizer, call: Any, table: neutral.Neutral
) -> None:
    others = [None, True, False, 0, 1, 2, -1, 0.5, "", "x", [], [1], {}, {"a": 1}]
    for name, values in table.items():
        for value in values:
            assert call(tokenizer, **{name: value})
        for other in others:
            if msgspec.json.encode(other) in map(msgspec.json.encode, values):
                continue
            detail = refusal(call, tokenizer, **{name: other})
            assert detail.param == name
            assert "is not supported" in detail.message


def test_the_message_says_the_value_and_what_is_allowed(tokenizer: Tokenizer) -> None:
    detail = refusal(chat, tokenizer, response_format={"type": "json_object"})
    assert detail.message == (
        "response_format: {'type': 'json_object'} is not supported; null or {'type': 'text'} is"
    )
    detail = refusal(chat, tokenizer, speculation={"mode": "on"})
    assert detail.param == "speculation.mode"
    assert detail.message == (
        "speculation.mode: 'on' is not allowed: Invalid enum value 'on'; "
        "allowed: adaptive, static, off"
    )


def test_unknown_and_missing_parameters_are_named(tokenizer: Tokenizer) -> None:
    detail = refusal(chat, tokenizer, temprature=0)
    assert (detail.param, detail.code) == ("temprature", "unknown_parameter")
    detail = refusal(chat, tokenizer, speculation={"kapa": 1})
    assert (detail.param, detail.code) == ("speculation.kapa", "unknown_parameter")
    detail = refusal(parse_chat, b"{}")
    assert detail.code == "missing_required_parameter"
    assert detail.param in ("model", "messages")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "user", "content": "x", "name": "me"}, "messages[1].name"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[1].tool_calls"),
        ({"role": "user", "content": "x", "mood": 1}, "messages[1].mood"),
        ("hi", "messages[1]"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "messages[1].content[1].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": ["a"]}, "messages[1].content[0]"),
    ],
)
def test_messages_are_refused_by_their_place(
    tokenizer: Tokenizer, message: Any, param: str
) -> None:
    messages = [*CHAT["messages"], message]
    detail = refusal(chat, tokenizer, messages=messages)
    assert detail.param == param
    assert param in detail.message


def test_no_messages(tokenizer: Tokenizer) -> None:
    assert refusal(chat, tokenizer, messages=[]).param == "messages"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ("", "prompt"),
        (["one", "two"], "prompt"),
        ([[1], [2]], "prompt"),
        ([1, "two"], "prompt"),
        ([[]], "prompt"),
        (None, "prompt"),
        ([1, -1], "prompt[1]"),
        ([STATUS.vocab_size], "prompt[0]"),
        ([1 << 80], "prompt[0]"),
        ([1, True], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([[1.5]], "prompt[0][0]"),
    ],
)
def test_prompts_that_are_refused(tokenizer: Tokenizer, prompt: Any, param: str) -> None:
    assert refusal(completion, tokenizer, prompt=prompt).param == param


def test_a_prompt_fills_the_context_up_to_the_last_token(tokenizer: Tokenizer) -> None:
    context = STATUS.context_length
    for length in (context - 1, context - 16):
        request = completion(tokenizer, prompt=[7] * length, max_tokens=context - length)
        assert len(request.prompt) + request.max_tokens == context
    assert completion(tokenizer, prompt=[7] * (context - 1), max_tokens=None).max_tokens == 1
    for length, max_tokens in ((context, 1), (context, None), (context - 1, 2), (1, context)):
        detail = refusal(completion, tokenizer, prompt=[7] * length, max_tokens=max_tokens)
        assert detail.code == "context_length_exceeded"
        assert detail.param == "prompt"
        assert f"maximum context length is {context} tokens" in detail.message
        assert f"requested {length} tokens in prompt" in detail.message


def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(tokenizer: Tokenizer) -> None:
    text = "x" * (STATUS.context_length * conversion.MAX_CHARS_PER_TOKEN + 1)
    for detail in (
        refusal(completion, tokenizer, prompt=text),
        refusal(chat, tokenizer, messages=[{"role": "user", "content": text}]),
    ):
        assert detail.code == "context_length_exceeded"
        assert f"{len(text)} characters" in detail.message


def test_both_names_of_max_tokens(tokenizer: Tokenizer) -> None:
    assert chat(tokenizer, max_tokens=3).max_tokens == 3
    assert chat(tokenizer, max_completion_tokens=3).max_tokens == 3
    assert chat(tokenizer, max_completion_tokens=3, max_tokens=3).max_tokens == 3
    detail = refusal(chat, tokenizer, max_completion_tokens=3, max_tokens=4)
    assert detail.param == "max_completion_tokens"


@pytest.mark.parametrize("top_k", [None, 0, -1, STATUS.vocab_size, 2**62])
def test_top_k_that_keeps_every_token_is_off(tokenizer: Tokenizer, top_k: int | None) -> None:
    assert chat(tokenizer, top_k=top_k).sampling.top_k == 0


def test_null_is_the_default(tokenizer: Tokenizer) -> None:
    optional = [field.name for field in msgspec.structs.fields(ChatBody) if not field.required]
    request = chat(tokenizer, **dict.fromkeys(optional))
    assert request.sampling.temperature == 1.0
    assert request.mode == "adaptive"


@pytest.mark.parametrize("kappa", [0, -0.5, 1.01, True, "1"])
def test_kappa_is_a_ratio(tokenizer: Tokenizer, kappa: Any) -> None:
    detail = refusal(chat, tokenizer, temperature=0, speculation={"kappa": kappa})
    assert detail.param == "speculation.kappa"


def test_kappa_below_1_needs_temperature_0(tokenizer: Tokenizer) -> None:
    assert chat(tokenizer, temperature=0, speculation={"kappa": 0.3}).kappa == 0.3
    assert chat(tokenizer, temperature=0.7, speculation={"kappa": 1}).kappa == 1
    assert chat(tokenizer, temperature=0.7).kappa == STATUS.kappa
    detail = refusal(chat, tokenizer, temperature=0.7, speculation={"kappa": 0.3})
    assert detail.param == "speculation.kappa"
    assert "temperature is 0.7" in detail.message


@pytest.mark.parametrize(
    "shape",
    [
        [0, 0, 0],
        [1, 0, 2],
        [3, 1, 3],
        [-1, 1, 1],
        [9, 1, 10],
        [8, 17, 64],
        [8, 16, 65],
        [1 << 70, 1, 1 << 71],
        [3, 4],
        [3, 4, 4, 4],
        [3, 4, True],
        "3,4,4",
    ],
)
def test_shapes_that_are_no_tree_or_too_large(tokenizer: Tokenizer, shape: Any) -> None:
    detail = refusal(chat, tokenizer, speculation={"mode": "static", "shape": shape})
    assert detail.param is not None
    assert detail.param.startswith("speculation.shape")
    assert detail.message.startswith("speculation.shape")


def test_a_shape_needs_the_static_mode(tokenizer: Tokenizer) -> None:
    static = {"mode": "static", "shape": [0, 0, 1]}
    assert chat(tokenizer, speculation=static).shape == Shape(0, 0, 1)
    for mode in ("adaptive", "off"):
        detail = refusal(chat, tokenizer, speculation=static | {"mode": mode})
        assert detail.param == "speculation.shape"


def test_guards_are_those_of_the_settings(tokenizer: Tokenizer) -> None:
    asked = {"max_promotions": 0, "never_promote": ["digits"]}
    assert chat(tokenizer, speculation=asked).guards == GuardSettings(
        max_promotions=0, never_promote=("digits",)
    )
    window = {"max_promotions_per_window": 2, "promotion_window": 16}
    assert completion(tokenizer, speculation=window).guards == GuardSettings(
        max_promotions_per_window=2, promotion_window=16
    )
    assert chat(tokenizer, speculation={"kappa": 1}).guards == UNGUARDED


@pytest.mark.parametrize(
    ("guards", "param", "allowed"),
    [
        ({"max_promotions": -1}, "max_promotions", ">= 0"),
        ({"max_promotions_per_window": "2"}, "max_promotions_per_window", "int"),
        ({"promotion_window": 5000}, "promotion_window", "4096"),
        ({"promotion_window": 8}, "promotion_window", "max_promotions_per_window"),
        ({"never_promote": ["digits", "verbs"]}, "never_promote[1]", "digits, operators"),
    ],
)
def test_mistaken_guards_are_named(
    tokenizer: Tokenizer, guards: dict[str, Any], param: str, allowed: str
) -> None:
    detail = refusal(chat, tokenizer, speculation=guards)
    assert detail.param == f"speculation.{param}"
    assert detail.message.startswith(f"speculation.{param}: ")
    assert allowed in detail.message


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
    | st.sampled_from(["off", "static", "user", "text", "echo"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.text(max_size=3)
            | st.sampled_from(["role", "content", "type", "text", "mode", "kappa", "shape"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def bodies(kind: type[msgspec.Struct], table: neutral.Neutral, valid: dict[str, Any]) -> Any:
    names = [field.name for field in msgspec.structs.fields(kind)] + list(table)
    extra = st.dictionaries(st.sampled_from(names) | st.text(max_size=8), JSON, max_size=5)
    return st.tuples(st.sampled_from([valid, {}]), extra).map(lambda pair: pair[0] | pair[1])


def check_outcome(
    call: Callable[[dict[str, Any], Tokenizer], GenerationRequest], *args: Any
) -> None:
    """Either a request that fits, or a 400 that names a parameter."""
    outcome: GenerationRequest | ApiError
    try:
        outcome = call(*args)
    except ApiError as error:
        outcome = error
    if isinstance(outcome, ApiError):
        assert outcome.status == 400
        assert outcome.detail.param is not None
        assert outcome.detail.message
    else:
        room = STATUS.context_length - len(outcome.prompt)
        assert 1 <= outcome.max_tokens <= room
        assert 0 <= outcome.sampling.temperature <= 2
        assert 0 < outcome.kappa <= 1


@given(bodies(ChatBody, neutral.CHAT, CHAT))
def test_any_chat_body_is_taken_or_refused_by_name(
    tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    check_outcome(chat_of, fields, tokenizer)


@given(bodies(CompletionBody, neutral.COMPLETION, COMPLETION))
def test_any_completion_body_is_taken_or_refused_by_name(
    tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    check_outcome(completion_of, fields, tokenizer)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_and_no_more(body: bytes) -> None:
    refusal(parse_chat, body)
    refusal(parse_completion, body)
