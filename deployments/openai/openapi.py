"""The request types in the API's documentation at /docs."""

from typing import Any

import msgspec
from fastapi import FastAPI

from deployments.openai import neutral
from deployments.openai.requests import ChatBody, CompletionBody

_BODIES = {ChatBody: neutral.CHAT, CompletionBody: neutral.COMPLETION}
_REF = "#/components/schemas/{name}"


class DocumentedApp(FastAPI):
    """FastAPI with schemas of msgspec's types, and the parameters of neutral.py with their only
    values."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _with_bodies(super().openapi())
        return self.openapi_schema


def _with_bodies(schema: dict[str, Any]) -> dict[str, Any]:
    _, components = msgspec.json.schema_components(_BODIES, ref_template=_REF)
    for body, table in _BODIES.items():
        for name, values in table.items():
            only = {"enum": list(values), "description": "Not implemented."}
            components[body.__name__]["properties"][name] = only
    schema.setdefault("components", {}).setdefault("schemas", {}).update(components)
    return schema


def request_body(body: type[msgspec.Struct]) -> dict[str, Any]:
    """What `openapi_extra` says of an endpoint that reads `body` itself."""
    schema = {"$ref": _REF.format(name=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
