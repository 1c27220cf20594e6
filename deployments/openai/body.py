"""Reading a request's body, up to a limit."""

from http import HTTPStatus

from starlette.requests import Request

from deployments.openai.errors import INVALID_REQUEST, ApiError, ErrorDetail


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises ApiError (413) as soon as it is known to be longer than `limit`
    bytes, and ClientDisconnect."""
    if int(request.headers.get("content-length", 0)) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes"
    detail = ErrorDetail(message, INVALID_REQUEST, code="request_too_large")
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, detail, {"Connection": "close"})
