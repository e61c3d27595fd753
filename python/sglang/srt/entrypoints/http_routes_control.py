"""Control endpoints: cache, abort, pause, logging, profiling, versions.

Every path of this router needs the admin key where the server has one (`http_auth`). Most answer
GET as well as POST, with the body on either.
"""

from __future__ import annotations

from fastapi import APIRouter, Query, Request
from fastapi.responses import PlainTextResponse, Response

from sglang.srt.entrypoints.http_body import (
    BodyError,
    body_schema,
    convert,
    read_as,
    read_json,
)
from sglang.srt.entrypoints.http_errors import json_response, native_error, weight_route_error
from sglang.srt.entrypoints.http_state import get_manager
from sglang.srt.entrypoints.http_stream import answers_errors
from sglang.srt.managers.io_struct import (
    AbortReq,
    ConfigureLoggingReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ProfileReqInput,
    SetInternalStateReqInput,
    SlowDownReqInput,
    UpdateWeightVersionReqInput,
)

router = APIRouter()


native = answers_errors(native_error)
versions = answers_errors(weight_route_error)
GET_POST = ["GET", "POST"]


@router.api_route("/flush_cache", methods=GET_POST)
@native
async def flush_cache(
    request: Request, timeout: float = Query(0.0, ge=0, allow_inf_nan=False)
) -> Response:
    """Empty the caches; with `timeout`, at the first idle moment within that many seconds."""
    await read_json(request)  # nothing is read from it, but broken JSON is an error everywhere
    reply = await get_manager().flush_cache(timeout)
    if reply.success:
        return PlainTextResponse(reply.message or "Cache flushed.\n")
    return PlainTextResponse(reply.message or "Flush cache failed.\n", status_code=400)


@router.post("/abort_request", openapi_extra=body_schema(AbortReq))
@native
async def abort_request(request: Request) -> Response:
    """Abort all requests or those whose id starts with `rid`; with `exact`, equals it."""
    obj = await read_as(request, AbortReq)
    get_manager().abort_request(obj.rid, obj.abort_all, obj.abort_message, obj.exact)
    return Response(status_code=200)


@router.post("/pause_generation", openapi_extra=body_schema(PauseGenerationReqInput))
@native
async def pause_generation(request: Request) -> Response:
    """Stop generating and hold new requests."""
    await get_manager().pause_generation(await read_as(request, PauseGenerationReqInput))
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


@router.post("/continue_generation", openapi_extra=body_schema(ContinueGenerationReqInput))
@native
async def continue_generation(request: Request) -> Response:
    """End a pause."""
    await get_manager().continue_generation(await read_as(request, ContinueGenerationReqInput))
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


@router.api_route(
    "/set_internal_state",
    methods=["POST", "PUT"],
    openapi_extra=body_schema(SetInternalStateReqInput),
)
@native
async def set_internal_state(request: Request) -> Response:
    """Change a few scheduler settings; one boolean a replica tells whether anything changed."""
    obj = await read_as(request, SetInternalStateReqInput)
    return json_response(await get_manager().control.set_internal_state(obj.server_args))


@router.api_route(
    "/configure_logging", methods=GET_POST, openapi_extra=body_schema(ConfigureLoggingReq)
)
@native
async def configure_logging(request: Request) -> Response:
    """Change what is logged of requests."""
    get_manager().configure_logging(await read_as(request, ConfigureLoggingReq))
    return Response(status_code=200)


@router.api_route("/freeze_gc", methods=GET_POST)
@native
async def freeze_gc(request: Request) -> Response:
    """Exempt everything alive now from garbage collection, in all processes."""
    await read_json(request)
    manager = get_manager()
    await manager.control.freeze_gc()
    manager.freeze_gc()
    return PlainTextResponse("Garbage collection frozen.\n")


@router.api_route("/slow_down", methods=GET_POST, openapi_extra=body_schema(SlowDownReqInput))
@native
async def slow_down(request: Request) -> Response:
    """Make every step slower by a number of seconds (null: off), for tests."""
    obj = await read_as(request, SlowDownReqInput)
    await get_manager().control.slow_down(obj.forward_sleep_time)
    return Response(status_code=200)


@router.api_route("/start_profile", methods=GET_POST, openapi_extra=body_schema(ProfileReqInput))
@native
async def start_profile(request: Request) -> Response:
    """Start torch's profiler in the schedulers."""
    body = await read_json(request)
    obj = convert({**body, "start": True} if isinstance(body, dict) else body, ProfileReqInput)
    await get_manager().control.profile(obj)
    return PlainTextResponse("Start profiling.\n")


@router.api_route("/stop_profile", methods=GET_POST)
@native
async def stop_profile(request: Request) -> Response:
    """Stop the profiler and write its traces."""
    await read_json(request)
    await get_manager().stop_profile()
    return PlainTextResponse("Stop profiling. This will take some time.\n")


@router.post(
    "/update_weight_version",
    openapi_extra=body_schema(UpdateWeightVersionReqInput, required=True),
)
@versions
async def update_weight_version(request: Request) -> Response:
    """Put a new label on the weights in use."""
    obj = await read_as(request, UpdateWeightVersionReqInput)
    if not obj.new_version:
        raise BodyError("new_version must be given and not empty.")
    await get_manager().update_weight_version(obj)
    return json_response(
        {
            "success": True,
            "message": f"Weight version updated to {obj.new_version}",
            "new_version": obj.new_version,
        }
    )


@router.get("/get_weight_version", deprecated=True)
async def get_weight_version() -> Response:
    """The label of the weights in use."""
    return json_response({"weight_version": get_manager().weight_version})
