"""Traces by OpenTelemetry, for the several processes that serve one request.

Everything is set by the standard OTEL_* variables. Tracing is off, and every function here costs
next to nothing, unless OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or
OTEL_TRACES_EXPORTER=otlp asks for it; OTEL_SDK_DISABLED=true switches it off again. Traces are
sampled by request (OTEL_TRACES_SAMPLER; by default as the caller decided, else all): the ingress
decides, and the other processes follow the `traceparent` (W3C Trace Context) that they are given.

    chat | text_completion <model>         ingress: GenAI conventions and adaptivespec.*
      adaptivespec.step                    orchestrator: one per traced request and step
        adaptivespec.draft                 drafter
        adaptivespec.verify                target
"""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from adaptivespec.errors import ConfigError
from adaptivespec.request import FinishReason, GenerationRequest, Usage

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

Attributes = Mapping[str, str | bool | int | float | list[str]]

QUEUE_SIZE = 65536
"""Finished spans that may wait for export unless OTEL_BSP_MAX_QUEUE_SIZE says otherwise. Steps are
short: the SDK's 2048 would overflow, and lose spans, between two exports."""

_w3c = TraceContextTextMapPropagator()
_provider: "TracerProvider | None" = None
_tracer: Tracer | None = None


def configure(service_name: str, provider: "TracerProvider | None" = None) -> Tracer | None:
    """Set up this process's tracer, once; None when tracing is off. OTEL_SERVICE_NAME takes
    precedence over `service_name`. A `provider` is used as it is, whatever the variables say.
    Raises ConfigError when another exporter than OTLP, or another protocol than http/protobuf, is
    asked for."""
    global _provider, _tracer
    if _tracer is None and (provider is not None or wanted()):
        _provider = provider or _new_provider(service_name)
        _tracer = _provider.get_tracer("adaptivespec")
    return _tracer


def shutdown() -> None:
    """Export what has ended, and switch tracing off in this process; idempotent."""
    global _provider, _tracer
    if _provider is not None:
        _provider.shutdown()
    _provider = _tracer = None


def start_request_span(
    operation: Literal["chat", "text_completion"],
    model: str,
    headers: Mapping[str, str],
    attributes: Attributes,
) -> Span:
    """The server span of a request, a child of the caller's when its HTTP headers (lower-case
    names) carry a trace context. The caller of this function ends it."""
    if _tracer is None:
        return INVALID_SPAN
    return _tracer.start_span(
        f"{operation} {model}",
        context=_w3c.extract(headers),
        kind=SpanKind.SERVER,
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "adaptivespec",
            "gen_ai.request.model": model,
            **attributes,
        },
    )


def start_step_span(traceparent: str | None) -> Span:
    """The span of one step of a request; not recording when tracing is off or `traceparent` is None
    or not sampled. `traceparent_of` it goes to the workers; the caller of this function ends it."""
    if _tracer is None or traceparent is None:
        return INVALID_SPAN
    context = _w3c.extract({"traceparent": traceparent})
    return _tracer.start_span("adaptivespec.step", context=context)


def traceparent_of(span: Span) -> str | None:
    """The W3C trace context of a span, whether or not it has ended; None when it is not sampled, so
    that nobody downstream does work for it."""
    if not span.get_span_context().trace_flags.sampled:
        return None
    carrier: dict[str, str] = {}
    _w3c.inject(carrier, set_span_in_context(span))
    return carrier["traceparent"]


def record_span(
    traceparent: str, name: str, start_s: float, end_s: float, attributes: Attributes
) -> None:
    """Record a span that is already over, below the span of another process. Times are seconds
    since the epoch. Does nothing when tracing is off or the parent is not sampled."""
    if _tracer is None:
        return
    span = _tracer.start_span(
        name,
        context=_w3c.extract({"traceparent": traceparent}),
        attributes=attributes,
        start_time=round(start_s * 1e9),
    )
    span.end(round(end_s * 1e9))


def request_attributes(request: GenerationRequest) -> Attributes:
    """What a request asks for. gen_ai.*: OpenTelemetry's semantic conventions for generative AI,
    github.com/open-telemetry/semantic-conventions-genai."""
    sampling = request.sampling
    attributes: dict[str, str | bool | int | float | list[str]] = {
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "adaptivespec.mode": request.mode,
        "adaptivespec.kappa": request.kappa,
    }
    if not sampling.greedy:
        attributes["gen_ai.request.seed"] = sampling.seed
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if request.stop:
        attributes["gen_ai.request.stop_sequences"] = list(request.stop)
    return attributes


def response_attributes(finish_reason: FinishReason, usage: Usage) -> Attributes:
    """What a request got. A step is one pass of the target."""
    return {
        "gen_ai.response.finish_reasons": [finish_reason],
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "adaptivespec.usage.steps": usage.steps,
        "adaptivespec.usage.drafted_tokens": usage.drafted_tokens,
        "adaptivespec.usage.accepted_tokens": usage.accepted_tokens,
        "adaptivespec.usage.promoted_tokens": usage.promoted_tokens,
        "adaptivespec.usage.mean_acceptance_length": usage.mean_acceptance_length,
    }


def wanted() -> bool:
    """Whether the environment asks for traces. Raises ConfigError as `configure` does."""
    if _variable("OTEL_SDK_DISABLED").lower() == "true":
        return False
    exporter = _variable("OTEL_TRACES_EXPORTER").lower()
    if exporter not in ("", "otlp", "none"):
        raise ConfigError(
            f"OTEL_TRACES_EXPORTER: {exporter!r} is not supported; allowed: otlp, none"
        )
    endpoints = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
    if exporter == "none" or (exporter == "" and not any(_variable(name) for name in endpoints)):
        return False
    for name in "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL":
        protocol = _variable(name)
        if protocol not in ("", "http/protobuf"):
            raise ConfigError(f"{name}: {protocol!r} is not supported; allowed: http/protobuf")
        if protocol:
            break  # the specific variable overrides the general one
    return True


def _variable(name: str) -> str:
    return os.environ.get(name, "").strip()


def _new_provider(service_name: str) -> "TracerProvider":
    # Imported here, so that a process without traces neither loads nor waits for the SDK.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = _variable("OTEL_SERVICE_NAME") or service_name
    queue_size = None if _variable("OTEL_BSP_MAX_QUEUE_SIZE") else QUEUE_SIZE
    provider = TracerProvider(resource=Resource.create({"service.name": named}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=queue_size))
    return provider
