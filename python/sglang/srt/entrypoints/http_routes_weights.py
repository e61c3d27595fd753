"""Endpoints of weights and memory: groups, sessions, updates, checks, release and resume.

Every path needs the admin key where the server has one. A refusal has the keys of a success with
`success` false and status 400; memory and reading have the error shape of the native endpoints.
"""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from sglang.srt.entrypoints.http_body import BodyError, body_schema, read_as, read_json
from sglang.srt.entrypoints.http_errors import json_response, native_error, weight_route_error
from sglang.srt.entrypoints.http_state import get_manager
from sglang.srt.entrypoints.http_stream import answers_errors
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    CheckWeightsReqInput,
    DestroyWeightsUpdateGroupReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.tokenizer_weights import WeightResult

router = APIRouter()


weights = answers_errors(weight_route_error)
native = answers_errors(native_error)
GET_POST = ["GET", "POST"]


def _answer(result: WeightResult) -> Response:
    content = {"success": result.success, "message": result.message}
    return json_response(content, 200 if result.success else 400)


@router.post(
    "/init_weights_update_group",
    openapi_extra=body_schema(InitWeightsUpdateGroupReqInput, required=True),
)
@weights
async def init_weights_update_group(request: Request) -> Response:
    """Join a trainer's process group; answers when all its members are there."""
    obj = await read_as(request, InitWeightsUpdateGroupReqInput)
    return _answer(await get_manager().weights.init_group(obj))


@router.post(
    "/destroy_weights_update_group", openapi_extra=body_schema(DestroyWeightsUpdateGroupReqInput)
)
@weights
async def destroy_weights_update_group(request: Request) -> Response:
    """Leave a trainer's process group."""
    obj = await read_as(request, DestroyWeightsUpdateGroupReqInput)
    return _answer(await get_manager().weights.destroy_group(obj))


@router.post("/begin_weight_update", openapi_extra=body_schema(BeginWeightUpdateReqInput))
@weights
async def begin_weight_update(request: Request) -> Response:
    """Open a session: the updates until its end are parts of one."""
    obj = await read_as(request, BeginWeightUpdateReqInput)
    return _answer(await get_manager().weights.begin(obj))


@router.post("/end_weight_update")
@weights
async def end_weight_update(request: Request) -> Response:
    """Close the session."""
    obj = await read_as(request, EndWeightUpdateReqInput)
    return _answer(await get_manager().weights.end(obj))


@router.post(
    "/update_weights_from_distributed",
    openapi_extra=body_schema(UpdateWeightsFromDistributedReqInput, required=True),
)
@weights
async def update_weights_from_distributed(request: Request) -> Response:
    """Receive the broadcasts of a trainer's group."""
    obj = await read_as(request, UpdateWeightsFromDistributedReqInput)
    return _answer(await get_manager().weights.from_distributed(obj))


@router.post(
    "/update_weights_from_tensor",
    openapi_extra=body_schema(UpdateWeightsFromTensorReqInput, required=True),
)
@weights
async def update_weights_from_tensor(request: Request) -> Response:
    """Load serialized tensors, one entry a tensor-parallel rank."""
    obj = await read_as(request, UpdateWeightsFromTensorReqInput)
    if not all(isinstance(entry, str) for entry in obj.serialized_named_tensors):
        raise BodyError("serialized_named_tensors must be a list of base64 texts.")
    return _answer(await get_manager().weights.from_tensor(obj))


@router.post(
    "/update_weights_from_disk",
    openapi_extra=body_schema(UpdateWeightFromDiskReqInput, required=True),
)
@weights
async def update_weights_from_disk(request: Request) -> Response:
    """Load a checkpoint from a disk of the server."""
    obj = await read_as(request, UpdateWeightFromDiskReqInput)
    success, message = await get_manager().weights.from_disk(obj)
    content = {"success": success, "message": message, "num_paused_requests": 0}
    return json_response(content, 200 if success else 400)


@router.post(
    "/update_weights_from_ipc",
    openapi_extra=body_schema(UpdateWeightsFromIPCReqInput, required=True),
)
@weights
async def update_weights_from_ipc(request: Request) -> Response:
    """Load what a checkpoint engine on this host sends."""
    obj = await read_as(request, UpdateWeightsFromIPCReqInput)
    return _answer(await get_manager().weights.from_ipc(obj))


@router.post("/post_process_weights")
@weights
async def post_process_weights(request: Request) -> Response:
    """Nothing to do: weights are always in the form in which they are loaded."""
    await read_json(request)
    return _answer(WeightResult(True, "Success"))


@router.api_route(
    "/weights_checker", methods=GET_POST, openapi_extra=body_schema(CheckWeightsReqInput)
)
@weights
async def weights_checker(request: Request) -> Response:
    """Checksums of the weights, or comparison with a snapshot."""
    result = await get_manager().weights.check(await read_as(request, CheckWeightsReqInput))
    content = {"success": result.success, "message": result.message}
    if result.replicas:
        content["ranks"] = [rank for each in result.replicas for rank in each["ranks"]]
        sums = [each["per_engine_checksum"] for each in result.replicas]
        content["per_engine_checksum"] = sums[0] if len(sums) == 1 else sums
    return json_response(content, 200 if result.success else 400)


@router.api_route(
    "/get_weights_by_name",
    methods=GET_POST,
    openapi_extra=body_schema(GetWeightsByNameReqInput, required=True),
)
@native
async def get_weights_by_name(request: Request) -> Response:
    """The first rows of a tensor as nested lists."""
    obj = await read_as(request, GetWeightsByNameReqInput)
    return json_response(await get_manager().weights.get_by_name(obj))


@router.api_route(
    "/release_memory_occupation",
    methods=GET_POST,
    openapi_extra=body_schema(ReleaseMemoryOccupationReqInput),
)
@native
async def release_memory_occupation(request: Request) -> Response:
    """Give memory back until it is resumed."""
    obj = await read_as(request, ReleaseMemoryOccupationReqInput)
    await get_manager().weights.release_memory(obj)
    return json_response(None)


@router.api_route(
    "/resume_memory_occupation",
    methods=GET_POST,
    openapi_extra=body_schema(ResumeMemoryOccupationReqInput),
)
@native
async def resume_memory_occupation(request: Request) -> Response:
    """Take memory again."""
    obj = await read_as(request, ResumeMemoryOccupationReqInput)
    await get_manager().weights.resume_memory(obj)
    return json_response(None)
