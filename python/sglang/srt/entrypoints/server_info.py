"""The `/model_info` and `/server_info` answers, shared by the HTTP routes and the `Engine`."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from typing import Any

from sglang.srt.configs.kv_events_config import KVEventsConfig
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.utils.common import parse_json_object
from sglang.srt.utils.network import NetworkAddress
from sglang.version import __version__

# Fields that hold secrets: shown as set or not set, never in clear.
_SECRET_FIELDS = ("api_key", "admin_api_key", "ssl_keyfile_password")
_SECRET_FLAGS = tuple("--" + name.replace("_", "-") for name in _SECRET_FIELDS)
_HIDDEN = "***"
# Of stores behind the cache: whose URLs say as whom to ask.
_FIELDS_WITH_URLS = ("hicache_storage_backend_extra_config",)
_URL_USER = re.compile(r"(?<=://)[^/?#\s\"]*@")


def get_model_info(manager: TokenizerManager) -> dict[str, Any]:
    """What the server serves. Needs no scheduler."""
    args = manager.server_args
    preferred = args.preferred_sampling_params
    resolved = manager.scheduler_infos[0].resolved_args
    return {
        "model_path": manager.model_path,
        "served_model_name": manager.served_model_name,
        "tokenizer_path": args.tokenizer_path,
        "is_generation": not args.is_embedding,
        "preferred_sampling_params": (
            None if preferred is None else parse_json_object(preferred, "preferred_sampling_params")
        ),
        "weight_version": manager.weight_version,
        "load_format": args.load_format,
        "reasoning_parser": args.reasoning_parser,
        "tool_call_parser": args.tool_call_parser,
        "disaggregation_mode": args.disaggregation_mode,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": resolved.get("model_type", ""),
        "architectures": resolved.get("architectures", []),
    }


async def get_server_info(manager: TokenizerManager) -> dict[str, Any]:
    """All settings, the schedulers' facts, and one `internal_states` entry per replica."""
    info = manager.scheduler_infos[0]
    states = await manager.control.get_internal_state()
    return {
        **_public_args(manager),
        **info.resolved_args,
        "status": "ready",
        "max_total_num_tokens": info.max_total_num_tokens,
        "max_req_input_len": info.max_req_input_len,
        "startup_time": info.load_time_s,
        "launch_command": _launch_command(),
        "kv_events": _kv_events(manager),
        "version": __version__,
        "frontend": "python",
        "internal_states": [_hide(state) for state in states],
    }


def _kv_events(manager: TokenizerManager) -> dict[str, Any] | None:
    """What a subscriber must know; None where nothing is published.

    Host and port are null for socket files. A replica's port is the base plus its rank, but for
    port 0; `publishers` has each address as it is.
    """
    infos = manager.scheduler_infos
    first, text = infos[0].kv_events, manager.server_args.kv_events_config
    if first is None or text is None:
        return None
    config = KVEventsConfig.from_cli(text)
    host, port = _host_and_port(first.endpoint)
    replay_host, replay_port = _host_and_port(first.replay_endpoint)
    return {
        "publisher": config.publisher,
        "endpoint_host": host,
        "endpoint_port_base": port,
        "topic": config.topic,
        "block_size": infos[0].page_size,
        "dp_size": manager.server_args.dp_size,
        "replay_endpoint_host": replay_host,
        "replay_endpoint_port_base": replay_port,
        "replay_buffer_steps": config.buffer_steps if first.replay_endpoint else None,
        "publishers": [
            {"dp_rank": dp_rank, **dataclasses.asdict(info.kv_events)}
            for dp_rank, info in enumerate(infos)
            if info.kv_events is not None
        ],
    }


def _host_and_port(endpoint: str | None) -> tuple[str | None, int | None]:
    if endpoint is None or not endpoint.startswith("tcp://"):
        return None, None
    address = NetworkAddress.parse(endpoint)
    return address.host, address.port


def _public_args(manager: TokenizerManager) -> dict[str, Any]:
    return _hide(dataclasses.asdict(manager.server_args))


def _hide(values: dict[str, Any]) -> dict[str, Any]:
    hidden = {name: _HIDDEN for name in _SECRET_FIELDS if values.get(name) is not None}
    for name in _FIELDS_WITH_URLS:
        if isinstance(text := values.get(name), str):
            hidden[name] = _without_users(text)
    return {**values, **hidden}


def _without_users(text: str) -> str:
    """The text, users and passwords in its URLs hidden."""
    return _URL_USER.sub(f"{_HIDDEN}@", text)


def _launch_command() -> str:
    """The command line of this process without the keys on it."""
    words: list[str] = []
    hide_next = False
    for word in sys.orig_argv:
        flag, equals, _ = word.partition("=")
        if hide_next:
            word, hide_next = _HIDDEN, False
        elif flag in _SECRET_FLAGS:
            hide_next = not equals
            word = f"{flag}={_HIDDEN}" if equals else word
        words.append(_without_users(word))
    return shlex.join(words)
