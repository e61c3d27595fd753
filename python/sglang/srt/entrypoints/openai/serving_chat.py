"""POST /v1/chat/completions: messages in, an assistant message out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_base import (
    OpenAIServingBase,
    check_max_tokens,
    finish_fields,
    model_sampling_defaults,
    response_id,
    sglext,
    unix_time,
    version_metadata,
)
from sglang.srt.entrypoints.openai.template_manager import TemplateManager, plain_messages
from sglang.srt.managers.client_watch import ClientConnection
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.tokenizer import BaseTokenizer


class OpenAIServingChat(OpenAIServingBase):
    """See the module docstring."""

    def __init__(
        self, tokenizer_manager: TokenizerManager, template_manager: TemplateManager
    ) -> None:
        super().__init__(tokenizer_manager, template_manager)
        self._defaults = model_sampling_defaults(tokenizer_manager.server_args)

    async def create(
        self, request: ChatCompletionRequest, connection: ClientConnection | None
    ) -> dict[str, Any]:
        """The whole answer. Raises RequestError."""
        native = await self._native(request)
        answer = await anext(self.manager.generate_request(native, connection))
        answers = answer if isinstance(answer, list) else [answer]
        metas = [item["meta_info"] for item in answers]
        response: dict[str, Any] = {
            "id": response_id(native),
            "object": "chat.completion",
            "created": unix_time(),
            "model": self.model_name(request),
            "choices": [self._choice(request, index, item) for index, item in enumerate(answers)],
            "usage": self.usage(metas, request.n),
            "metadata": version_metadata(metas[0]),
        }
        extension = self._extension(request, answers[0])
        if extension is not None:
            response["sglext"] = extension
        return response

    async def stream(
        self, request: ChatCompletionRequest, connection: ClientConnection | None
    ) -> AsyncIterator[dict[str, Any]]:
        """Role, content and finish chunks of every choice, then extension and usage.

        Raises RequestError.
        """
        native = await self._native(request)
        metas: dict[int, dict[str, Any]] = {}
        head: dict[str, Any] = {
            "id": response_id(native),
            "object": "chat.completion.chunk",
            "created": unix_time(),
            "model": self.model_name(request),
        }
        continuous = self.wants_continuous_usage(request)
        prompt_ids: list[int] | None = None
        output_ids: dict[int, list[int]] = defaultdict(list)
        async for item in self.manager.generate_request(native, connection, incremental=True):
            index, meta = item.get("index", 0), item["meta_info"]
            is_first = index not in metas
            metas[index] = meta
            prompt_ids = item.get("prompt_token_ids")
            output_ids[index] += item["output_ids"]
            choices = self._chunk_choices(request, index, item, is_first)
            if request.return_token_ids and meta["finish_reason"] is not None:
                choices[-1]["token_ids"] = output_ids[index]
            for choice in choices:
                chunk = {**head, "choices": [choice]}
                if continuous:
                    chunk["usage"] = self.usage([meta], 1)
                yield chunk
        ordered = [metas[index] for index in sorted(metas)]
        tail = {**head, "choices": []}
        first = {"prompt_token_ids": prompt_ids, "output_ids": output_ids[0]}
        extension = self._extension(request, {**first, "meta_info": ordered[0]})
        if extension is not None:
            yield {**tail, "sglext": extension}
        if self.wants_final_usage(request):
            yield {**tail, "usage": self.usage(ordered, request.n)}

    # -- request --------------------------------------------------------------------------------

    async def _native(self, request: ChatCompletionRequest) -> GenerateReqInput:
        if request.top_logprobs and not request.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.")
        max_tokens, name = request.max_completion_tokens, "max_completion_tokens"
        if max_tokens is None:
            max_tokens, name = request.max_tokens, "max_tokens"
        if max_tokens is not None:
            check_max_tokens(name, max_tokens)
        prompt: dict[str, Any]
        if request.input_ids is not None:
            prompt = {"input_ids": request.input_ids}
        else:
            prompt = {"input_ids": await self.prompt_ids(request)}
        return self.generate_input(
            request,
            self.sampling_params(request, max_tokens, self._defaults),
            return_logprob=request.logprobs,
            top_logprobs_num=request.top_logprobs,
            return_prompt_token_ids=request.return_token_ids,
            **prompt,
        )

    async def prompt_ids(self, request: ChatCompletionRequest) -> list[int]:
        """Token ids of the rendered messages. Raises RequestError."""
        messages = plain_messages(request.messages)
        if request.continue_final_message and messages[-1]["role"] != "assistant":
            raise RequestError("continue_final_message needs a last message of the assistant.")
        extra = dict(request.chat_template_kwargs or {})
        if request.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", request.reasoning_effort)
        text = self.templates.render(
            messages,
            tools=self._tools(request),
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            extra=extra,
        )
        self.manager.check_text(text)
        # Templates write the special tokens themselves: a second BOS would change the answer.
        return (await self.manager.encode([text], add_special_tokens=False))[0]

    @staticmethod
    def _tools(request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
        """The tools that the template shows. Raises RequestError where a call would be forced."""
        choice = request.tool_choice
        if choice is not None and choice not in ("auto", "none"):
            raise RequestError(
                "tool_choice must be auto or none: this server cannot force a tool call."
            )
        return request.tools if request.tools and choice != "none" else None

    # -- answer ---------------------------------------------------------------------------------

    def _choice(
        self, request: ChatCompletionRequest, index: int, item: dict[str, Any]
    ) -> dict[str, Any]:
        meta = item["meta_info"]
        choice: dict[str, Any] = {
            "index": index,
            "message": {
                "role": "assistant",
                "content": item.get("text", ""),
                "reasoning_content": None,
                "tool_calls": None,
            },
            "logprobs": self._logprobs(request, meta),
            **finish_fields(meta),
        }
        if request.return_token_ids:
            choice["token_ids"] = item["output_ids"]
        if request.return_hidden_states:
            choice["hidden_states"] = meta.get("hidden_states")
        return choice

    def _chunk_choices(
        self, request: ChatCompletionRequest, index: int, item: dict[str, Any], is_first: bool
    ) -> list[dict[str, Any]]:
        """The choices, one a chunk, that one piece of news gives: role, content, finish."""
        meta = item["meta_info"]
        choices: list[dict[str, Any]] = []

        def add(delta: dict[str, Any], logprobs: Any = None, **finish: Any) -> None:
            finish = finish or {"finish_reason": None, "matched_stop": None}
            choices.append({"index": index, "delta": delta, "logprobs": logprobs, **finish})

        if is_first:
            add({"role": "assistant", "content": "", "reasoning_content": None})
        logprobs = self._logprobs(request, meta)
        if item.get("text") or (logprobs and logprobs["content"]):
            add({"content": item.get("text", "")}, logprobs)
        if meta["finish_reason"] is not None:
            add({}, None, **finish_fields(meta))
            if request.return_hidden_states:
                choices[-1]["hidden_states"] = meta.get("hidden_states")
        return choices

    def _logprobs(
        self, request: ChatCompletionRequest, meta: dict[str, Any]
    ) -> dict[str, Any] | None:
        return chat_logprobs(meta, self.manager.tokenizer) if request.logprobs else None

    def _extension(
        self, request: ChatCompletionRequest, item: dict[str, Any]
    ) -> dict[str, Any] | None:
        block = sglext(request, item["meta_info"]) or {}
        if request.return_token_ids:
            block["input_ids"] = item.get("prompt_token_ids")
            block["output_ids"] = item["output_ids"]
        return block or None


def chat_logprobs(meta: dict[str, Any], tokenizer: BaseTokenizer | None) -> dict[str, Any]:
    """The chat form of the logprobs in this choice or chunk."""
    rows = meta["output_token_logprobs"]
    tops = meta.get("output_top_logprobs") or [None] * len(rows)
    content = []
    for row, top in zip(rows, tops):
        entry = _chat_entry(row, tokenizer)
        entry["top_logprobs"] = [_chat_entry(candidate, tokenizer) for candidate in top or ()]
        content.append(entry)
    return {"content": content}


def _chat_entry(row: list[Any], tokenizer: BaseTokenizer | None) -> dict[str, Any]:
    value, token_id, text = row
    # A token may be part of a character: its text shows that no more, its bytes do.
    data = tokenizer.token_bytes(token_id) if tokenizer is not None else b""
    return {"token": text or "", "bytes": list(data), "logprob": value}
