"""Ctrl-C ends everything, and what a request's trace is, over all processes, when all have ended.

Spans are exported at the end only: those of a process that does not flush are missing.
"""

import secrets
from typing import NamedTuple

import psutil
import pytest

from tests.e2e.answers import COUNTING, Streamed
from tests.e2e.server import MODEL, Server, application
from tests.otlp import OtlpReceiver, ReceivedSpan

TOKENS = 24
HOUR_MS = 3_600_000
SERVER_KIND = 2  # OTLP's number

Trace = dict[str, list[ReceivedSpan]]


class Asked(NamedTuple):
    """A request, and what its answer said."""

    trace: str  # id of the caller's trace, and
    parent: str  # of its span, if the request named them
    response: str
    usage: dict[str, int]


class Session(NamedTuple):
    """A server's life: three requests, and Ctrl-C in the middle of a fourth."""

    untraced: Asked  # by its caller, who says nothing of traces
    sampled: Asked
    unsampled: Asked
    left: list[psutil.Process]
    farewell: str
    spans: list[ReceivedSpan]

    def trace(self, id: str) -> Trace:
        """The spans of one trace by name; the one of the whole request as "server"."""
        named: Trace = {}
        for span in self.spans:
            if span.trace_id == id:
                name = "server" if span.kind == SERVER_KIND else span.name
                named.setdefault(name, []).append(span)
        return named


@pytest.fixture(scope="module")
def session() -> Session:
    with OtlpReceiver() as receiver:
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_BSP_SCHEDULE_DELAY": str(HOUR_MS),
        }
        with Server([application("lookup")], env) as server:
            server.wait_until_ready()
            asked = ask(server), ask(server, sampled=True), ask(server, sampled=False)
            stream = Streamed(server.client("lookup"), COUNTING, 4000)
            stream.wait_for(5)
            left = server.interrupt()
            stream.leave()
            farewell = server.output.partition("Got KeyboardInterrupt")[2]
        return Session(*asked, left, farewell, receiver.spans)


def ask(server: Server, *, sampled: bool | None = None) -> Asked:
    """One completion, for a caller with a trace unless `sampled` is None."""
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    traceparent = f"00-{trace}-{parent}-{int(sampled or 0):02}"
    answer = server.client("lookup").completions.create(
        model=MODEL,
        prompt=COUNTING,
        temperature=0,
        max_tokens=TOKENS,
        extra_headers={} if sampled is None else {"traceparent": traceparent},
    )
    assert answer.usage is not None
    usage: dict[str, int] = answer.usage.speculation  # type: ignore[attr-defined]
    usage = usage | {"prompt_tokens": answer.usage.prompt_tokens}
    return Asked(trace, parent, answer.id, usage)


def test_ctrl_c_ends_all_processes_quietly(session: Session) -> None:
    assert session.left == []
    assert session.farewell
    for noise in (
        "Traceback",
        "Request failed",
        "Fatal Python error",
        "Stack trace",
        "never awaited",
    ):
        assert noise not in session.farewell, session.farewell


def test_a_request_is_one_tree_of_spans_over_all_processes(session: Session) -> None:
    usage = session.untraced.usage
    [root] = [
        span
        for span in session.spans
        if span.attributes.get("gen_ai.response.id") == session.untraced.response
    ]
    assert root.parent_id == ""
    assert root.name == f"text_completion {MODEL}"
    assert root.attributes["gen_ai.request.model"] == MODEL
    assert root.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert root.attributes["adaptivespec.usage.accepted_tokens"] == usage["accepted_tokens"]

    trace = session.trace(root.trace_id)
    assert trace["server"] == [root]
    steps = trace["adaptivespec.step"]
    assert {span.parent_id for span in steps} == {root.span_id}
    assert len(steps) == usage["steps"] + 1  # and the prompt's
    prompt, *decoding = sorted(steps, key=lambda span: span.start_ns)
    assert prompt.attributes["adaptivespec.prompt_tokens"] == usage["prompt_tokens"]
    # The last step may have accepted more than max_tokens let through.
    assert sum(s.attributes["adaptivespec.accepted"] for s in decoding) >= usage["accepted_tokens"]
    drafting = [span for span in decoding if "adaptivespec.shape" in span.attributes]
    assert drafting
    for span in drafting:
        _, _, nodes = span.attributes["adaptivespec.shape"]
        assert 1 <= span.attributes["adaptivespec.nodes"] <= nodes
        assert 0 <= span.attributes["adaptivespec.dcs"] <= 1

    verified, drafted = trace["adaptivespec.verify"], trace["adaptivespec.draft"]
    assert len(verified) == len(steps)
    assert {span.parent_id for span in verified} == {span.span_id for span in steps}
    assert {span.parent_id for span in drafted} <= {span.span_id for span in drafting}
    assert all(span.attributes["adaptivespec.batch.requests"] == 1 for span in drafted)
    assert all(span.attributes["adaptivespec.verify.forward_s"] > 0 for span in verified)


def test_every_process_is_a_service_of_its_own(session: Session) -> None:
    services: dict[str, set[str]] = {}
    for span in session.spans:
        name = "server" if span.kind == SERVER_KIND else span.name
        services.setdefault(name, set()).add(span.service)
    assert services == {
        "server": {"adaptivespec-ingress"},
        "adaptivespec.step": {"adaptivespec-orchestrator"},
        "adaptivespec.draft": {"adaptivespec-draft"},
        "adaptivespec.verify": {"adaptivespec-target"},
    }


def test_a_callers_trace_goes_on(session: Session) -> None:
    trace = session.trace(session.sampled.trace)
    assert [span.parent_id for span in trace["server"]] == [session.sampled.parent]
    assert len(trace["adaptivespec.verify"]) == session.sampled.usage["steps"] + 1


def test_a_caller_who_samples_nothing_gets_nothing(session: Session) -> None:
    assert session.trace(session.unsampled.trace) == {}
    responses = {span.attributes.get("gen_ai.response.id") for span in session.spans}
    assert session.unsampled.response not in responses
