"""The OpenAI endpoints and the tokenizer ones: HTTP around `entrypoints.openai`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sglang.srt.entrypoints.http_body import BodyError, body_schema, read_as
from sglang.srt.entrypoints.http_errors import (
    error_type,
    json_response,
    openai_error_response,
    openai_validation_error,
)
from sglang.srt.entrypoints.http_state import get_global_state
from sglang.srt.entrypoints.http_stream import answers_errors, start_stream
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_models import OpenAIServingModels
from sglang.srt.managers.request_errors import RequestError

router = APIRouter()
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Serving:
    """The serving objects of one engine."""

    manager: Any
    chat: OpenAIServingChat
    completion: OpenAIServingCompletion
    models: OpenAIServingModels


_serving: _Serving | None = None


def _get_serving() -> _Serving:
    """The serving objects of the current engine, made at its first request."""
    global _serving
    state = get_global_state()
    manager, templates = state.tokenizer_manager, state.template_manager
    if _serving is None or _serving.manager is not manager:
        chat = OpenAIServingChat(manager, templates)
        _serving = _Serving(
            manager,
            chat,
            OpenAIServingCompletion(manager, templates),
            OpenAIServingModels(manager, chat),
        )
    return _serving


def openai_error(exc: RequestError) -> dict[str, Any]:
    """The error object of these endpoints."""
    return {
        "object": "error",
        "message": exc.message,
        "type": exc.err_type or error_type(exc.status_code),
        "param": None,
        "code": exc.status_code,
    }


def _error_response(exc: RequestError) -> Response:
    return openai_error_response(openai_error(exc))


def _error_event(exc: RequestError) -> dict[str, Any]:
    return {"error": openai_error(exc)}


openai = answers_errors(_error_response, openai_validation_error)


async def _read(request: Request, cls: type[T]) -> T:
    """The typed body; these endpoints insist on the JSON content type."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise BodyError("The content type must be application/json.")
    return await read_as(request, cls)


@router.post(
    "/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest, required=True)
)
@router.post(
    "/invocations",
    openapi_extra=body_schema(ChatCompletionRequest, required=True),
    include_in_schema=False,
)
@openai
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    obj = await _read(request, ChatCompletionRequest)
    chat = _get_serving().chat
    if obj.stream:
        source: AsyncIterator[dict[str, Any]] = chat.stream(obj, request)
        return await start_stream(source, _error_event)
    return json_response(await chat.create(obj, request))


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest, required=True))
@openai
async def completions(request: Request) -> Response:
    """Continue a text."""
    obj = await _read(request, CompletionRequest)
    completion = _get_serving().completion
    if obj.stream:
        source: AsyncIterator[dict[str, Any]] = completion.stream(obj, request)
        return await start_stream(source, _error_event)
    return json_response(await completion.create(obj, request))


@router.get("/v1/models")
async def models() -> Response:
    """The models that requests can name."""
    return json_response({"object": "list", "data": _get_serving().models.cards()})


@router.get("/v1/models/{model_id:path}")
async def model_card(model_id: str) -> Response:
    """One model."""
    card = _get_serving().models.card(model_id)
    if card is not None:
        return json_response(card)
    error = {
        "message": f"The model '{model_id}' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return json_response({"error": error}, 404)


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest, required=True))
@router.post("/v1/tokenize", openapi_extra=body_schema(TokenizeRequest, required=True))
@openai
async def tokenize(request: Request) -> Response:
    """Text to token ids."""
    return json_response(
        await _get_serving().models.tokenize(await _read(request, TokenizeRequest))
    )


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest, required=True))
@router.post("/v1/detokenize", openapi_extra=body_schema(DetokenizeRequest, required=True))
@openai
async def detokenize(request: Request) -> Response:
    """Token ids to text."""
    obj = await _read(request, DetokenizeRequest)
    return json_response(_get_serving().models.detokenize(obj))
