"""What is sent to each kind of server and what its streamed events say.

Owns: paths, request bodies, reading of events. Does not own: connections (`http_stream`), times
(`load`). A backend is stateless; the state of one answer is an `Answer`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from serving.workloads import PromptSpec


class StreamError(Exception):
    """The server reported an error inside the stream."""


@dataclass(slots=True)
class Answer:
    """What has been heard of one answer so far. Counts are tokens."""

    num_events: int = 0  # events that brought output
    num_tokens: int = 0  # as reported; servers that report only at the end: 0 until then
    prompt_tokens: int | None = None
    cached_tokens: int | None = None  # None where the server does not report it
    num_retractions: int | None = None  # likewise
    finish: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Fields that all requests of a run share."""

    model: str = "default"
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)


class Backend(ABC):
    """One way to ask a server for tokens."""

    path: str

    def __init__(self, options: RequestOptions) -> None:
        self._options = options

    @abstractmethod
    def body(self, spec: PromptSpec, rid: str) -> dict[str, Any]:
        """Return the JSON body of one request."""

    @abstractmethod
    def read(self, event: Any, answer: Answer) -> bool:
        """Update `answer` from a decoded event; True if the event brought output tokens."""

    def encode(self, spec: PromptSpec, rid: str) -> bytes:
        """Return the encoded body, the user's additions last."""
        return orjson.dumps({**self.body(spec, rid), **self._options.extra_body})

    def read_event(self, payload: bytes, answer: Answer) -> bool:
        """Decode an event and read it. Raises StreamError for an event that reports an error."""
        event = orjson.loads(payload)
        if event.get("error"):
            raise StreamError(str(event["error"])[:300])
        brought = self.read(event, answer)
        answer.num_events += brought
        return brought


class SglangBackend(Backend):
    """`/generate`, by token ids where there are any. Understands cumulative and delta streams."""

    path = "/generate"

    def body(self, spec: PromptSpec, rid: str) -> dict[str, Any]:
        prompt = {"text": spec.text} if spec.input_ids is None else {"input_ids": spec.input_ids}
        sampling = {
            "temperature": self._options.temperature,
            "max_new_tokens": spec.output_len,
            "ignore_eos": self._options.ignore_eos,
        }
        return {**prompt, "rid": rid, "stream": True, "sampling_params": sampling}

    def read(self, event: Any, answer: Answer) -> bool:
        meta = event["meta_info"]
        before, answer.num_tokens = answer.num_tokens, meta.get("completion_tokens", 0)
        answer.prompt_tokens = meta.get("prompt_tokens", answer.prompt_tokens)
        answer.cached_tokens = meta.get("cached_tokens", answer.cached_tokens)
        answer.num_retractions = meta.get("num_retractions", answer.num_retractions)
        if meta.get("finish_reason"):
            answer.finish = meta["finish_reason"]["type"]
        return answer.num_tokens > before


class OpenAIBackend(Backend):
    """What both OpenAI endpoints have in common. Usage comes with the last event."""

    def common(self, spec: PromptSpec, rid: str) -> dict[str, Any]:
        """Return the fields of both endpoints; `ignore_eos` and `rid` only where wanted."""
        body: dict[str, Any] = {
            "model": self._options.model,
            "temperature": self._options.temperature,
            "max_tokens": spec.output_len,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.ignore_eos:
            body["ignore_eos"] = True
        if spec.fate == "abort":
            body["rid"] = rid
        return body

    def read(self, event: Any, answer: Answer) -> bool:
        if usage := event.get("usage"):
            answer.num_tokens = usage.get("completion_tokens", answer.num_tokens)
            answer.prompt_tokens = usage.get("prompt_tokens", answer.prompt_tokens)
            details = usage.get("prompt_tokens_details") or {}
            answer.cached_tokens = details.get("cached_tokens", answer.cached_tokens)
        brought = False
        for choice in event.get("choices") or ():
            answer.finish = choice.get("finish_reason") or answer.finish
            brought = brought or bool(self.output(choice))
        return brought

    @abstractmethod
    def output(self, choice: Mapping[str, Any]) -> str | None:
        """Return the text that an event adds to a choice."""


class CompletionsBackend(OpenAIBackend):
    """`/v1/completions`."""

    path = "/v1/completions"

    def body(self, spec: PromptSpec, rid: str) -> dict[str, Any]:
        prompt = spec.text if spec.input_ids is None else spec.input_ids
        return {**self.common(spec, rid), "prompt": prompt}

    def output(self, choice: Mapping[str, Any]) -> str | None:
        return choice.get("text")


class ChatBackend(OpenAIBackend):
    """`/v1/chat/completions`; takes text only."""

    path = "/v1/chat/completions"

    def body(self, spec: PromptSpec, rid: str) -> dict[str, Any]:
        messages = [{"role": "user", "content": spec.text}]
        return {**self.common(spec, rid), "messages": messages}

    def output(self, choice: Mapping[str, Any]) -> str | None:
        delta = choice.get("delta") or {}
        return delta.get("content") or delta.get("reasoning_content")


BACKENDS: dict[str, type[Backend]] = {
    "sglang": SglangBackend,
    "openai-completions": CompletionsBackend,
    "openai-chat": ChatBackend,
}
