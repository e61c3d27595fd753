"""The bodies of the OpenAI endpoints, as dataclasses; unknown keys are ignored, null = default.

Both the parser and the published OpenAPI schema are made of them (`entrypoints.http_body`).
Fields with the same name in several requests are in `CommonRequest`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True)
class CommonRequest:
    """Sampling and bookkeeping shared by completions and chat."""

    model: str = ""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None
    # Extensions beyond OpenAI.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int = 0
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    custom_params: dict[str, Any] | None = None
    lora_path: str | list[str | None] | None = None
    session_id: str | None = None
    session_params: dict[str, Any] | None = None
    custom_logit_processor: str | None = None
    return_hidden_states: bool = False
    return_cached_tokens_details: bool = False
    return_spec_tokens_details: bool = False
    return_token_ids: bool = False
    rid: str | list[str] | None = None
    extra_key: str | list[str | None] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None


@dataclass(kw_only=True)
class CompletionRequest(CommonRequest):
    """POST /v1/completions."""

    prompt: str | list[Any]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = None
    max_tokens: int = 16
    suffix: str | None = None


@dataclass(kw_only=True)
class ChatCompletionRequest(CommonRequest):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    input_ids: list[int] | None = None  # bypasses the template


@dataclass(kw_only=True)
class TokenizeRequest:
    """POST /tokenize and /v1/tokenize: exactly one of `prompt` and `messages`."""

    model: str = ""
    prompt: str | list[str] | None = None
    add_special_tokens: bool = True
    # Instead of a prompt: messages, through the chat template.
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


@dataclass(kw_only=True)
class DetokenizeRequest:
    """POST /detokenize and /v1/detokenize."""

    model: str = ""
    tokens: list[Any]  # token ids, or a list of such lists
    skip_special_tokens: bool = True
