"""GET /v1/models, /tokenize and /detokenize: answers that need no engine."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from sglang.srt.entrypoints.openai.serving_base import unix_time
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.tokenizer import BaseTokenizer


class OpenAIServingModels:
    """The model card and the tokenizer, as endpoints."""

    def __init__(self, tokenizer_manager: TokenizerManager, chat: OpenAIServingChat) -> None:
        self._manager = tokenizer_manager
        self._chat = chat
        self._created = unix_time()

    def cards(self) -> list[dict[str, Any]]:
        """Every model that a client can name."""
        return [
            {
                "id": self._manager.served_model_name,
                "object": "model",
                "created": self._created,
                "owned_by": "sglang",
                "root": self._manager.served_model_name,
                "parent": None,
                "max_model_len": self._manager.context_len,
            }
        ]

    def card(self, name: str) -> dict[str, Any] | None:
        """The card of one model, or None."""
        return next((card for card in self.cards() if card["id"] == name), None)

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text, of several, or of messages. Raises RequestError."""
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("Exactly one of prompt and messages must be given.")
        is_batch = isinstance(request.prompt, list)
        if request.messages is not None:
            ids = [await self._chat.prompt_ids(_as_chat(request))]
        else:
            texts = request.prompt if isinstance(request.prompt, list) else [request.prompt or ""]
            ids = await self._manager.encode(texts, request.add_special_tokens)
        return {
            "tokens": ids if is_batch else ids[0],
            "count": [len(row) for row in ids] if is_batch else len(ids[0]),
            "max_model_len": self._manager.context_len,
        }

    def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:
        """Text of token ids, or of several lists of them. Raises RequestError."""
        tokenizer = self._tokenizer()
        tokens = request.tokens
        is_batch = bool(tokens) and all(isinstance(row, list) for row in tokens)
        rows: list[list[int]] = tokens if is_batch else [tokens]
        for row in rows:
            if not all(type(t) is int and 0 <= t < self._manager.vocab_size for t in row):
                raise RequestError(
                    f"tokens must be token ids in [0, {self._manager.vocab_size - 1}]."
                )
        texts = [tokenizer.decode(row, request.skip_special_tokens) for row in rows]
        return {"text": texts if is_batch else texts[0]}

    def _tokenizer(self) -> BaseTokenizer:
        if self._manager.tokenizer is None:
            raise RequestError("This server runs with --skip-tokenizer-init.")
        return self._manager.tokenizer


def _as_chat(request: TokenizeRequest) -> ChatCompletionRequest:
    """The chat request whose prompt is asked for."""
    return ChatCompletionRequest(
        messages=request.messages or [],
        tools=request.tools,
        chat_template_kwargs=request.chat_template_kwargs,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )
