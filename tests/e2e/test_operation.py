"""Traces of a request across all processes, and the end by Ctrl-C."""

import secrets
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.e2e.answers import COUNTING
from tests.e2e.server import MODEL, Server, application
from tests.otlp import OtlpReceiver, ReceivedSpan

TOKENS = 24
SERVER_KIND = 2  # OTLP's number


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def traced(receiver: OtlpReceiver) -> Iterator[Server]:
    """A server of its own, which exports to `receiver`."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
    with Server([application("lookup")], env) as server:
        server.wait_until_ready()
        yield server


def ask(client: OpenAI, traceparent: str | None = None) -> dict[str, int]:
    """One completion; returns the usage of speculation, and the prompt's length."""
    answer = client.completions.create(
        model=MODEL,
        prompt=COUNTING,
        temperature=0,
        max_tokens=TOKENS,
        extra_headers={"traceparent": traceparent} if traceparent else None,
    )
    assert answer.usage is not None
    usage: dict[str, int] = answer.usage.speculation  # type: ignore[attr-defined]
    return usage | {"prompt_tokens": answer.usage.prompt_tokens}


def traceparent(trace: str, parent: str, *, sampled: bool) -> str:
    return f"00-{trace}-{parent}-{'01' if sampled else '00'}"


def spans_of(spans: list[ReceivedSpan], trace: str) -> dict[str, list[ReceivedSpan]]:
    """The spans of one trace by name; the one of the whole request as "server"."""
    named: dict[str, list[ReceivedSpan]] = {}
    for span in spans:
        if span.trace_id == trace:
            named.setdefault("server" if span.kind == SERVER_KIND else span.name, []).append(span)
    return named


def complete_trace(receiver: OtlpReceiver, trace: str) -> dict[str, list[ReceivedSpan]]:
    """Wait for the server's span and a target's span below each step's, and return all by name."""

    def whole(spans: list[ReceivedSpan]) -> bool:
        named = spans_of(spans, trace)
        steps, verified = named.get("adaptivespec.step", []), named.get("adaptivespec.verify", [])
        below = {span.parent_id for span in verified}
        return "server" in named and bool(steps) and below == {span.span_id for span in steps}

    return spans_of(receiver.wait(whole, timeout=60), trace)


def test_a_request_is_one_tree_of_spans_over_all_processes(
    traced: Server, receiver: OtlpReceiver
) -> None:
    usage = ask(traced.client("lookup"))
    roots = receiver.wait(lambda spans: any(span.kind == SERVER_KIND for span in spans), timeout=60)
    [trace] = {span.trace_id for span in roots}
    named = complete_trace(receiver, trace)

    [server] = named["server"]
    assert server.parent_id == ""
    assert server.name == f"text_completion {MODEL}"
    assert server.attributes["gen_ai.request.model"] == MODEL
    assert server.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert server.attributes["adaptivespec.usage.accepted_tokens"] == usage["accepted_tokens"]

    steps = named["adaptivespec.step"]
    assert {span.parent_id for span in steps} == {server.span_id}
    assert len(steps) == usage["steps"] + 1  # and the prompt's
    prompt, *decoding = sorted(steps, key=lambda span: span.start_ns)
    assert prompt.attributes["adaptivespec.prompt_tokens"] == usage["prompt_tokens"]
    # The last step may have accepted more than max_tokens let through.
    assert sum(s.attributes["adaptivespec.accepted"] for s in decoding) >= usage["accepted_tokens"]
    drafting = [span for span in decoding if "adaptivespec.shape" in span.attributes]
    assert drafting
    for span in drafting:
        depth, width, nodes = span.attributes["adaptivespec.shape"]
        assert min(depth, width) >= 0
        assert 1 <= span.attributes["adaptivespec.nodes"] <= max(nodes, 1)
        assert 0 <= span.attributes["adaptivespec.dcs"] <= 1

    verified, drafted = named["adaptivespec.verify"], named["adaptivespec.draft"]
    assert {span.parent_id for span in verified} == {span.span_id for span in steps}
    assert {span.parent_id for span in drafted} <= {span.span_id for span in drafting}
    assert all(span.attributes["adaptivespec.batch.requests"] == 1 for span in drafted)
    assert all(span.attributes["adaptivespec.verify.forward_s"] > 0 for span in verified)

    services = {name: {span.service for span in spans} for name, spans in named.items()}
    assert services == {
        "server": {"adaptivespec-ingress"},
        "adaptivespec.step": {"adaptivespec-orchestrator"},
        "adaptivespec.draft": {"adaptivespec-draft"},
        "adaptivespec.verify": {"adaptivespec-target"},
    }


def test_a_caller_decides_over_its_trace(traced: Server, receiver: OtlpReceiver) -> None:
    unwanted, wanted, parent = secrets.token_hex(16), secrets.token_hex(16), secrets.token_hex(8)
    ask(traced.client("lookup"), traceparent(unwanted, parent, sampled=False))
    ask(traced.client("lookup"), traceparent(wanted, parent, sampled=True))
    named = complete_trace(receiver, wanted)
    assert [span.parent_id for span in named["server"]] == [parent]
    assert not spans_of(receiver.spans, unwanted)


def test_ctrl_c_ends_everything_and_exports_what_is_left(
    traced: Server, receiver: OtlpReceiver
) -> None:
    """The last test of this server."""
    trace = secrets.token_hex(16)
    usage = ask(traced.client("lookup"), traceparent(trace, secrets.token_hex(8), sampled=True))
    assert traced.interrupt() == []
    _, _, farewell = traced.output.partition("Got KeyboardInterrupt")
    assert farewell
    assert "Traceback" not in farewell
    named = spans_of(receiver.spans, trace)
    assert len(named["adaptivespec.step"]) == len(named["adaptivespec.verify"])
    assert len(named["adaptivespec.step"]) == usage["steps"] + 1
    assert len(named["server"]) == 1
    assert named["adaptivespec.draft"]
