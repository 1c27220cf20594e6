"""`engine: sglang` as its users see it: OpenAI's client, `serve run`, SGLang's scheduler and the
drafter in processes of their own, and what happens when one of them dies."""

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from pathlib import Path
from typing import Any

from tests.sglang.serving import (  # isort: skip  before transformers
    APP,
    QUEUED,
    RUNNING,
    assert_serves,
    counting,
    engine_processes,
    kill_drafter,
    scheduler,
    serving,
    wait_for_successor,
    wait_until_gone,
)

import httpx
import openai
import psutil
import pytest

from tests.e2e.answers import COUNTING, Streamed, chat_reference, complete
from tests.e2e.server import MODEL, Server, eventually
from tests.otlp import OtlpReceiver, ReceivedSpan
from tests.smollm2 import PROMPTS, chat, tokenizer

TOKENS = 40
LONG = 900  # tokens: an answer that goes on until the test has done with it
QUESTION = "List five animals that live in the sea."

Note = Callable[[str, object], None]


@pytest.fixture(scope="module")
def collector() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(smollm2: Path, collector: OtlpReceiver) -> Iterator[Server]:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": "500",  # milliseconds
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }
    with serving(smollm2, env) as server:
        yield server


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client(APP)


def speculation(client: openai.OpenAI, prompt: str = COUNTING, **asked: object) -> dict[str, Any]:
    """What the usage of a completion says of speculation."""
    answer = client.completions.create(
        model=MODEL,
        prompt=prompt,
        temperature=0,
        max_tokens=TOKENS,
        extra_body={"speculation": asked},
    )
    usage: dict[str, Any] = answer.usage.speculation  # type: ignore[union-attr]
    return usage


# -- answers --------------------------------------------------------------------------------------


def ask(client: openai.OpenAI, **body: object) -> openai.types.chat.ChatCompletion:
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=TOKENS,
        **body,  # type: ignore[call-overload]
    )


def test_a_chat(client: openai.OpenAI) -> None:
    answer, expected = ask(client), chat_reference(QUESTION, TOKENS)
    [choice] = answer.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == "stop"  # its end-of-turn token
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(chat(QUESTION))
    assert answer.usage.completion_tokens == len(expected.tokens)


def test_a_streamed_chat_has_the_text_of_a_whole_one(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]  # type: ignore[attr-defined]
    assert "".join(pieces) == chat_reference(QUESTION, TOKENS).text
    assert sum(bool(piece) for piece in pieces) > 4
    assert chunks[-1].choices[0].finish_reason == "stop"  # type: ignore[attr-defined]


def test_concurrent_answers_are_transformers_own(client: openai.OpenAI) -> None:
    prompts = PROMPTS[: RUNNING + QUEUED]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda p: complete(client, chat(p), TOKENS), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = chat_reference(prompt, TOKENS)
        assert answer.text == expected.text
        assert answer.completion_tokens == len(expected.tokens)
    assert sum(answer.accepted_tokens for answer in answers) > 0


def test_max_tokens_within_an_accepted_run(client: openai.OpenAI) -> None:
    """Runs of accepted tokens are longer than one here, so of four caps in a row some fall inside
    one."""
    for cap in range(30, 34):
        answer = complete(client, COUNTING, cap)
        assert answer.text == counting(cap)
        assert answer.content[1:] == ("length", len(tokenizer().encode(COUNTING)), cap)
        assert answer.accepted_tokens > 4


def test_a_stop_string_within_an_accepted_run(client: openai.OpenAI) -> None:
    text = counting(60)
    for stop in ("11,", "12,", "13,"):
        streamed = Streamed(client, COUNTING, 60, stop=stop).answer()
        plain = complete(client, COUNTING, 60, stop=stop, mode="off")
        assert streamed.text == text[: text.index(stop)]
        assert streamed.finish_reason == "stop"
        assert streamed.content == plain.content
        assert streamed.accepted_tokens > 4


def test_seeded_sampling_does_not_depend_on_speculation(client: openai.OpenAI) -> None:
    drafted, plain = (
        complete(client, COUNTING, 24, mode=mode, temperature=1, seed=1)
        for mode in ("adaptive", "off")
    )
    assert drafted.content == plain.content


def test_the_usage_of_speculation_adds_up(client: openai.OpenAI) -> None:
    started = time.perf_counter()
    usage = speculation(client)
    waited = time.perf_counter() - started
    steps, accepted = usage["steps"], usage["accepted_tokens"]
    assert 0 < accepted <= usage["drafted_tokens"]
    assert usage["promoted_tokens"] == 0
    assert usage["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    # The first token comes from the prefill; each step adds a bonus token to what it accepts,
    # unless the cap cuts it off.
    assert 1 + steps + accepted in (TOKENS, TOKENS + 1)
    positions, seconds = usage["accepted_per_position"], usage["step_seconds"]
    assert sum(positions) == accepted
    assert positions == sorted(positions, reverse=True)
    assert list(seconds) == ["draft", "transfer", "verify", "other"]
    assert min(seconds.values()) > 0
    assert sum(seconds.values()) < waited


def test_a_request_chooses_its_speculation(client: openai.OpenAI) -> None:
    """A kappa near 0 accepts whatever is drafted."""
    plain = speculation(client, mode="off")
    assert (plain["steps"], plain["drafted_tokens"]) == (TOKENS - 1, 0)
    lossy = speculation(client, "Once upon a time", mode="static", kappa=1e-6, shape=[3, 1, 4])
    assert 0 < lossy["promoted_tokens"] <= lossy["accepted_tokens"]
    guards = {"max_promotions_per_window": 1, "promotion_window": 2 * TOKENS}
    guarded = speculation(
        client, "Once upon a time", mode="static", kappa=1e-6, shape=[3, 1, 4], **guards
    )
    assert guarded["promoted_tokens"] == 1 < lossy["promoted_tokens"]


def test_what_cannot_be_served_is_refused(server: Server, client: openai.OpenAI) -> None:
    longest = server.health(APP)["context_length"]
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, [28] * (longest - 3), 4)
    assert caught.value.code == "context_length_exceeded"
    assert complete(client, [28] * (longest - 4), 4).completion_tokens == 4


def test_a_full_queue_is_429_and_empties_again(server: Server, client: openai.OpenAI) -> None:
    streams = [Streamed(client, COUNTING, LONG) for _ in range(RUNNING + QUEUED)]
    eventually(
        lambda: server.health(APP), lambda s: (s["running"], s["queued"]) == (RUNNING, QUEUED)
    )
    with pytest.raises(openai.RateLimitError):
        complete(client, COUNTING, 4)
    started = eventually(
        lambda: [stream for stream in streams if stream.chunks], lambda some: len(some) == RUNNING
    )
    [waiting] = [stream for stream in streams if stream not in started]
    for stream in started:
        stream.leave()
    waiting.wait_for(1)  # it has moved up
    waiting.leave()
    server.wait_until_idle(APP)


def test_a_client_that_leaves_frees_its_place(server: Server, client: openai.OpenAI) -> None:
    def held() -> bool:
        status = server.health(APP)
        return bool(status["target_requests"] == status["drafter_requests"] == 1)

    stream = Streamed(client, COUNTING, LONG)
    eventually(held)
    stream.leave()
    server.wait_until_idle(APP)

    body = {"model": MODEL, "prompt": COUNTING, "max_tokens": LONG, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        url = f"{server.url}/{APP}/v1/completions"
        whole = pool.submit(httpx.post, url, json=body, timeout=5)
        eventually(held)
        with pytest.raises(httpx.ReadTimeout):
            whole.result()
    server.wait_until_idle(APP)


def test_one_trace_has_our_spans_and_sglangs(
    client: openai.OpenAI, collector: OtlpReceiver
) -> None:
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    answer = client.completions.create(
        model=MODEL,
        prompt=COUNTING,
        temperature=0,
        max_tokens=TOKENS,
        extra_headers={"traceparent": f"00-{trace}-{parent}-01"},
    )
    assert answer.usage is not None
    steps: int = answer.usage.speculation["steps"]  # type: ignore[attr-defined]

    def named(name: str) -> list[ReceivedSpan]:
        return [span for span in collector.spans if span.name.startswith(name)]

    names = ["adaptivespec.verify", "adaptivespec.draft", " Req ", f"text_completion {MODEL}"]
    collector.wait(lambda spans: len(named("adaptivespec.step")) == steps + 1)  # and the prompt's
    collector.wait(lambda spans: all(map(named, names)))
    verified, drafted, [theirs], [root] = map(named, names)
    stepped = named("adaptivespec.step")
    assert root.parent_id == parent
    assert {span.parent_id for span in stepped} == {root.span_id}
    assert {span.parent_id for span in drafted + verified} <= {span.span_id for span in stepped}
    assert theirs.parent_id == root.span_id
    assert {span.service for span in (stepped[0], verified[0], drafted[0], theirs, root)} == {
        "adaptivespec-target",
        "adaptivespec-draft",
        "adaptivespec-sglang",
        "adaptivespec-ingress",
    }
    # Its caller asked for it, and for no other.
    assert {span.trace_id for span in collector.spans} == {trace}


# -- deaths ---------------------------------------------------------------------------------------


def test_an_answer_outlives_its_drafter(server: Server, client: openai.OpenAI) -> None:
    groups = server.placement_groups()
    stream = Streamed(client, COUNTING, 120)
    stream.wait_for(10)
    old = kill_drafter(server)
    assert stream.answer().text == counting(120)
    wait_for_successor(server, old)
    assert_serves(server)
    assert server.placement_groups() == groups


def test_an_idle_drafter_is_missed(server: Server) -> None:
    """Nobody asks for anything when it dies, or when its successor comes."""
    wait_for_successor(server, kill_drafter(server))
    assert_serves(server)


def test_a_killed_scheduler(server: Server, client: openai.OpenAI, record_property: Note) -> None:
    groups, actors = server.placement_groups(), len(server.actors())
    old, processes = server.cell(APP), engine_processes(server)
    with ThreadPoolExecutor() as pool:
        stream = Streamed(client, COUNTING, LONG)
        stream.wait_for(5)
        other = pool.submit(complete, client, COUNTING, LONG)
        eventually(lambda: server.health(APP)["running"] == RUNNING)
        scheduler(server).kill()
        killed = time.monotonic()
        with pytest.raises(openai.APIError) as streamed:
            stream.answer()
        assert streamed.value.code == "service_unavailable"
        with pytest.raises(openai.InternalServerError) as caught:
            other.result()
        assert caught.value.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    record_property("failed_after_s", round(time.monotonic() - killed, 1))
    assert server.health(APP)["http"] == HTTPStatus.SERVICE_UNAVAILABLE
    with pytest.raises(openai.InternalServerError):
        complete(client, COUNTING, 4)

    eventually(lambda: server.health(APP)["http"] == HTTPStatus.OK)
    assert complete(client, COUNTING, 4).completion_tokens == 4
    record_property("answered_after_s", round(time.monotonic() - killed, 1))
    assert_serves(server)
    assert server.cell(APP).orchestrator == old.orchestrator
    wait_until_gone(processes)
    assert server.placement_groups() == groups
    assert len(server.actors()) == actors


def test_a_killed_orchestrator(server: Server, client: openai.OpenAI) -> None:
    groups, actors = server.placement_groups(), len(server.actors())
    old, processes = server.cell(APP), engine_processes(server)
    assert old.orchestrator is not None
    stream = Streamed(client, COUNTING, LONG)
    stream.wait_for(5)
    psutil.Process(old.orchestrator).kill()
    with pytest.raises(openai.APIError):
        stream.answer()
    wait_until_gone(processes)
    eventually(lambda: server.cell(APP).orchestrator not in (None, old.orchestrator))
    assert_serves(server)
    eventually(server.placement_groups, lambda now: len(now) == len(groups))
    eventually(server.actors, lambda now: len(now) == actors)


def test_ctrl_c_ends_everything(server: Server, client: openai.OpenAI) -> None:
    stream = Streamed(client, COUNTING, LONG)
    stream.wait_for(5)
    processes = engine_processes(server)
    assert server.interrupt() == []
    wait_until_gone(processes)
    stream.leave()
    farewell = server.output.partition("Got KeyboardInterrupt")[2]
    assert farewell
    for noise in ("Traceback", "Request failed", "Fatal Python error", "never awaited"):
        assert noise not in farewell, farewell
