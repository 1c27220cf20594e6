"""What users of OpenAI's client see of the real application."""

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.answers import COUNTING, Streamed, chat_reference, complete, reference
from tests.e2e.conftest import LM_QUEUED, LM_RUNNING
from tests.e2e.server import MODEL, Server, eventually
from tests.smollm2 import chat, tokenizer

QUESTION = "List five animals that live in the sea."
TOKENS = 40


def ask(client: openai.OpenAI, **body: object) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=TOKENS,
        **body,  # type: ignore[call-overload]
    )


def test_a_chat(server: Server) -> None:
    answer = ask(server.client("lookup"))
    expected = chat_reference(QUESTION, TOKENS)
    [choice] = answer.choices
    assert choice.message.content == expected.text
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == len(chat(QUESTION))
    assert usage.completion_tokens == len(expected.tokens)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_chat_has_the_text_of_a_whole_one(server: Server) -> None:
    chunks = list(ask(server.client("lookup"), stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]  # type: ignore[attr-defined]
    assert "".join(pieces) == chat_reference(QUESTION, TOKENS).text
    assert sum(bool(piece) for piece in pieces) > 4
    assert chunks[-1].choices[0].finish_reason == "stop"  # type: ignore[attr-defined]


def test_a_streamed_completion_with_usage(server: Server) -> None:
    streamed = Streamed(server.client("lookup"), COUNTING, TOKENS).answer()
    whole = complete(server.client("lookup"), COUNTING, TOKENS)
    assert streamed == whole
    assert whole.finish_reason == "length"
    assert whole.completion_tokens == TOKENS


def test_the_usage_of_speculation_adds_up(server: Server) -> None:
    answer = server.client("lm").completions.create(
        model=MODEL, prompt=COUNTING, temperature=0, max_tokens=TOKENS
    )
    assert answer.usage is not None
    speculation = answer.usage.speculation  # type: ignore[attr-defined]
    steps, accepted = speculation["steps"], speculation["accepted_tokens"]
    assert 0 < accepted <= speculation["drafted_tokens"]
    assert speculation["promoted_tokens"] == 0
    assert speculation["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    # The first token comes from the prefill; each step adds a bonus token to what it accepts,
    # unless the cap cuts it off.
    assert 1 + steps + accepted in (TOKENS, TOKENS + 1)
    positions = speculation["accepted_per_position"]
    assert sum(positions) == accepted
    assert steps >= positions[0]
    assert positions == sorted(positions, reverse=True)


@pytest.mark.parametrize("app", ["lm", "eagle3"])  # the latter with states on the link
def test_the_usage_says_where_the_time_of_steps_went(server: Server, app: str) -> None:
    started = time.perf_counter()
    answer = server.client(app).completions.create(
        model=MODEL, prompt=COUNTING, temperature=0, max_tokens=TOKENS
    )
    waited = time.perf_counter() - started
    assert answer.usage is not None
    seconds = answer.usage.speculation["step_seconds"]  # type: ignore[attr-defined]
    assert list(seconds) == ["draft", "transfer", "verify", "other"]
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) < waited
    plain = server.client(app).completions.create(
        model=MODEL,
        prompt=COUNTING,
        temperature=0,
        max_tokens=TOKENS,
        extra_body={"speculation": {"mode": "off"}},
    )
    assert plain.usage is not None
    speculation = plain.usage.speculation  # type: ignore[attr-defined]
    assert speculation["accepted_per_position"] == []
    assert (speculation["step_seconds"]["draft"], speculation["step_seconds"]["transfer"]) == (0, 0)


def test_the_margin_rule_promotes_where_it_may(server: Server) -> None:
    """A kappa near 0 accepts whatever is drafted, which the target's own text shows."""
    answer = server.client("lm").completions.create(
        model=MODEL,
        prompt="Once upon a time",
        temperature=0,
        max_tokens=TOKENS,
        extra_body={"speculation": {"mode": "static", "kappa": 1e-6, "shape": [3, 1, 4]}},
    )
    assert answer.usage is not None
    speculation = answer.usage.speculation  # type: ignore[attr-defined]
    assert 0 < speculation["promoted_tokens"] <= speculation["accepted_tokens"]
    assert answer.choices[0].text != reference("Once upon a time", TOKENS).text


def test_a_request_limits_its_promotions(server: Server) -> None:
    """With none allowed, or none that could be, the answer is the target's own."""
    prompt, lossy = "Once upon a time", {"mode": "static", "kappa": 1e-6, "shape": [3, 1, 4]}

    def ask(**guards: object) -> tuple[str, int, int]:
        answer = server.client("lm").completions.create(
            model=MODEL,
            prompt=prompt,
            temperature=0,
            max_tokens=TOKENS,
            extra_body={"speculation": lossy | guards},
        )
        assert answer.usage is not None
        speculation = answer.usage.speculation  # type: ignore[attr-defined]
        return answer.choices[0].text, speculation["promoted_tokens"], speculation["steps"]

    text, promoted, _ = ask(max_promotions=0)
    assert (text, promoted) == (reference(prompt, TOKENS).text, 0)
    _, promoted, steps = ask(max_promotions=1)
    assert 0 < promoted <= steps
    _, promoted, _ = ask(max_promotions_per_window=1, promotion_window=2 * TOKENS)
    assert promoted == 1
    with pytest.raises(openai.BadRequestError) as caught:
        ask(never_promote=["verbs"])
    assert caught.value.param == "speculation.never_promote[0]"


# -- ends within an accepted run ------------------------------------------------------------------


def test_max_tokens_within_an_accepted_run(server: Server) -> None:
    """Runs of accepted tokens are longer than one here, so of seven caps in a row some fall inside
    one."""
    client = server.client("lookup")
    caps = range(30, 37)
    tokens = reference(COUNTING, max(caps)).tokens
    with ThreadPoolExecutor(3) as pool:
        drafted = list(pool.map(lambda cap: complete(client, COUNTING, cap), caps))
        plain = list(pool.map(lambda cap: complete(client, COUNTING, cap, mode="off"), caps))
    for cap, answer, other in zip(caps, drafted, plain, strict=True):
        assert answer.text == tokenizer().decode(list(tokens[:cap]))
        assert answer.completion_tokens == cap
        assert answer.finish_reason == "length"
        assert answer.content == other.content
    assert all(answer.accepted_tokens > 4 for answer in drafted)


def test_a_stop_string_within_an_accepted_run(server: Server) -> None:
    client = server.client("lookup")
    text = reference(COUNTING, 60).text
    stops = [f"{number}," for number in range(12, 18)]
    with ThreadPoolExecutor(3) as pool:
        drafted = list(pool.map(lambda stop: complete(client, COUNTING, 60, stop=stop), stops))
        plain = list(
            pool.map(lambda stop: complete(client, COUNTING, 60, stop=stop, mode="off"), stops)
        )
    for stop, answer, other in zip(stops, drafted, plain, strict=True):
        assert answer.text == text[: text.index(stop)]
        assert answer.finish_reason == "stop"
        assert answer.content == other.content
    assert any(answer.accepted_tokens > 4 for answer in drafted)


# -- refusals -------------------------------------------------------------------------------------


def test_a_bad_parameter_is_named(server: Server) -> None:
    client = server.client("lookup")
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "Hello", 4, temperature=3)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "Hello", 4, mode="turbo")
    assert caught.value.param == "speculation.mode"


def test_an_unknown_model_is_404(server: Server) -> None:
    with pytest.raises(openai.NotFoundError):
        server.client("lookup").completions.create(model="gpt-9", prompt="Hello")


def test_what_exceeds_the_context_is_refused(server: Server) -> None:
    client = server.client("lookup")
    longest = server.health("lookup")["context_length"]
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, [28] * (longest - 3), 4)
    assert caught.value.code == "context_length_exceeded"
    assert complete(client, [28] * 100, 1).completion_tokens == 1


def test_a_full_queue_is_429_and_empties_again(server: Server) -> None:
    client = server.client("lm")
    places = LM_RUNNING + LM_QUEUED
    streams = [Streamed(client, COUNTING, 60) for _ in range(places)]
    eventually(
        lambda: server.health("lm"),
        lambda status: (status["running"], status["queued"]) == (LM_RUNNING, LM_QUEUED),
    )
    with pytest.raises(openai.RateLimitError):
        complete(client, COUNTING, 4)
    with pytest.raises(openai.RateLimitError):
        Streamed(client, COUNTING, 4).answer()
    assert {stream.answer().text for stream in streams} == {reference(COUNTING, 60).text}
    server.wait_until_idle("lm")
    assert complete(client, COUNTING, 4).completion_tokens == 4


# -- the other endpoints --------------------------------------------------------------------------


def test_models(server: Server) -> None:
    client = server.client("eagle3")
    [model] = client.models.list()
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model


@pytest.mark.parametrize("app", ["lookup", "lm", "eagle3"])
def test_health(server: Server, app: str) -> None:
    status = server.health(app)
    assert status["http"] == 200
    assert (status["target"], status["drafter"]) == ("ready", "ready")
    assert status["drafter_kind"] == app
    assert status["model"] == MODEL
