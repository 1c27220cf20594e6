"""Errors as OpenAI's clients read them: an HTTP status, and a body with message, type, param and
code."""

import reprlib
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from adaptivespec.errors import Overloaded, RequestError, TargetLost

INVALID_REQUEST = "invalid_request_error"


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ApiError(Exception):
    """An error that says itself which status and body it has."""

    def __init__(
        self, status: int, detail: ErrorDetail, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail
        self.headers = headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the offending parameter."""
    return ApiError(HTTPStatus.BAD_REQUEST, ErrorDetail(message, INVALID_REQUEST, param, code))


_SHORT = reprlib.Repr()
_SHORT.maxstring = 80


def shown(value: Any) -> str:
    """A JSON value for a message: one line, cut where it is long or deep."""
    if value is None or isinstance(value, bool):
        return msgspec.json.encode(value).decode()
    return _SHORT.repr(value)


def as_api_error(error: Exception) -> ApiError:
    """The status and body of any error; of an unexpected one, no more than that it happened."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return invalid(error.message, error.param)
        case Overloaded():
            detail = ErrorDetail(str(error), "rate_limit_error", code="rate_limit_exceeded")
            return ApiError(HTTPStatus.TOO_MANY_REQUESTS, detail, {"Retry-After": "1"})
        case TargetLost():
            detail = ErrorDetail(str(error), "server_error", code="service_unavailable")
            return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, detail)
        case HTTPException():
            detail = ErrorDetail(str(error.detail), INVALID_REQUEST)
            return ApiError(error.status_code, detail, dict(error.headers or {}))
        case _:
            detail = ErrorDetail("internal error; see the server's log", "server_error")
            return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, detail)


def error_body(error: Exception) -> ErrorBody:
    return ErrorBody(as_api_error(error).detail)


def error_response(error: Exception) -> Response:
    api_error = as_api_error(error)
    return Response(
        msgspec.json.encode(ErrorBody(api_error.detail)),
        status_code=api_error.status,
        media_type="application/json",
        headers=api_error.headers,
    )
