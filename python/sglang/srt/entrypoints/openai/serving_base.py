"""What the OpenAI endpoints share: parameters to the native form, logprobs, usage, errors.

Serving classes turn a request dataclass into a `GenerateReqInput`, run it on the tokenizer
manager and shape the answers. They return plain dicts (or an iterator of them when streaming) and
raise `RequestError`; HTTP is the business of `entrypoints.http_routes_openai`.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.openai.protocol import CommonRequest
from sglang.srt.entrypoints.openai.template_manager import TemplateManager
from sglang.srt.managers.io_struct import GenerateReqInput, new_rid
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.managers.request_normalizer import refuse_reserved_rids
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.sampling.sampling_params import INT32_MAX
from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Defaults that a model's generation_config.json may set.
_MODEL_DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def model_sampling_defaults(server_args: ServerArgs) -> dict[str, Any]:
    """Sampling values of the model's generation_config.json, with --sampling-defaults model."""
    path = Path(server_args.model_path) / "generation_config.json"
    if server_args.sampling_defaults != "model" or not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as exc:
        logger.warning("Ignored %s: %s", path, exc)
        return {}
    defaults = {key: config[key] for key in _MODEL_DEFAULT_KEYS if config.get(key) is not None}
    if defaults.get("top_k") == 0:  # transformers' way to say "all"
        del defaults["top_k"]
    return defaults


class OpenAIServingBase:
    """State shared by all requests of one endpoint: none but its collaborators."""

    def __init__(
        self, tokenizer_manager: TokenizerManager, template_manager: TemplateManager
    ) -> None:
        self.manager = tokenizer_manager
        self.templates = template_manager

    # -- request --------------------------------------------------------------------------------

    def sampling_params(
        self,
        request: CommonRequest,
        max_new_tokens: int | None,
        defaults: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Native sampling parameters. Raises RequestError on a bad response format."""
        params: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": request.min_tokens,
            "frequency_penalty": request.frequency_penalty,
            "presence_penalty": request.presence_penalty,
            "logit_bias": request.logit_bias,
            "n": request.n,
            "sampling_seed": request.seed,
            "stop": request.stop,
            "stop_token_ids": request.stop_token_ids,
            "stop_regex": request.stop_regex,
            "no_stop_trim": request.no_stop_trim,
            "ignore_eos": request.ignore_eos,
            "skip_special_tokens": request.skip_special_tokens,
            "custom_params": request.custom_params,
            "json_schema": _json_text(request.json_schema),
            "regex": request.regex,
            "ebnf": request.ebnf,
        }
        for key in _MODEL_DEFAULT_KEYS:
            value = getattr(request, key)
            if value is None and defaults:
                value = defaults.get(key)
            if value is not None:
                params[key] = value
        params.update(response_format_params(request.response_format))
        return params

    def generate_input(
        self, request: CommonRequest, sampling_params: dict[str, Any], **fields: Any
    ) -> GenerateReqInput:
        """The native request; `fields` add the prompt and the logprob wishes.

        Raises RequestError for an id that clients may not have.
        """
        refuse_reserved_rids(request.rid)
        return GenerateReqInput(
            sampling_params=sampling_params,
            # One base id: the choices' ids begin with it, so that one abort reaches them all.
            rid=request.rid or new_rid(),
            stream=request.stream,
            return_text_in_logprobs=True,
            return_hidden_states=request.return_hidden_states,
            lora_path=request.lora_path,
            session_id=request.session_id,
            session_params=request.session_params,
            custom_logit_processor=request.custom_logit_processor,
            extra_key=request.extra_key,
            cache_salt=request.cache_salt,
            priority=request.priority,
            routed_dp_rank=request.routed_dp_rank,
            data_parallel_rank=request.data_parallel_rank,
            **fields,
        )

    def model_name(self, request: CommonRequest) -> str:
        """The name that the answer carries: the client's own, whatever it is."""
        return request.model or self.manager.served_model_name

    # -- answer ---------------------------------------------------------------------------------

    def usage(self, metas: list[dict[str, Any]], num_samples: int) -> dict[str, Any]:
        """Token counts of all choices; a prompt with several samples counts once."""
        prompts = metas[::num_samples]
        cached = sum(meta["cached_tokens"] for meta in prompts)
        prompt_tokens = sum(meta["prompt_tokens"] for meta in prompts)
        completion_tokens = sum(meta["completion_tokens"] for meta in metas)
        reasoning_tokens = sum(meta["reasoning_tokens"] for meta in metas)
        report_cached = self.manager.server_args.enable_cache_report
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "reasoning_tokens": reasoning_tokens,
            "prompt_tokens_details": {"cached_tokens": cached} if report_cached else None,
            "completion_tokens_details": None,
        }

    def wants_final_usage(self, request: CommonRequest) -> bool:
        options = request.stream_options or {}
        forced = self.manager.server_args.stream_response_default_include_usage
        return bool(options.get("include_usage", forced))

    @staticmethod
    def wants_continuous_usage(request: CommonRequest) -> bool:
        return bool((request.stream_options or {}).get("continuous_usage_stats"))


def check_max_tokens(name: str, value: int, least: int = 1) -> None:
    """Raises RequestError in terms of the client's field, which is not named as the native one."""
    if value < least:
        raise RequestError(f"{name} must be at least {least}, got {value}.")
    if value > INT32_MAX:
        raise RequestError(f"{name} must be at most {INT32_MAX}, got {value}.")


def _json_text(value: str | dict[str, Any] | None) -> str | None:
    return json.dumps(value) if isinstance(value, dict) else value


def response_format_params(response_format: dict[str, Any] | None) -> dict[str, Any]:
    """Native grammar parameter of OpenAI's `response_format`. Raises RequestError."""
    if response_format is None:
        return {}
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind == "json_schema":
        wrapper = response_format.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, dict) else None
        if not isinstance(schema, (dict, bool)):
            raise RequestError("response_format.json_schema must hold a schema object.")
        return {"json_schema": json.dumps(schema)}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(response_format)}
    raise RequestError(
        "response_format.type must be text, json_object, json_schema or structural_tag, "
        f"got {kind!r}."
    )


def response_id(native: GenerateReqInput) -> str:
    """The `id` of an answer: the same in all its chunks and choices."""
    rid = native.rid
    return rid[0] if isinstance(rid, list) else rid or ""


def finish_fields(meta: dict[str, Any]) -> dict[str, Any]:
    """`finish_reason` and `matched_stop` of a choice."""
    reason = meta["finish_reason"]
    if reason is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": reason["type"], "matched_stop": reason.get("matched")}


def version_metadata(meta: dict[str, Any]) -> dict[str, Any]:
    """Which weights wrote the answer."""
    return {"weight_version": meta["weight_version"], "weight_versions": meta["weight_versions"]}


def sglext(request: CommonRequest, meta: dict[str, Any]) -> dict[str, Any] | None:
    """The extension block that the client asked for, or None."""
    block: dict[str, Any] = {}
    if request.return_cached_tokens_details:
        block["cached_tokens_details"] = meta["cached_tokens_details"]
    if request.return_spec_tokens_details:
        spec = {key: value for key, value in meta.items() if key.startswith("spec_")}
        block["spec_tokens_details"] = spec or None
    return block or None


def unix_time() -> int:
    return int(time.time())
