"""POST /v1/completions: plain text or token ids in, text out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openai.serving_base import (
    OpenAIServingBase,
    check_max_tokens,
    finish_fields,
    response_id,
    sglext,
    unix_time,
    version_metadata,
)
from sglang.srt.managers.client_watch import ClientConnection
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.request_errors import RequestError

Prompt = str | list[int]


class OpenAIServingCompletion(OpenAIServingBase):
    """See the module docstring."""

    async def create(
        self, request: CompletionRequest, connection: ClientConnection | None
    ) -> dict[str, Any]:
        """The whole answer. Raises RequestError."""
        prompts, is_batch = read_prompts(request.prompt)
        native = self._native(request, prompts, is_batch)
        answer = await anext(self.manager.generate_request(native, connection))
        answers = answer if isinstance(answer, list) else [answer]
        metas = [item["meta_info"] for item in answers]
        response: dict[str, Any] = {
            "id": response_id(native),
            "object": "text_completion",
            "created": unix_time(),
            "model": self.model_name(request),
            "choices": [
                self._choice(request, index, item, prompts[index // request.n])
                for index, item in enumerate(answers)
            ],
            "usage": self.usage(metas, request.n),
            "metadata": version_metadata(metas[0]),
        }
        extension = sglext(request, metas[0])
        if extension is not None:
            response["sglext"] = extension
        return response

    async def stream(
        self, request: CompletionRequest, connection: ClientConnection | None
    ) -> AsyncIterator[dict[str, Any]]:
        """Chunks with what is new, then usage where asked for. Raises RequestError."""
        prompts, is_batch = read_prompts(request.prompt)
        native = self._native(request, prompts, is_batch)
        metas: dict[int, dict[str, Any]] = {}
        head: dict[str, Any] = {
            "id": response_id(native),
            "object": "text_completion",
            "created": unix_time(),
            "model": self.model_name(request),
        }
        continuous = self.wants_continuous_usage(request)
        source = self.manager.generate_request(native, connection, incremental=True)
        async for item in source:
            index, meta = item.get("index", 0), item["meta_info"]
            is_first = index not in metas
            metas[index] = meta
            chunk = {
                **head,
                "choices": [
                    self._choice(request, index, item, prompts[index // request.n], is_first)
                ],
            }
            if continuous:
                chunk["usage"] = self.usage([meta], 1)
            yield chunk
        ordered = [metas[index] for index in sorted(metas)]
        tail = {**head, "choices": []}
        extension = sglext(request, ordered[0])
        if extension is not None:
            yield {**tail, "sglext": extension}
        if self.wants_final_usage(request):
            yield {**tail, "usage": self.usage(ordered, request.n)}

    def _native(
        self, request: CompletionRequest, prompts: list[Prompt], is_batch: bool
    ) -> GenerateReqInput:
        check_max_tokens("max_tokens", request.max_tokens, least=0 if request.echo else 1)
        if request.suffix:
            raise RequestError("suffix is not supported by this server.")
        if request.best_of is not None and request.best_of != request.n:
            raise RequestError("best_of is not supported by this server; use n.")
        num_top = request.logprobs
        field = "text" if isinstance(prompts[0], str) else "input_ids"
        fields: dict[str, Any] = {field: prompts if is_batch else prompts[0]}
        return self.generate_input(
            request,
            self.sampling_params(request, request.max_tokens),
            return_logprob=num_top is not None,
            top_logprobs_num=num_top or 0,
            logprob_start_len=0 if request.echo and num_top is not None else -1,
            return_prompt_token_ids=request.return_token_ids,
            **fields,
        )

    def _choice(
        self,
        request: CompletionRequest,
        index: int,
        item: dict[str, Any],
        prompt: Prompt,
        is_first: bool = True,
    ) -> dict[str, Any]:
        """One choice, whole or a chunk; `echo` goes in front of the first chunk."""
        meta = item["meta_info"]
        text = item.get("text", "")
        echoes = request.echo and is_first
        choice: dict[str, Any] = {
            "index": index,
            "text": self._prompt_text(prompt) + text if echoes else text,
            "logprobs": None,
            **finish_fields(meta),
        }
        if request.logprobs is not None:
            choice["logprobs"] = completion_logprobs(meta, with_input=echoes)
        if request.return_token_ids:
            choice["token_ids"] = item["output_ids"]
            if is_first:
                choice["prompt_token_ids"] = item.get("prompt_token_ids")
        if request.return_hidden_states:
            choice["hidden_states"] = meta.get("hidden_states")
        return choice

    def _prompt_text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        tokenizer = self.manager.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)


def read_prompts(prompt: Any) -> tuple[list[Prompt], bool]:
    """(prompts, whether the client sent a batch). Raises RequestError.

    Accepts text, a list of texts, token ids, a list of lists of token ids.
    """
    if isinstance(prompt, str):
        if not prompt:
            raise RequestError("prompt must not be empty.")
        return [prompt], False
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt must not be empty.")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt], False
    if kinds == {str}:
        if not all(prompt):
            raise RequestError("prompt must not hold an empty text.")
        return prompt, True
    if kinds == {list} and all(row and set(map(type, row)) == {int} for row in prompt):
        return prompt, True
    raise RequestError("prompt must be text, a list of texts, token ids, or a list of such lists.")


def completion_logprobs(meta: dict[str, Any], *, with_input: bool) -> dict[str, Any]:
    """The legacy completion form of logprobs, of the tokens in this choice or chunk."""
    rows = list(meta["output_token_logprobs"])
    tops = list(meta.get("output_top_logprobs") or [None] * len(rows))
    if with_input:
        rows = list(meta["input_token_logprobs"]) + rows
        num_input = len(rows) - len(tops)
        tops = list(meta.get("input_top_logprobs") or [None] * num_input) + tops
    return {
        "tokens": [_token_name(row[1], row[2]) for row in rows],
        "token_logprobs": [row[0] for row in rows],
        "top_logprobs": [_top_map(top) for top in tops],
        # Offsets into the text are not tracked; clients know -1.
        "text_offset": [-1] * len(rows),
    }


def _top_map(top: list[Any] | None) -> dict[str, float] | None:
    """Text -> logprob; of several tokens with one text the most likely counts."""
    if top is None:
        return None
    texts: dict[str, float] = {}
    for value, token_id, text in top:
        name = _token_name(token_id, text)
        texts[name] = max(value, texts.get(name, value))
    return texts


def _token_name(token_id: int, text: str | None) -> str:
    """The token's text; a server without a tokenizer has none."""
    return f"token_id:{token_id}" if text is None else text
