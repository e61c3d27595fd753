"""The one way in which request bodies are read: strict JSON -> typed dataclass.

`read_json` decodes (absent body = `{}`, also on GET); `read_as` converts to a dataclass: unknown
keys are ignored, null means the default, numbers may come as text. `body_schema` is the same
dataclass as an OpenAPI request body, so that the published schema and the parser cannot differ.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import msgspec
import orjson
from fastapi import Request

from sglang.srt.managers.io_struct import ControlReqInput

T = TypeVar("T")

# Of our own processes, not of clients.
_INTERNAL_FIELDS = frozenset(field.name for field in dataclasses.fields(ControlReqInput))


class BodyError(ValueError):
    """The body is no JSON, or does not fit; the text is for the client."""


async def read_json(request: Request) -> Any:
    """The decoded body. Raises BodyError."""
    raw = await request.body()
    if not raw.strip():
        return {}
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise BodyError(f"The body is not valid JSON: {exc}") from exc


def convert(body: Any, cls: type[T]) -> T:
    """A dataclass from decoded JSON. Raises BodyError."""
    if not isinstance(body, dict):
        raise BodyError(f"The body must be a JSON object, got {type(body).__name__}.")
    given = {
        key: value
        for key, value in body.items()
        if value is not None and key not in _INTERNAL_FIELDS
    }
    try:
        return msgspec.convert(given, cls, strict=False)
    except msgspec.ValidationError as exc:
        raise BodyError(str(exc)) from exc


async def read_as(request: Request, cls: type[T]) -> T:
    """`read_json` and `convert`."""
    return convert(await read_json(request), cls)


def body_schema(cls: type, *, required: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route that reads a `cls`."""
    (reference,), components = msgspec.json.schema_components([cls], ref_template="#/$defs/{name}")
    schema = _inline(reference, components)
    for name in _INTERNAL_FIELDS:
        schema["properties"].pop(name, None)
    return raw_body_schema(schema, required=required)


def raw_body_schema(schema: dict[str, Any], *, required: bool = False) -> dict[str, Any]:
    """`openapi_extra` of a route with a hand-written JSON schema."""
    content = {"application/json": {"schema": schema}}
    return {"requestBody": {"required": required, "content": content}}


def _inline(schema: Any, components: dict[str, Any]) -> Any:
    """Replace references by what they point to: OpenAPI keeps components elsewhere."""
    if isinstance(schema, dict):
        ref = schema.get("$ref")
        if ref is not None:
            return _inline(components[ref.rsplit("/", 1)[1]], components)
        return {key: _inline(value, components) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_inline(item, components) for item in schema]
    return schema
