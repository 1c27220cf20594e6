import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import INVALID_SPAN, Span

from adaptivespec import tracing
from adaptivespec.errors import ConfigError
from adaptivespec.request import GenerationRequest, StepSeconds, Usage
from adaptivespec.sampling import SamplingParams
from tests.otlp import OtlpReceiver
from tests.transport.peers import FRESH

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
TRACE_ID, CALLER_ID = SAMPLED.split("-")[1:3]
NOW = 1_764_000_000.123456

REQUEST = GenerationRequest(
    prompt=[1, 2, 3],
    max_tokens=64,
    sampling=SamplingParams(temperature=0.7, top_k=40, top_p=0.9, seed=7),
    stop=("\n\n",),
    kappa=0.2,
)
USAGE = Usage(
    prompt_tokens=3,
    completion_tokens=12,
    steps=4,
    drafted_tokens=16,
    accepted_tokens=8,
    promoted_tokens=2,
    accepted_per_position=[4, 3, 1],
    step_seconds=StepSeconds(),
)


@contextmanager
def process(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """A process of its own, with these OTEL_* variables and no others."""
    with ProcessPoolExecutor(1, FRESH, _set_environment, (environment,)) as pool:
        yield pool


def _set_environment(environment: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    os.environ.update(environment)


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


# What the processes do. The ingress and the orchestrator are one process here.

_open: list[Span] = []


def begin(headers: dict[str, str]) -> str | None:
    """Start a request and its first step; returns the context for the workers of the step."""
    tracing.configure("ingress")
    attributes = tracing.request_attributes(REQUEST)
    request = tracing.start_request_span("chat", "tiny", headers, attributes)
    step = tracing.start_step_span(tracing.traceparent_of(request))
    _open.extend((request, step))
    return tracing.traceparent_of(step)


def finish() -> None:
    request, step = _open
    step.set_attribute("adaptivespec.step.accepted_tokens", 2)
    step.end()
    request.set_attributes(tracing.response_attributes("stop", USAGE))
    request.end()
    tracing.shutdown()


def verify(traceparent: str) -> None:
    tracing.configure("target")
    attributes = {"adaptivespec.batch.nodes": 8, "adaptivespec.verify.forward_s": 0.25}
    tracing.record_span(traceparent, "adaptivespec.verify", NOW, NOW + 0.25, attributes)
    tracing.shutdown()


def burst(count: int) -> None:
    tracing.configure("target")
    for _ in range(count):
        tracing.record_span(SAMPLED, "adaptivespec.verify", NOW, NOW, {})
    tracing.shutdown()


def is_configured() -> bool:
    return tracing.configure("target") is not None


def is_configured_once() -> bool:
    return tracing.configure("one") is tracing.configure("two") is not None


def do_everything_while_off() -> bool:
    """Use every function; True if none of them made anything."""
    tracer = tracing.configure("target")
    request = tracing.start_request_span("chat", "tiny", {"traceparent": SAMPLED}, {})
    step = tracing.start_step_span(SAMPLED)
    tracing.record_span(SAMPLED, "adaptivespec.verify", NOW, NOW, {})
    step.end()
    context = tracing.traceparent_of(step)
    tracing.shutdown()
    return tracer is None and request is step is INVALID_SPAN and context is None


def test_spans_of_two_processes_join_in_one_trace_below_the_callers(
    receiver: OtlpReceiver,
) -> None:
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint}
    with process(**endpoint) as ingress, process(**endpoint) as target:
        context = ingress.submit(begin, {"traceparent": SAMPLED, "tracestate": "a=b"}).result()
        assert context is not None
        target.submit(verify, context).result()
        ingress.submit(finish).result()
    spans = {span.name: span for span in receiver.spans}
    request, step, verified = (
        spans["chat tiny"],
        spans["adaptivespec.step"],
        spans["adaptivespec.verify"],
    )
    assert {span.trace_id for span in spans.values()} == {TRACE_ID}
    assert request.parent_id == CALLER_ID
    assert step.parent_id == request.span_id
    assert verified.parent_id == step.span_id
    assert (request.service, step.service, verified.service) == ("ingress", "ingress", "target")
    assert (request.kind, step.kind) == (2, 1)
    assert request.start_ns <= step.start_ns <= step.end_ns <= request.end_ns
    assert verified.start_ns == pytest.approx(NOW * 1e9, abs=1000)
    assert verified.end_ns - verified.start_ns == pytest.approx(0.25e9, abs=1000)
    assert step.attributes == {"adaptivespec.step.accepted_tokens": 2}
    assert verified.attributes == {
        "adaptivespec.batch.nodes": 8,
        "adaptivespec.verify.forward_s": 0.25,
    }
    assert request.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "adaptivespec",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 64,
        "gen_ai.request.temperature": 0.7,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 40,
        "gen_ai.request.seed": 7,
        "gen_ai.request.stop_sequences": ["\n\n"],
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 12,
        "adaptivespec.mode": "adaptive",
        "adaptivespec.kappa": 0.2,
        "adaptivespec.usage.steps": 4,
        "adaptivespec.usage.drafted_tokens": 16,
        "adaptivespec.usage.accepted_tokens": 8,
        "adaptivespec.usage.promoted_tokens": 2,
        "adaptivespec.usage.mean_acceptance_length": 3.0,
    }


def test_a_request_without_a_caller_starts_a_trace(receiver: OtlpReceiver) -> None:
    with process(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint) as ingress:
        assert ingress.submit(begin, {}).result() is not None
        ingress.submit(finish).result()
    assert {span.name: span.parent_id for span in receiver.spans}["chat tiny"] == ""


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": ""},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "here", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "here", "OTEL_TRACES_EXPORTER": "none"},
    ],
    ids=lambda environment: " ".join(environment) or "nothing",
)
def test_off_makes_and_exports_nothing(receiver: OtlpReceiver, environment: dict[str, str]) -> None:
    environment = {k: receiver.endpoint if v == "here" else v for k, v in environment.items()}
    with process(**environment) as pool:
        assert pool.submit(do_everything_while_off).result()
    assert receiver.spans == []


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1/v1/traces"},
        {"OTEL_TRACES_EXPORTER": "otlp"},
        {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        },
    ],
    ids=lambda environment: " ".join(environment),
)
def test_an_endpoint_or_the_exporters_name_switches_it_on(environment: dict[str, str]) -> None:
    with process(**environment) as pool:
        assert pool.submit(is_configured).result()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json"),
        ("OTEL_TRACES_EXPORTER", "console"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(variable: str, value: str) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", variable: value}
    with (
        process(**environment) as pool,
        pytest.raises(ConfigError, match=f"{variable}: '{value}'.*allowed"),
    ):
        pool.submit(is_configured).result()


def test_configuring_twice_gives_the_same_tracer(receiver: OtlpReceiver) -> None:
    with process(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint) as pool:
        assert pool.submit(is_configured_once).result()


def test_the_environment_names_the_service(receiver: OtlpReceiver) -> None:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_SERVICE_NAME": "mine"}
    with process(**environment) as pool:
        pool.submit(verify, SAMPLED).result()
    assert [span.service for span in receiver.spans] == ["mine"]


@pytest.mark.parametrize(
    ("headers", "sampled"),
    [({"traceparent": UNSAMPLED}, False), ({"traceparent": SAMPLED}, True), ({}, False)],
)
def test_the_caller_decides_what_is_sampled_and_the_ratio_the_rest(
    receiver: OtlpReceiver, headers: dict[str, str], sampled: bool
) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0",
    }
    with process(**environment) as pool:
        assert (pool.submit(begin, headers).result() is not None) == sampled
        pool.submit(finish).result()
    assert len(receiver.spans) == (2 if sampled else 0)


def test_a_worker_records_nothing_for_an_unsampled_request(receiver: OtlpReceiver) -> None:
    with process(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint) as pool:
        pool.submit(verify, UNSAMPLED).result()
    assert receiver.spans == []


def test_a_burst_of_spans_loses_none(receiver: OtlpReceiver) -> None:
    with process(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint) as pool:
        pool.submit(burst, 20_000).result()
    assert len(receiver.spans) == 20_000


def test_the_environment_sets_the_queue(receiver: OtlpReceiver) -> None:
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
        "OTEL_BSP_MAX_QUEUE_SIZE": "16",
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "16",
    }
    with process(**environment) as pool:
        pool.submit(burst, 5000).result()
    assert 0 < len(receiver.spans) < 5000


def test_our_gen_ai_names_are_those_of_the_conventions() -> None:
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    ours = {*tracing.request_attributes(REQUEST), *tracing.response_attributes("stop", USAGE)}
    assert {name for name in ours if not name.startswith("adaptivespec.")} <= known


def test_what_a_greedy_request_does_not_set_is_left_out() -> None:
    attributes = tracing.request_attributes(GenerationRequest(prompt=[1], max_tokens=1))
    assert not attributes.keys() & {
        "gen_ai.request.seed",
        "gen_ai.request.top_k",
        "gen_ai.request.stop_sequences",
    }
