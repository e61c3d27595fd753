"""Control requests of the front: one message to every data-parallel replica, one reply from each.

`TokenizerControl` owns the table of outstanding control ids. It is handed a function that sends a
message to all replicas; the tokenizer manager's receive loop feeds it the replies. Replies are
matched by `control_id`, never by order.

What the schedulers have done holds, also where they say so after the requester gave up: what the
replies change here (`adopt`) is changed when the last replica's has come, in time or late. Late
ones are told in the log. Event loop thread only.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ContinueGenerationReqInput,
    ControlReqInput,
    ControlReqOutput,
    DetachHiCacheStorageReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    FreezeGCReqInput,
    GetHiCacheStatusReqInput,
    GetHiCacheStatusReqOutput,
    GetInternalStateReqInput,
    GetInternalStateReqOutput,
    GetLoadsReqInput,
    GetLoadsReqOutput,
    PauseGenerationReqInput,
    PingReqInput,
    ProfileReqInput,
    SetInternalStateReqInput,
    SetInternalStateReqOutput,
    SlowDownReqInput,
)
from sglang.srt.managers.request_errors import EngineUnavailableError, RequestError

logger = logging.getLogger(__name__)

_MAX_SLEEP_S = 60.0
_PROFILE_ACTIVITIES = ("CPU", "GPU")
# These become parts of a file name.
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


# Takes over into the front's state what the replies of all replicas, in rank order, say.
Adopt = Callable[[list[Any]], None]


@dataclass(slots=True)
class _Pending:
    message: ControlReqInput
    adopt: Adopt | None
    future: asyncio.Future[list[ControlReqOutput]]
    replies: dict[int, ControlReqOutput] = field(default_factory=dict)  # by data-parallel rank
    given_up_at: float | None = None  # by whom it was asked for, monotonic time


def merge_messages(replies: Sequence[ControlReqOutput]) -> str:
    """The replies' messages as one text, each once, in rank order."""
    return " | ".join(dict.fromkeys(reply.message for reply in replies if reply.message))


def require_success(replies: Sequence[ControlReqOutput], what: str) -> None:
    """Raise RequestError with the schedulers' reason unless every reply is a success."""
    if not all(reply.success for reply in replies):
        failed = [reply for reply in replies if not reply.success]
        raise RequestError(merge_messages(failed) or f"{what} failed.")


def _check_profile(message: ProfileReqInput) -> None:
    """Raise RequestError for a profile that no scheduler could take."""
    unknown = [name for name in message.activities or () if name not in _PROFILE_ACTIVITIES]
    if unknown:
        raise RequestError(
            f"activities must be among {', '.join(_PROFILE_ACTIVITIES)}, got {unknown[0]!r}."
        )
    for option in ("profile_id", "profile_prefix"):
        name = getattr(message, option)
        if name and not _PLAIN_NAME.fullmatch(name):
            raise RequestError(
                f"{option} must be up to 100 letters, digits, dots, dashes and underscores."
            )
    for option in ("start_step", "num_steps"):
        value = getattr(message, option)
        if value is not None and value < 0:
            raise RequestError(f"{option} must be >= 0, got {value}.")


class TokenizerControl:
    """Sends control requests and gathers their replies."""

    def __init__(self, send_to_all: Callable[[Any], None], dp_size: int) -> None:
        self._send_to_all = send_to_all
        self._dp_size = dp_size
        self._pending: dict[str, _Pending] = {}

    # -- mechanism ------------------------------------------------------------------------------

    async def request(
        self,
        message: ControlReqInput,
        timeout_s: float | None = None,
        *,
        adopt: Adopt | None = None,
    ) -> list[Any]:
        """Send to all replicas; return their replies in rank order.

        `adopt(replies)` is called once all have come, be it after this has raised. Raises
        EngineUnavailableError when one does not answer within `timeout_s` (default
        `SGLANG_CONTROL_TIMEOUT`) or a scheduler dies meanwhile.
        """
        limit_s = envs.SGLANG_CONTROL_TIMEOUT.get() if timeout_s is None else timeout_s
        message.control_id = control_id = uuid.uuid4().hex
        self._send_to_all(message)
        pending = _Pending(message, adopt, asyncio.get_running_loop().create_future())
        self._pending[control_id] = pending
        try:
            async with asyncio.timeout(limit_s):
                return await pending.future
        except TimeoutError:
            missing = sorted(set(range(self._dp_size)) - set(pending.replies))
            raise EngineUnavailableError(
                f"{type(message).__name__}: no reply within {limit_s:g} s from data-parallel "
                f"rank(s) {missing}.",
                status_code=504,
            ) from None
        finally:
            # Left there by those who were not answered, for the replies that may come yet.
            pending.given_up_at = time.monotonic()

    def on_reply(self, reply: ControlReqOutput) -> None:
        """Take in one reply; called by the receive loop."""
        pending = self._pending.get(reply.control_id or "")
        if pending is None:
            logger.warning("Dropped a %s that nobody asked for", type(reply).__name__)
            return
        if pending.given_up_at is not None:
            _tell_late(pending, reply)
        pending.replies[reply.dp_rank] = reply
        if len(pending.replies) < self._dp_size:
            return
        del self._pending[reply.control_id or ""]
        replies = [pending.replies[rank] for rank in sorted(pending.replies)]
        if pending.adopt is not None:
            pending.adopt(replies)
        if not pending.future.done():
            pending.future.set_result(replies)

    def fail_all(self, message: str) -> None:
        """Wake every requester with an error: the engine is gone."""
        for pending in self._pending.values():
            if not pending.future.done():
                pending.future.set_exception(EngineUnavailableError(message))
        self._pending = {}

    # -- requests -------------------------------------------------------------------------------

    async def flush_cache(self, timeout_s: float = 0.0) -> FlushCacheReqOutput:
        """Empty the caches of all replicas, waiting up to `timeout_s` for an idle moment."""
        # The schedulers keep the deadline; this side only guards against one that hangs.
        replies = await self.request(
            FlushCacheReqInput(timeout_s=timeout_s), timeout_s + envs.SGLANG_CONTROL_TIMEOUT.get()
        )
        success = all(reply.success for reply in replies)
        # Of a failure only those who failed can tell why.
        telling = [reply for reply in replies if reply.success == success]
        return FlushCacheReqOutput(success=success, message=merge_messages(telling))

    async def ping(self, timeout_s: float) -> None:
        """Return when every replica's loop has answered."""
        await self.request(PingReqInput(), timeout_s)

    async def pause(self, mode: str) -> None:
        require_success(await self.request(PauseGenerationReqInput(mode=mode)), "Pause")

    async def resume(self, torch_empty_cache: bool, adopt: Adopt | None = None) -> None:
        message = ContinueGenerationReqInput(torch_empty_cache=torch_empty_cache)
        require_success(await self.request(message, adopt=adopt), "Continue")

    async def get_internal_state(self) -> list[dict[str, Any]]:
        """One dict per replica, see `/server_info`."""
        replies: list[GetInternalStateReqOutput] = await self.request(GetInternalStateReqInput())
        return [reply.internal_state for reply in replies]

    async def set_internal_state(self, server_args: dict[str, Any]) -> list[bool]:
        """Whether each replica changed anything."""
        replies: list[SetInternalStateReqOutput] = await self.request(
            SetInternalStateReqInput(server_args=server_args)
        )
        return [reply.updated for reply in replies]

    async def get_loads(self) -> list[dict[str, Any]]:
        """One load report per replica, with its `dp_rank`."""
        replies: list[GetLoadsReqOutput] = await self.request(GetLoadsReqInput())
        return [{"dp_rank": reply.dp_rank, **reply.load} for reply in replies]

    async def profile(self, message: ProfileReqInput) -> None:
        """Start or stop the profiler. Raises RequestError on options that make no sense."""
        _check_profile(message)
        require_success(await self.request(message), "Profiling")

    async def slow_down(self, forward_sleep_time: float | None) -> None:
        """Sleep so many seconds before each step; None: not at all. Raises RequestError."""
        sleep_s = forward_sleep_time
        if sleep_s is not None and not (math.isfinite(sleep_s) and 0 <= sleep_s <= _MAX_SLEEP_S):
            raise RequestError(
                f"forward_sleep_time must be in [0, {_MAX_SLEEP_S:g}] seconds, got {sleep_s}."
            )
        message = SlowDownReqInput(forward_sleep_time=forward_sleep_time)
        require_success(await self.request(message), "Slow down")

    async def attach_hicache_storage(self, message: AttachHiCacheStorageReqInput) -> None:
        """Attach storage to every replica. Raises RequestError with the reason of a refusal."""
        require_success(await self.request(message), "Attaching the storage backend")

    async def detach_hicache_storage(self) -> None:
        """Detach storage from every replica; nothing attached is a success."""
        require_success(
            await self.request(DetachHiCacheStorageReqInput()), "Detaching the storage backend"
        )

    async def clear_hicache_storage(self) -> bool:
        """Delete our own pages from storage; False where that failed or there is no storage."""
        replies = await self.request(ClearHiCacheReqInput())
        return all(reply.success for reply in replies)

    async def hicache_status(self) -> dict[str, Any]:
        """The storage backend and the policies; replicas are configured alike."""
        replies: list[GetHiCacheStatusReqOutput] = await self.request(GetHiCacheStatusReqInput())
        require_success(replies, "Status of the storage backend")
        return replies[0].status

    async def freeze_gc(self) -> None:
        require_success(await self.request(FreezeGCReqInput()), "Freezing the collector")


def _tell_late(pending: _Pending, reply: ControlReqOutput) -> None:
    asked = type(pending.message).__name__
    late_s = time.monotonic() - (pending.given_up_at or 0.0)
    outcome = "success" if reply.success else "failure"
    logger.warning(
        "Replica %d answered a %s %.1f s too late for its client: %s",
        *(reply.dp_rank, asked, late_s, ", ".join(filter(None, (outcome, reply.message)))),
    )
