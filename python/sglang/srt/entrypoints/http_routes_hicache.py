"""Endpoints of the hierarchical cache's storage: attach, detach, status, clear.

Attach, detach and status are for administrators only: they answer 400 on a server that was started
without an admin key.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from sglang.srt.entrypoints.http_body import BodyError, body_schema, convert, read_json
from sglang.srt.entrypoints.http_errors import json_response, native_error
from sglang.srt.entrypoints.http_state import get_manager
from sglang.srt.entrypoints.http_stream import answers_errors
from sglang.srt.managers.io_struct import AttachHiCacheStorageReqInput
from sglang.srt.managers.request_errors import RequestError

router = APIRouter()
native = answers_errors(native_error)

_CONFIG, _CONFIG_JSON = (
    "hicache_storage_backend_extra_config",
    "hicache_storage_backend_extra_config_json",
)
_CLEARED = "Hierarchical cache storage backend cleared.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachStorageBody:
    """Body of the PUT. The extra config, a text, goes by its name in the status and the flags too.

    None: the present policy; where the backend is attached already, also its present config.
    """

    hicache_storage_backend: str = ""
    hicache_storage_backend_extra_config_json: str | None = None
    hicache_storage_backend_extra_config: str | None = None
    hicache_storage_prefetch_policy: str | None = None
    hicache_write_policy: str | None = None


def read_attachment(body: Any) -> AttachHiCacheStorageReqInput:
    """Convert the decoded body of a PUT.

    Raises BodyError for unknown keys, which are named, and for two different extra configs.
    """
    attachment = convert(body, AttachStorageBody)
    known = [spec.name for spec in fields(AttachStorageBody)]
    if unknown := sorted(set(body) - set(known)):
        raise BodyError(
            f"Unknown keys: {', '.join(unknown)}. The body may have {', '.join(known)}."
        )
    given = attachment.hicache_storage_backend_extra_config_json
    other = attachment.hicache_storage_backend_extra_config
    if given is not None and other is not None and given != other:
        raise BodyError(f"{_CONFIG} and {_CONFIG_JSON} are two names of one thing and differ.")
    return AttachHiCacheStorageReqInput(
        hicache_storage_backend=attachment.hicache_storage_backend,
        hicache_storage_backend_extra_config_json=other if given is None else given,
        hicache_storage_prefetch_policy=attachment.hicache_storage_prefetch_policy,
        hicache_write_policy=attachment.hicache_write_policy,
    )


def _no_admin_key() -> Response | None:
    """The refusal of a server without an admin key; None where there is one."""
    if get_manager().server_args.admin_api_key is not None:
        return None
    message = "This endpoint requires admin API key: start the server with --admin-api-key."
    return json_response({"error": message}, 400)


def _require_hicache() -> None:
    if not get_manager().server_args.enable_hierarchical_cache:
        raise RequestError("The hierarchical cache is not enabled (--enable-hierarchical-cache).")


@router.put(
    "/hicache/storage-backend",
    openapi_extra=body_schema(AttachStorageBody, required=True),
)
@native
async def attach_storage_backend(request: Request) -> Response:
    """Attach a storage backend, or change the policies of the one attached."""
    if (refusal := _no_admin_key()) is not None:
        return refusal
    obj = read_attachment(await read_json(request))
    _require_hicache()
    try:
        await get_manager().control.attach_hicache_storage(obj)
    except RequestError as error:
        if error.status_code >= 500:
            raise
        return PlainTextResponse(
            f"Failed to attach HiCache storage backend.\n{error.message}\n", status_code=400
        )
    return PlainTextResponse("HiCache storage backend attached.\n")


@router.delete("/hicache/storage-backend")
@native
async def detach_storage_backend(request: Request) -> Response:
    """Detach the storage backend; 200 also where none is attached."""
    if (refusal := _no_admin_key()) is not None:
        return refusal
    await read_json(request)
    _require_hicache()
    try:
        await get_manager().control.detach_hicache_storage()
    except RequestError as error:
        if error.status_code >= 500:
            raise
        return PlainTextResponse(
            f"Failed to detach HiCache storage backend.\n{error.message}\n", status_code=400
        )
    return PlainTextResponse("HiCache storage backend detached.\n")


@router.get("/hicache/storage-backend")
@native
async def storage_backend_status(request: Request) -> Response:
    """The backend that is attached (null: none) and the policies."""
    if (refusal := _no_admin_key()) is not None:
        return refusal
    _require_hicache()
    return json_response(await get_manager().control.hicache_status())


@router.post("/hicache/storage-backend/clear")
@router.api_route("/clear_hicache_storage_backend", methods=["GET", "POST"])
@native
async def clear_storage_backend(request: Request) -> Response:
    """Delete our own pages from the storage backend."""
    await read_json(request)
    _require_hicache()
    cleared = await get_manager().control.clear_hicache_storage()
    # The text is the same either way, as clients of this endpoint expect; the status tells.
    return PlainTextResponse(_CLEARED, status_code=200 if cleared else 400)
