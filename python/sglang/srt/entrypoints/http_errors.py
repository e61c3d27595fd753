"""The error bodies of the HTTP interface. Each endpoint family has its own shape.

Handlers raise `RequestError`; the decorators and exception handlers of `http_server` render it
with the functions here.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson
from fastapi.responses import Response

from sglang.srt.managers.request_errors import RequestError, RequestShapeError

_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def json_response(content: Any, status_code: int = 200) -> Response:
    """A JSON answer. NaN and infinities, which JSON lacks, are written as null.

    Values that are no JSON (a torch dtype among the settings) are written as their text.
    """
    return Response(
        orjson.dumps(content, default=str, option=_JSON_OPTIONS),
        status_code=status_code,
        media_type="application/json",
    )


def validation_error(message: str) -> Response:
    """A request whose form is wrong, on any endpoint: 400, never 422."""
    return json_response(_validation_content(message), 400)


def openai_validation_error(message: str) -> Response:
    """`validation_error` of the OpenAI endpoints."""
    return openai_error_response(_validation_content(message))


def openai_error_response(error: dict[str, Any]) -> Response:
    """An error of the OpenAI endpoints: its members, and the same once more under `error`.

    Some clients read the message at the top level, some only in the `error` object, where
    OpenAI's own API has it.
    """
    return json_response({**error, "error": error}, error["code"])


def _validation_content(message: str) -> dict[str, Any]:
    return {
        "object": "error",
        "message": message,
        "type": "Bad Request",
        "param": None,
        "code": 400,
    }


def http_exception(message: str, status_code: int) -> Response:
    """A refusal that is not about the request's form: overload, shut-down, missing route."""
    return json_response(
        {
            "object": "error",
            "message": message,
            "type": str(status_code),
            "param": None,
            "code": status_code,
        },
        status_code,
    )


def native_error(exc: RequestError) -> Response:
    """An error of the native endpoints."""
    if isinstance(exc, RequestShapeError):
        return json_response({"error": exc.message}, exc.status_code)
    if exc.status_code >= 500:
        return http_exception(exc.message, exc.status_code)
    return json_response({"error": {"message": exc.message}}, exc.status_code)


def native_stream_error(exc: RequestError) -> dict[str, Any]:
    """The event that ends a native stream which has already begun."""
    return {
        "error": {
            "message": exc.message,
            "type": exc.err_type or error_type(exc.status_code),
            "code": exc.status_code,
            "retryable": exc.status_code in (429, 502, 503, 504),
        }
    }


def weight_error(message: str, **extra: Any) -> Response:
    """A failure of the weight-update family: the keys of a success, `success` false."""
    return json_response({"success": False, "message": message, **extra}, 400)


def error_type(status_code: int) -> str:
    """`BadRequestError`, `InternalServerError`, … from the status."""
    try:
        name = HTTPStatus(status_code).phrase.title().replace(" ", "").replace("-", "")
    except ValueError:
        name = "ClientError" if status_code < 500 else "ServerError"
    return name if name.endswith("Error") else f"{name}Error"


def weight_route_error(exc: RequestError) -> Response:
    """A refusal keeps the keys of a success; an engine that is gone is no refusal."""
    return native_error(exc) if exc.status_code >= 500 else weight_error(exc.message)
