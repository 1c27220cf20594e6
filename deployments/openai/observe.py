"""What a request's span says of its answer."""

import time
from collections.abc import AsyncGenerator, AsyncIterator

from opentelemetry.trace import Span, StatusCode

from adaptivespec import tracing
from adaptivespec.errors import TargetLost
from adaptivespec.request import Delta
from deployments.openai.errors import as_api_error


async def observed(deltas: AsyncIterator[Delta], span: Span) -> AsyncGenerator[Delta, None]:
    """Pass on `deltas` and note in the span when they begin and how they end. Raises what they
    raise, and TargetLost when they end before one has a finish reason and the usage."""
    started = time.perf_counter()
    first, finished = True, False
    try:
        async for delta in deltas:
            if first:
                waited = time.perf_counter() - started
                span.set_attribute("adaptivespec.time_to_first_token_s", waited)
                first = False
            if delta.finish_reason is not None and delta.usage is not None:
                finished = True
                span.set_attributes(tracing.response_attributes(delta.finish_reason, delta.usage))
            yield delta
        if not finished:
            raise TargetLost("the target engine ended the answer before it was finished")
    except Exception as error:
        record_error(span, error)
        raise


def record_error(span: Span, error: Exception) -> None:
    """Mark the span as failed, with the error as the client sees it."""
    detail = as_api_error(error).detail
    span.set_attribute("error.type", detail.code or detail.type)
    span.set_status(StatusCode.ERROR, detail.message)
