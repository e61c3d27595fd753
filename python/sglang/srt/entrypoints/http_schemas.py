"""The published JSON schema of `/generate`, whose unions no dataclass schema can express."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.request_normalizer import GENERATE_FIELDS
from sglang.srt.sampling.sampling_params import CLIENT_FIELDS

_STR = {"type": "string"}
_INT = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_BOOL = {"type": "boolean"}
_MAP = {"type": "object"}


def _nullable(*kinds: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [*kinds, {"type": "null"}]}


def _list(kind: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": kind}


_SAMPLING = {
    "type": "object",
    "properties": {name: {} for name in CLIENT_FIELDS},
    "additionalProperties": False,
}

_PROPERTIES: dict[str, dict[str, Any]] = {
    "text": _nullable(_STR, _list(_STR)),
    "input_ids": _nullable(_list(_INT), _list(_list(_INT))),
    "sampling_params": _nullable(_SAMPLING, _list(_SAMPLING)),
    "rid": _nullable(_STR, _list(_STR)),
    "stream": _nullable(_BOOL),
    "return_logprob": _nullable(_BOOL, _list(_BOOL)),
    "logprob_start_len": _nullable(_INT, _list(_INT)),
    "top_logprobs_num": _nullable(_INT, _list(_INT)),
    "token_ids_logprob": _nullable(_list(_INT), _list(_list(_INT))),
    "return_text_in_logprobs": _nullable(_BOOL),
    "return_prompt_token_ids": _nullable(_BOOL),
    "log_metrics": _nullable(_BOOL),
    "no_logs": _nullable(_BOOL),
    "extra_key": _nullable(_STR, _list(_STR)),
    "cache_salt": _nullable(_STR),
    "priority": _nullable(_INT),
    "routed_dp_rank": _nullable(_INT),
    "custom_labels": _nullable(_MAP),
}

GENERATE_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {name: _PROPERTIES.get(name, {}) for name in GENERATE_FIELDS},
}
