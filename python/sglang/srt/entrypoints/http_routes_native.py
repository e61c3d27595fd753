"""Native endpoints: health, information, loads, `/generate`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from sglang.srt.entrypoints.http_body import raw_body_schema, read_json
from sglang.srt.entrypoints.http_errors import json_response, native_error, native_stream_error
from sglang.srt.entrypoints.http_schemas import GENERATE_SCHEMA
from sglang.srt.entrypoints.http_state import get_global_state, get_manager
from sglang.srt.entrypoints.http_stream import answers_errors, start_stream
from sglang.srt.entrypoints.server_info import get_model_info, get_server_info
from sglang.srt.environ import envs
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.managers.request_normalizer import parse_generate_body
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.version import __version__

router = APIRouter()
native = answers_errors(native_error)

# Groups of `/v1/loads` that live in a sub-object of each report, by the name in `include`.
_LOAD_GROUPS = {
    "memory": "memory",
    "spec": "speculative",
    "lora": "lora",
    "disagg": "disaggregation",
    "queues": "queues",
}


@router.get("/", response_class=PlainTextResponse)
async def root() -> Response:
    """Tell that the server runs."""
    return PlainTextResponse("SGLang is running")


# ------------------------------------------------------------------------------------------------
# Health
# ------------------------------------------------------------------------------------------------


@router.get("/health")
@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """200 when the engine is alive, 503 otherwise; empty body but for mixed weights."""
    manager = get_manager()
    if manager.gracefully_exit or manager.server_status is ServerStatus.Starting:
        return Response(status_code=503)
    if manager.dead_message is not None:
        return Response(status_code=503)
    needs_probe = envs.SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION.get()
    if not needs_probe and request.url.path == "/health":
        return Response(status_code=200)
    if manager.weights.state.is_mixed:
        return PlainTextResponse(
            f"The weights are mixed until all have come: {manager.weights.state.mixed_tensors}",
            status_code=503,
        )
    is_alive = await get_global_state().health.check()
    return Response(status_code=200 if is_alive else 503)


@router.get("/ready")
async def ready() -> Response:
    """200 when a request sent now would be served at once."""
    manager = get_manager()
    is_ready = (
        manager.server_status is ServerStatus.Up
        and not manager.is_holding
        and not manager.gracefully_exit
    )
    return Response(status_code=200 if is_ready else 503)


@router.get("/ping")
async def ping() -> Response:
    """200 when the server has come up, also while it is paused."""
    is_up = get_manager().server_status is ServerStatus.Up
    return Response(status_code=200 if is_up else 503)


# ------------------------------------------------------------------------------------------------
# Information
# ------------------------------------------------------------------------------------------------


@router.get("/model_info")
@router.get("/get_model_info", deprecated=True)
async def model_info() -> Response:
    """What is served."""
    return json_response(get_model_info(get_manager()))


@router.get("/server_info")
@router.get("/get_server_info", deprecated=True)
@native
async def server_info(request: Request) -> Response:
    """All settings and the schedulers' state."""
    return json_response(await get_server_info(get_manager()))


# ------------------------------------------------------------------------------------------------
# Loads
# ------------------------------------------------------------------------------------------------


def _wanted_groups(include: str | None) -> set[str]:
    groups = {name.strip() for name in (include or "all").split(",") if name.strip()}
    unknown = groups - {"core", "all", *_LOAD_GROUPS}
    if unknown:
        raise RequestError(
            f"include: unknown group(s) {', '.join(sorted(unknown))}; known are "
            f"core, {', '.join(_LOAD_GROUPS)}, all."
        )
    return {"core", *_LOAD_GROUPS} if "all" in groups else groups


def _select(load: dict[str, Any], groups: set[str]) -> dict[str, Any]:
    sub_objects = set(_LOAD_GROUPS.values())
    chosen = {"timestamp": load.get("timestamp"), "dp_rank": load["dp_rank"]}
    if "core" in groups:
        chosen.update((k, v) for k, v in load.items() if k not in sub_objects)
    for group, key in _LOAD_GROUPS.items():
        if group in groups and key in load:
            chosen[key] = load[key]
    return chosen


def _loads_as_prometheus(loads: list[dict[str, Any]]) -> str:
    """Every number of the reports as a gauge line."""
    lines: list[str] = []
    for load in loads:
        label = f'{{dp_rank="{load["dp_rank"]}"}}'
        for key, value in load.items():
            inner = value.items() if isinstance(value, dict) else [(None, value)]
            for sub_key, number in inner:
                if isinstance(number, (int, float)) and key != "dp_rank":
                    name = key if sub_key is None else f"{key}_{sub_key}"
                    lines.append(f"sglang:{name}{label} {number}")
    return "\n".join(lines) + "\n"


@router.get("/v1/loads")
@native
async def loads(
    request: Request,
    dp_rank: int | None = None,
    include: str | None = None,
    format: str = "json",  # noqa: A002  (the documented query name)
) -> Response:
    """How busy each replica is."""
    manager = get_manager()
    groups = _wanted_groups(include)
    if format not in ("json", "prometheus"):
        raise RequestError(f"format must be json or prometheus, got {format!r}.")
    reports = await manager.get_loads()
    if dp_rank is not None:
        reports = [load for load in reports if load["dp_rank"] == dp_rank]
        if not reports:
            raise RequestError(f"dp_rank {dp_rank} does not exist.")
    chosen = [_select(load, groups) for load in reports]
    if format == "prometheus":
        return PlainTextResponse(_loads_as_prometheus(chosen))
    args = manager.server_args
    return json_response(
        {
            # As text: routers reject the whole report for a number here.
            "timestamp": datetime.now(UTC).isoformat(),
            "version": __version__,
            "accelerator": args.device,
            "num_accelerators": args.tp_size * args.dp_size,
            "dp_rank_count": len(chosen),
            "loads": chosen,
        }
    )


@router.get("/get_load", deprecated=True)
@router.get("/get_loads", deprecated=True)
@native
async def get_load(request: Request) -> Response:
    """The short load list of earlier releases, which some routers still read."""
    return json_response(
        [
            {
                "dp_rank": load["dp_rank"],
                "num_reqs": load["num_running_reqs"] + load["num_waiting_reqs"],
                "num_waiting_reqs": load["num_waiting_reqs"],
                "num_tokens": load["num_total_tokens"],
            }
            for load in await get_manager().get_loads()
        ]
    )


# ------------------------------------------------------------------------------------------------
# Generation
# ------------------------------------------------------------------------------------------------


@router.post("/generate", openapi_extra=raw_body_schema(GENERATE_SCHEMA, required=True))
@router.put("/generate", openapi_extra=raw_body_schema(GENERATE_SCHEMA, required=True))
@native
async def generate(request: Request) -> Response:
    """Generate from text or token ids; one prompt or a batch; whole or as a stream."""
    obj = parse_generate_body(await read_json(request))
    labels = request.headers.get(get_manager().server_args.tokenizer_metrics_custom_labels_header)
    if labels is not None and obj.custom_labels is None:
        obj.custom_labels = _header_labels(labels)
    source: AsyncIterator[Any] = get_manager().generate_request(obj, request)
    if obj.stream:
        return await start_stream(source, native_stream_error)
    return json_response(await anext(source))


def _header_labels(text: str) -> dict[str, str] | None:
    """Metric labels sent as a JSON object in a header; anything else is no label."""
    try:
        labels = json.loads(text)
    except json.JSONDecodeError:
        return None
    return {str(k): str(v) for k, v in labels.items()} if isinstance(labels, dict) else None
