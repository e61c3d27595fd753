"""Control requests that change nothing that requests depend on: state, loads, profile, gc.

A fault in one of them is an answer to its client (with a logged trace), never the end of the
server. What changes the scheduler's own state is handled by `Scheduler` itself.
Scheduler thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.managers.io_struct import (
    ControlReqInput,
    ControlReqOutput,
    FreezeGCReqInput,
    FreezeGCReqOutput,
    GetInternalStateReqInput,
    GetInternalStateReqOutput,
    GetLoadsReqInput,
    GetLoadsReqOutput,
    PingReqInput,
    PingReqOutput,
    ProfileReqInput,
    ProfileReqOutput,
    SetInternalStateReqInput,
    SetInternalStateReqOutput,
)
from sglang.srt.managers.scheduler_profiler import SchedulerProfiler
from sglang.srt.managers.scheduler_reports import Look, SchedulerReports

logger = logging.getLogger(__name__)

Handler = Callable[[Any], ControlReqOutput]


def make_report_handlers(
    reports: SchedulerReports,
    profiler: SchedulerProfiler,
    *,
    look: Look,
    tiers: Callable[[], dict[str, Any]],
) -> dict[type, Handler]:
    """Message type -> handler that returns the reply.

    `look` says where the scheduler's requests are; `tiers` says what of the hierarchical cache can
    differ from the settings.
    """

    def handle_internal_state(recv: GetInternalStateReqInput) -> ControlReqOutput:
        return GetInternalStateReqOutput(internal_state={**reports.internal_state(), **tiers()})

    def handle_set_internal_state(recv: SetInternalStateReqInput) -> ControlReqOutput:
        # No argument of the present feature set can be changed while serving.
        return SetInternalStateReqOutput(updated=False)

    def handle_loads(recv: GetLoadsReqInput) -> ControlReqOutput:
        return GetLoadsReqOutput(load=reports.load(look()))

    def handle_profile(recv: ProfileReqInput) -> ControlReqOutput:
        success, message = profiler.handle(recv)
        return ProfileReqOutput(success=success, message=message)

    def handle_freeze_gc(recv: FreezeGCReqInput) -> ControlReqOutput:
        reports.freeze_gc()
        return FreezeGCReqOutput()

    return {
        PingReqInput: lambda recv: PingReqOutput(),
        GetInternalStateReqInput: _guarded(handle_internal_state, GetInternalStateReqOutput),
        SetInternalStateReqInput: handle_set_internal_state,
        GetLoadsReqInput: _guarded(handle_loads, GetLoadsReqOutput),
        ProfileReqInput: _guarded(handle_profile, ProfileReqOutput),
        FreezeGCReqInput: _guarded(handle_freeze_gc, FreezeGCReqOutput),
    }


def _guarded(handler: Handler, reply_class: type[ControlReqOutput]) -> Handler:
    """`handler`, with any exception turned into a failure reply and a logged trace."""

    def handle(recv: ControlReqInput) -> ControlReqOutput:
        try:
            return handler(recv)
        except Exception as error:
            logger.exception("%s failed", type(recv).__name__)
            return reply_class(success=False, message=f"{type(error).__name__}: {error}")

    return handle
