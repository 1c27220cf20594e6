"""What the official client sees of a served application."""

from http import HTTPStatus
from typing import Any

import openai
import pytest
from openai import OpenAI

from adaptivespec.config import GuardSettings
from adaptivespec.errors import Overloaded, RequestError, TargetLost
from adaptivespec.sampling import SamplingParams
from adaptivespec.shape import Shape
from adaptivespec.tokenizer import Tokenizer
from tests.deployments.echo import Echo

MESSAGES: Any = [{"role": "user", "content": "Say it again."}]
PROMPT = "one two three four"
SPECULATION_USAGE = {
    "steps": 2,
    "drafted_tokens": 6,
    "accepted_tokens": 2,
    "promoted_tokens": 0,
    "mean_acceptance_length": 2.0,
    "accepted_per_position": [2],
    "step_seconds": {"draft": 0.25, "transfer": 0.5, "verify": 2.0, "other": 0.125},
}


def chat(client: OpenAI, **parameters: Any) -> Any:
    fields: dict[str, Any] = {"model": "echo", "messages": MESSAGES, "max_tokens": 4} | parameters
    return client.chat.completions.create(**fields)


def complete(client: OpenAI, **parameters: Any) -> Any:
    fields: dict[str, Any] = {"model": "echo", "prompt": PROMPT, "max_tokens": 4} | parameters
    return client.completions.create(**fields)


def test_a_chat_completion(client: OpenAI, echo: Echo, tokenizer: Tokenizer) -> None:
    answer = chat(client)
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "echo"
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == tokenizer.decode(tokenizer.apply_chat_template(MESSAGES)[:4])
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == len(tokenizer.apply_chat_template(MESSAGES))
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4
    assert answer.usage.speculation == SPECULATION_USAGE


def test_a_completion_of_text(client: OpenAI, tokenizer: Tokenizer) -> None:
    answer = complete(client)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    [choice] = answer.choices
    assert choice.text == PROMPT
    assert choice.finish_reason == "length"
    assert answer.usage.speculation == SPECULATION_USAGE


def test_a_completion_of_token_ids(client: OpenAI, echo: Echo) -> None:
    complete(client, prompt=[28, 29, 30])
    complete(client, prompt=[[28, 29, 30]])
    assert [request.prompt for request in echo.requests] == [[28, 29, 30]] * 2


def test_a_chat_stream_opens_with_the_role_and_ends_with_the_reason(client: OpenAI) -> None:
    whole = chat(client).choices[0].message.content
    chunks = list(chat(client, stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert {chunk.usage for chunk in chunks} == {None}
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", None, None, None]
    assert "".join(delta.content or "" for delta in deltas) == whole
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]


def test_a_completion_stream(client: OpenAI) -> None:
    chunks = list(complete(client, stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == ["one two", " three four", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]


@pytest.mark.parametrize("call", [chat, complete])
def test_the_last_chunk_has_the_usage_where_asked_for(client: OpenAI, call: Any) -> None:
    *chunks, last = call(client, stream=True, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 4
    assert last.usage.speculation == SPECULATION_USAGE


def test_parameters_reach_the_backend(client: OpenAI, echo: Echo) -> None:
    chat(
        client,
        temperature=0,
        top_p=0.9,
        seed=-7,
        stop=["\n", "."],
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "speculation": {"mode": "static", "kappa": 0.5, "shape": [3, 4, 4]}
            | {"max_promotions": 1},
        },
    )
    [request] = echo.requests
    assert request.sampling == SamplingParams(0.0, 40, 0.9, 0.05, -7)
    assert request.stop == ("\n", ".")
    assert request.max_tokens == 4
    assert (request.mode, request.kappa, request.shape) == ("static", 0.5, Shape(3, 4, 4))
    assert request.guards == GuardSettings(max_promotions=1)


def test_defaults(client: OpenAI, echo: Echo) -> None:
    chat(client, max_tokens=openai.omit)
    chat(client, max_tokens=openai.omit)
    complete(client, max_tokens=openai.omit)
    first, second, completion = echo.requests
    assert first.sampling.temperature == 1.0
    assert first.sampling.seed != second.sampling.seed
    assert (first.mode, first.kappa, first.shape, first.stop) == ("adaptive", 0.2, None, ())
    assert len(first.prompt) + first.max_tokens == echo.current.context_length
    assert completion.max_tokens == 16


def test_what_clients_send_unasked_is_accepted(client: OpenAI, echo: Echo) -> None:
    answer = chat(
        client,
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        logprobs=False,
        response_format={"type": "text"},
        tools=[],
        tool_choice="none",
        user="me",
        metadata={"run": "1"},
        store=False,
    )
    again = [*MESSAGES, answer.choices[0].message.model_dump(), *MESSAGES]
    chat(client, messages=again)
    assert len(echo.requests) == 2


def test_text_parts_and_the_developer_role(
    client: OpenAI, echo: Echo, tokenizer: Tokenizer
) -> None:
    parts = [{"type": "text", "text": "Say it "}, {"type": "text", "text": "again."}]
    system = {"role": "system", "content": "Be brief."}
    chat(client, messages=[system | {"role": "developer"}, {"role": "user", "content": parts}])
    assert echo.requests[0].prompt == tokenizer.apply_chat_template([system, *MESSAGES])


def test_models(client: OpenAI) -> None:
    [model] = client.models.list()
    assert (model.id, model.object, model.max_model_len) == ("echo", "model", 512)  # type: ignore[attr-defined]
    assert client.models.retrieve("echo") == model


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (lambda client, name: client.models.retrieve(name), ("org/other",)),
        (lambda client, name: chat(client, model=name), ("gpt-4o",)),
        (lambda client, name: complete(client, model=name), ("",)),
    ],
)
def test_an_unknown_model_is_not_found(client: OpenAI, call: Any, arguments: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        call(client, *arguments)
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "'echo' does" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "expected", "code"),
    [
        (RequestError("stop: too long", "stop"), openai.BadRequestError, None),
        (Overloaded("64 requests are waiting"), openai.RateLimitError, "rate_limit_exceeded"),
        (TargetLost("the target died"), openai.InternalServerError, "service_unavailable"),
    ],
)
def test_an_error_before_the_first_token_has_its_status(
    client: OpenAI,
    echo: Echo,
    failure: Exception,
    expected: type[openai.APIStatusError],
    code: str | None,
    stream: bool,
) -> None:
    echo.failures[0] = failure
    with pytest.raises(expected) as caught:
        chat(client, stream=stream)
    assert str(failure) in caught.value.message
    assert caught.value.code == code
    assert caught.value.param == getattr(failure, "param", None)


def test_a_lost_target_is_503(client: OpenAI, echo: Echo) -> None:
    echo.failures[1] = TargetLost("the target died")
    with pytest.raises(openai.InternalServerError) as caught:
        chat(client)
    assert caught.value.status_code == HTTPStatus.SERVICE_UNAVAILABLE


def test_an_error_amid_a_stream_reaches_the_client(client: OpenAI, echo: Echo) -> None:
    echo.failures[1] = TargetLost("the target died")
    received = []
    with pytest.raises(openai.APIError, match="the target died") as caught:
        received.extend(chat(client, stream=True))
    assert len(received) == 2
    assert caught.value.code == "service_unavailable"


def test_an_unexpected_error_tells_no_more_than_that(client: OpenAI, echo: Echo) -> None:
    echo.failures[0] = KeyError("secret")
    with pytest.raises(openai.InternalServerError) as caught:
        chat(client)
    assert "secret" not in caught.value.message


def test_an_unexpected_error_amid_a_stream(client: OpenAI, echo: Echo) -> None:
    echo.failures[1] = KeyError("secret")
    with pytest.raises(openai.APIError, match="internal error"):
        list(chat(client, stream=True))
