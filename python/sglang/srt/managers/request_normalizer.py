"""A client's `/generate` request -> single requests, one a prompt and sample, checked.

`parse_generate_body` turns decoded JSON into `GenerateReqInput` and refuses wrong types;
`split_request` spreads lists over prompts, repeats prompts `n` times and applies the caps before
anything of that size is allocated. Pure; no tokenizer, no I/O. Called by the HTTP layer and the
tokenizer manager.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import GenerateReqInput, new_rid
from sglang.srt.managers.request_errors import RequestError, RequestShapeError
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.common import parse_json_object

# ------------------------------------------------------------------------------------------------
# JSON -> GenerateReqInput
# ------------------------------------------------------------------------------------------------


def describe_json(value: Any) -> str:
    """The value's JSON type, and the value where it is short, for an error text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{value}`"
    if isinstance(value, str):
        return f'string "{value[:40]}"'
    return "map" if isinstance(value, Mapping) else "sequence"


def _is_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_int_list(value: Any) -> bool:
    # At C speed, for prompts of 100k tokens; a boolean is no integer. Ranges are checked later.
    if not isinstance(value, list):
        return False
    try:
        msgspec.convert(value, list[int])
    except msgspec.ValidationError:
        return False
    return True


def _is_str_list(value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {str}


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(check(item) for item in value)


def _or_list(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    in_list = _list_of(lambda item: item is None or check(item))
    return lambda value: check(value) or in_list(value)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_str(value: Any) -> bool:
    return isinstance(value, str)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _is_token_ids(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return _is_int_list(value) or all(_is_int_list(row) for row in value)


def _is_hidden_states_flag(value: Any) -> bool:
    return isinstance(value, bool) or value == "last"


def _anything(value: Any) -> bool:
    return True


_STR_OR_STRS = (lambda v: isinstance(v, str) or _is_str_list(v), "a string or a list of strings")
_BOOLS = (_or_list(_is_bool), "a boolean or a list of booleans")
_INTS = (_or_list(_is_int), "a 64-bit integer or a list of them")
_STRS = (_or_list(_is_str), "a string or a list of strings")
_BOOL = (_is_bool, "a boolean")
_INT = (_is_int, "a 64-bit integer")
_STR = (_is_str, "a string")
_MAP = (_is_map, "a map")
_IDS = (_is_token_ids, "a list of integers or a list of such lists")
_MAPS = (_or_list(_is_map), "a map or a list of maps")
_ANY = (_anything, "any value")

# Field of GenerateReqInput -> (check, what it expects). null always means "not given".
GENERATE_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "text": _STR_OR_STRS,
    "input_ids": _IDS,
    "input_embeds": (lambda v: isinstance(v, list), "a sequence"),
    "image_data": _ANY,
    "video_data": _ANY,
    "audio_data": _ANY,
    "sampling_params": _MAPS,
    "rid": _STR_OR_STRS,
    "return_logprob": _BOOLS,
    "logprob_start_len": _INTS,
    "top_logprobs_num": _INTS,
    "token_ids_logprob": (
        lambda v: (
            isinstance(v, list)
            and (_is_int_list(v) or all(row is None or _is_int_list(row) for row in v))
        ),
        "a list of integers or a list of such lists",
    ),
    "return_text_in_logprobs": _BOOL,
    "stream": _BOOL,
    "log_metrics": _BOOL,
    "return_hidden_states": (
        _or_list(_is_hidden_states_flag),
        'a boolean, "last" or a list of them',
    ),
    "return_prompt_token_ids": _BOOL,
    "return_routed_experts": _BOOL,
    "routed_experts_start_len": _INT,
    "session_id": _STR,
    "session_params": _MAPS,
    "lora_path": _STRS,
    "custom_logit_processor": _STRS,
    "extra_key": _STRS,
    "cache_salt": _STR,
    "priority": _INT,
    "routed_dp_rank": _INT,
    "data_parallel_rank": _INT,
    "max_thinking_tokens": _INT,
    "bootstrap_host": _ANY,
    "bootstrap_port": _ANY,
    "bootstrap_room": _ANY,
    "routing_key": _STR,
    "conversation_id": _STR,
    "custom_labels": _MAP,
    "no_logs": _BOOL,
    "external_trace_header": _MAP,
}


def parse_generate_body(body: Any) -> GenerateReqInput:
    """Build the request from decoded JSON. Unknown keys are ignored, null means the default.

    Raises RequestShapeError on a wrong type. Sampling parameters are parsed later but their
    shape is checked here too, so that the answer has the contract's gate form.
    """
    if not isinstance(body, dict):
        raise RequestShapeError(f"invalid type: {describe_json(body)}, expected a map")
    values: dict[str, Any] = {}
    for name, value in body.items():
        if name in GENERATE_FIELDS and value is not None:
            _check_field(name, value)
            values[name] = value
    refuse_reserved_rids(values.get("rid"))
    return GenerateReqInput(**values)


def _check_field(name: str, value: Any) -> None:
    check, expected = GENERATE_FIELDS[name]
    if not check(value):
        raise RequestShapeError(
            f"invalid type: {describe_json(value)}, expected {expected} for `{name}`"
        )


def refuse_reserved_rids(rid: str | list[str] | None) -> None:
    """Raise RequestError for a client's id that would be taken for a health probe's.

    Probes are not counted, leave nothing in the cache and are dropped where there is work.
    """
    for one in rid if isinstance(rid, list) else [rid or ""]:
        if one.startswith(HEALTH_CHECK_RID_PREFIX):
            raise RequestError(
                f"rid must not begin with {HEALTH_CHECK_RID_PREFIX!r}: such ids belong to the "
                "server's own health checks."
            )


def parse_preferred(text: str | None, vocab_size: int) -> dict[str, Any] | None:
    """`--preferred-sampling-params`, checked at start-up. Raises ValueError."""
    if not text:
        return None
    values = parse_json_object(text, "--preferred-sampling-params")
    # A preferred minimum may go with the clients' own maximum.
    params = SamplingParams.from_dict(values, {"max_new_tokens": None})
    params.verify(vocab_size)
    params.normalize()
    return values


# ------------------------------------------------------------------------------------------------
# GenerateReqInput -> single requests
# ------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class SingleRequest:
    """One prompt, one sample."""

    rid: str
    index: int  # position in the response list
    text: str | None
    input_ids: list[int] | None
    sampling_params: SamplingParams
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    return_hidden_states: bool | str
    extra_key: str | None
    routed_dp_rank: int | None
    priority: int | None


@dataclass(slots=True, kw_only=True)
class SplitRequest:
    """A client request taken apart. `singles` are in prompt-major order."""

    singles: list[SingleRequest]
    is_list: bool  # the response is a list
    num_prompts: int
    num_samples: int  # the same for every prompt


def _check_types(obj: GenerateReqInput) -> None:
    """Refuse what no scheduler could decode; offline callers come without a parsed body."""
    for name in GENERATE_FIELDS:
        value = getattr(obj, name)
        if value is not None:
            _check_field(name, value)


def _num_prompts(obj: GenerateReqInput) -> tuple[int, bool]:
    """(number of prompts, whether the client sent a list of them)."""
    given = [v for v in (obj.text, obj.input_ids, obj.input_embeds) if v is not None]
    if not given:
        raise RequestError("Either text, input_ids or input_embeds should be provided.")
    if len(given) > 1:
        raise RequestError("Only one of text, input_ids and input_embeds can be provided.")
    if obj.input_embeds is not None:
        raise RequestError("input_embeds are not supported by this server.")
    if isinstance(obj.text, str):
        return 1, False
    prompts: list[Any] = obj.text if obj.text is not None else obj.input_ids  # type: ignore[assignment]
    if not prompts:
        raise RequestError("The prompt is empty: text or input_ids must hold something.")
    if obj.text is None and not isinstance(prompts[0], list):
        return 1, False
    return len(prompts), True


def _spread(name: str, value: Any, num_prompts: int, is_list: bool, default: Any) -> list[Any]:
    """One value a prompt from a scalar or a list of the right length."""
    if not isinstance(value, list):
        return [default if value is None else value] * num_prompts
    if not is_list and len(value) != 1 or is_list and len(value) != num_prompts:
        raise RequestError(
            f"{name} has {len(value)} entries, but the request has {num_prompts} prompt(s)."
        )
    return [default if item is None else item for item in value]


def _spread_token_ids(value: Any, num_prompts: int, is_list: bool) -> list[list[int] | None]:
    if value is None or not value or isinstance(value[0], int):
        return [value or None] * num_prompts
    return _spread("token_ids_logprob", value, num_prompts, is_list, None)


def _rids(obj: GenerateReqInput, num_prompts: int, num_samples: int, is_list: bool) -> list[str]:
    """Ids of all singles. A string for several prompts or samples is a prefix."""
    total = num_prompts * num_samples
    if obj.rid is None or obj.rid == "":
        return [new_rid() for _ in range(total)]
    if isinstance(obj.rid, str):
        if not is_list and total == 1:
            return [obj.rid]
        return [f"{obj.rid}_{i}" for i in range(total)]
    if len(obj.rid) != num_prompts:
        raise RequestError(
            f"rid has {len(obj.rid)} entries, but the request has {num_prompts} prompt(s)."
        )
    rids = [rid or new_rid() for rid in obj.rid]
    if len(set(rids)) != len(rids):
        raise RequestError("Duplicate request ID detected within the batch.")
    if num_samples == 1:
        return rids
    return [f"{rid}_{i}" for rid in rids for i in range(num_samples)]


def _parse_sampling(
    obj: GenerateReqInput, num_prompts: int, is_list: bool, preferred: Mapping[str, Any] | None
) -> list[SamplingParams]:
    """Sampling parameters, one a prompt; a shared map is parsed once."""
    raw = obj.sampling_params
    try:
        if isinstance(raw, list):
            per_prompt = _spread("sampling_params", raw, num_prompts, is_list, {})
            return [SamplingParams.from_dict(item, preferred) for item in per_prompt]
        return [SamplingParams.from_dict(raw, preferred)] * num_prompts
    except RequestError:
        raise
    except ValueError as exc:
        raise RequestShapeError(str(exc)) from exc


def _num_samples(sampling: list[SamplingParams]) -> int:
    counts = {params.n for params in sampling}
    if len(counts) > 1:
        raise RequestError("n must be the same for all prompts of a batch.")
    num_samples = counts.pop()
    max_samples = envs.SGLANG_MAX_N.get()
    if not 1 <= num_samples <= max_samples:
        raise RequestError(f"n must be between 1 and {max_samples}, got {num_samples}.")
    return num_samples


def _extra_keys(obj: GenerateReqInput, num_prompts: int, is_list: bool) -> list[str | None]:
    """Cache namespaces: `extra_key` and `cache_salt` isolate independently of each other."""
    keys = _spread("extra_key", obj.extra_key, num_prompts, is_list, None)
    salt = obj.cache_salt or None
    if salt is None:
        return [key or None for key in keys]
    # The length prefix keeps ("ab", "c") and ("a", "bc") apart.
    return [f"{len(key or '')}:{key or ''}|salt:{salt}" for key in keys]


def _check_unsupported(obj: GenerateReqInput) -> None:
    """Refuse what would silently change the answer if it were ignored."""
    for name in ("image_data", "video_data", "audio_data"):
        value = getattr(obj, name)
        if value and any(_flatten(value)):
            raise RequestError(f"{name} is not supported: this server serves a text model.")
    if any(_flatten(obj.lora_path)):
        raise RequestError("lora_path is not supported: this server runs without LoRA adapters.")
    if obj.session_id or any(_flatten(obj.session_params)):
        raise RequestError("Sessions are not supported by this server.")
    if any(_flatten(obj.custom_logit_processor)):
        raise RequestError("custom_logit_processor is not supported by this server.")
    if obj.return_routed_experts:
        raise RequestError("return_routed_experts is not supported by this server.")
    if obj.max_thinking_tokens is not None:
        raise RequestError("max_thinking_tokens is not supported by this server.")


def _flatten(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def split_request(
    obj: GenerateReqInput, preferred: Mapping[str, Any] | None = None
) -> SplitRequest:
    """Take a client request apart.

    `preferred` are the server's sampling defaults under the client's values.
    Raises RequestError (RequestShapeError for sampling parameters of a wrong form).
    """
    _check_types(obj)
    num_prompts, is_list = _num_prompts(obj)
    max_batch = envs.SGLANG_MAX_BATCH_SIZE.get()
    if num_prompts > max_batch:
        raise RequestError(f"A batch can hold at most {max_batch} prompts, got {num_prompts}.")
    sampling = _parse_sampling(obj, num_prompts, is_list, preferred)
    num_samples = _num_samples(sampling)
    if num_prompts * num_samples > max_batch:
        raise RequestError(
            f"A request can produce at most {max_batch} answers, got {num_prompts} x {num_samples}."
        )
    _check_unsupported(obj)
    rids = _rids(obj, num_prompts, num_samples, is_list)
    singles = []
    for prompt, fields in enumerate(_prompt_fields(obj, num_prompts, is_list)):
        for sample in range(num_samples):
            index = prompt * num_samples + sample
            params = _sample_params(sampling[prompt], sample, num_samples)
            singles.append(
                SingleRequest(rid=rids[index], index=index, sampling_params=params, **fields)
            )
    return SplitRequest(
        singles=singles,
        is_list=is_list or num_samples > 1,
        num_prompts=num_prompts,
        num_samples=num_samples,
    )


def _prompt_fields(obj: GenerateReqInput, num_prompts: int, is_list: bool) -> list[dict[str, Any]]:
    """The fields of a SingleRequest that all samples of a prompt share, one dict a prompt."""
    texts: list[Any] = obj.text if isinstance(obj.text, list) else [obj.text] * num_prompts
    ids: list[Any] = [None] * num_prompts
    if obj.input_ids is not None:
        ids = list(obj.input_ids) if is_list else [obj.input_ids]
    routed = obj.routed_dp_rank if obj.routed_dp_rank is not None else obj.data_parallel_rank

    def spread(name: str, default: Any) -> list[Any]:
        return _spread(name, getattr(obj, name), num_prompts, is_list, default)

    columns: dict[str, list[Any]] = {
        "text": texts,
        "input_ids": ids,
        "return_logprob": spread("return_logprob", False),
        "logprob_start_len": spread("logprob_start_len", -1),
        "top_logprobs_num": spread("top_logprobs_num", 0),
        "token_ids_logprob": _spread_token_ids(obj.token_ids_logprob, num_prompts, is_list),
        "return_hidden_states": spread("return_hidden_states", False),
        "extra_key": _extra_keys(obj, num_prompts, is_list),
        "routed_dp_rank": [routed] * num_prompts,
        "priority": [obj.priority] * num_prompts,
    }
    return [
        {name: column[prompt] for name, column in columns.items()} for prompt in range(num_prompts)
    ]


def _sample_params(params: SamplingParams, sample: int, num_samples: int) -> SamplingParams:
    """Parameters of the s-th sample: a seed must not make all samples the same."""
    if num_samples == 1:
        return params
    seed = params.sampling_seed
    if seed is not None:
        seed = (seed + sample + 2**63) % 2**64 - 2**63
    return dataclasses.replace(params, n=1, sampling_seed=seed)
