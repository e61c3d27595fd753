"""Endpoints that SGLang has and this release does not: a clear refusal in each family's shape.

One table; a feature that arrives takes its row out and brings its own routes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from fastapi import APIRouter
from fastapi.responses import Response

from sglang.srt.entrypoints.http_errors import json_response, openai_error_response

_POST = ("POST",)
_POST_PUT = ("POST", "PUT")

LORA_ENDPOINTS: dict[str, tuple[str, ...]] = {
    "/load_lora_adapter": _POST,
    "/load_lora_adapter_from_tensors": _POST,
    "/unload_lora_adapter": _POST,
}
NATIVE_ENDPOINTS: dict[str, tuple[str, ...]] = {
    "/encode": _POST_PUT,
    "/classify": _POST_PUT,
    "/open_session": _POST,
    "/close_session": _POST,
    "/parse_function_call": _POST,
    "/separate_reasoning": _POST,
}
OPENAI_ENDPOINTS: dict[str, tuple[str, ...]] = {
    "/v1/embeddings": _POST,
    "/v1/score": _POST,
    "/v1/rerank": _POST,
    "/v1/classify": _POST,
    "/v1/messages": _POST,
    "/v1/messages/count_tokens": _POST,
}
RESPONSES_ENDPOINTS: dict[str, tuple[str, ...]] = {"/v1/responses": _POST}

control_router = APIRouter()
router = APIRouter()


def _message(path: str) -> str:
    return f"{path} is not supported by this server."


def _native(path: str) -> Response:
    return json_response({"error": {"message": _message(path)}}, 400)


def _lora(path: str) -> Response:
    content = {"success": False, "error_message": _message(path), "loaded_adapters": {}}
    return json_response(content, 400)


def _openai(path: str) -> Response:
    content = {
        "object": "error",
        "message": _message(path),
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
    return openai_error_response(content)


def _responses(path: str) -> Response:
    error = {"message": _message(path), "type": "BadRequestError", "param": None, "code": 400}
    return json_response({"error": error}, 400)


def _refusing(path: str, render: Callable[[str], Response]) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        return render(path)

    return refuse


def _add(
    target: APIRouter,
    endpoints: dict[str, Iterable[str]],
    render: Callable[[str], Response],
) -> None:
    for path, methods in endpoints.items():
        target.add_api_route(
            path, _refusing(path, render), methods=list(methods), include_in_schema=False
        )


for _target, _endpoints, _render in (
    (control_router, LORA_ENDPOINTS, _lora),
    (router, NATIVE_ENDPOINTS, _native),
    (router, OPENAI_ENDPOINTS, _openai),
    (router, RESPONSES_ENDPOINTS, _responses),
):
    _add(_target, dict(_endpoints), _render)
