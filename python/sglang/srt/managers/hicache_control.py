"""Control requests of the hierarchical cache's storage: attach, detach, clear, status.

Owns what was configured last (it is echoed to clients) and what takes time: a backend is made in a
thread while the scheduler serves, and attached at the first idle moment after that; one whose calls
hang is asked again and again whether it can be let go of, while requests go on without it. The tree
does the work. Scheduler thread only; every rank handles the same messages in the same order
and polls equally often.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqInput,
    AttachHiCacheStorageReqOutput,
    ClearHiCacheReqInput,
    ClearHiCacheReqOutput,
    ControlReqOutput,
    DetachHiCacheStorageReqInput,
    DetachHiCacheStorageReqOutput,
    GetHiCacheStatusReqInput,
    GetHiCacheStatusReqOutput,
)
from sglang.srt.mem_cache.backend_opening import BackendOpening
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.hicache_records import PREFETCH_POLICIES, WRITE_POLICIES
from sglang.srt.utils.attempt import AttemptState

logger = logging.getLogger(__name__)

# How long a backend that is ready waits for an idle moment.
_IDLE_WAIT_S = 30.0
# How long calls of a backend that is detached may take: with the scheduler waiting, and in all.
_SHORT_WAIT_S = 0.1
_HANG_WAIT_S = 10.0
_LOOK_INTERVAL_S = 0.5

Reply = Callable[[Any, ControlReqOutput], None]
"""``reply(request, answer)``: send an answer that comes later."""


@dataclass(slots=True)
class _Attachment:
    """One that is under way. ``last_moment``: unix time, known when the backend is ready."""

    request: AttachHiCacheStorageReqInput
    opening: BackendOpening
    last_moment: float | None = None


@dataclass(slots=True)
class _Detachment:
    """One whose backend hangs. Unix times, known from the first poll on."""

    request: DetachHiCacheStorageReqInput
    message: str  # why it is not over
    last_moment: float | None = None
    next_look: float = 0.0


class HiCacheControl:
    """Storage of one scheduler's hierarchical cache, as its operators see it."""

    def __init__(
        self,
        tree_cache: BasePrefixCache,
        *,
        served_model_name: str,
        storage_backend: str | None,
        extra_config: str | None,
        prefetch_policy: str,
        write_policy: str,
    ) -> None:
        self._tree_cache = tree_cache
        self._initial_backend = storage_backend
        self._served_model_name = served_model_name
        # Named from a successful attachment to a successful detachment; whether it is in use in
        # between is for the tree to say.
        self._backend: str | None = None
        self._extra_config = extra_config
        self._prefetch_policy = prefetch_policy
        self._write_policy = write_policy
        self._pending: _Attachment | None = None
        self._detachment: _Detachment | None = None
        self._why_busy: Callable[[], str | None] = lambda: "it is starting"  # set by start
        self._reply: Reply = lambda recv, reply: None  # set by start

    def start(
        self, why_busy: Callable[[], str | None], reply: Reply
    ) -> dict[type, Callable[[Any], ControlReqOutput | None]]:
        """Attach what the command line names, and return the handlers.

        ``why_busy()`` returns None when the scheduler is idle, else a sentence with the counts.
        Raises ValueError with the reason.
        """
        self.attach_initial()
        self._why_busy, self._reply = why_busy, reply
        return self.handlers()

    def attach_initial(self) -> None:
        """Attach the storage that the command line names. Raises ValueError with the reason."""
        if self._initial_backend is None:
            return
        request = AttachHiCacheStorageReqInput(
            hicache_storage_backend=self._initial_backend,
            hicache_storage_backend_extra_config_json=self._extra_config,
        )
        success, message = self._attach(request)
        if not success:
            raise ValueError(f"--hicache-storage-backend {self._initial_backend}: {message}")

    def handlers(self) -> dict[type, Callable[[Any], ControlReqOutput | None]]:
        """Message type -> handler that returns the reply, or None where it comes later."""

        def clear(recv: ClearHiCacheReqInput) -> ControlReqOutput:
            cleared = self._tree_cache.clear_storage_backend()
            message = "" if cleared else self._why_not_cleared()
            if not cleared:
                logger.warning("Storage was not cleared: %s", message)
            return ClearHiCacheReqOutput(success=cleared, message=message)

        def status(recv: GetHiCacheStatusReqInput) -> ControlReqOutput:
            return GetHiCacheStatusReqOutput(status=self.status())

        return {
            AttachHiCacheStorageReqInput: self._begin_attaching,
            DetachHiCacheStorageReqInput: self._begin_detaching,
            ClearHiCacheReqInput: clear,
            GetHiCacheStatusReqInput: status,
        }

    def status(self) -> dict[str, Any]:
        """The backend in use (None: none), its configuration as given, and the policies.

        ``hicache_storage_backend_detaching``, only where there is one: a backend that is off and
        not let go of, because calls of it hang. ``hicache_storage_backend_attaching`` likewise: one
        that has not answered yet.
        """
        attached = self._is_attached
        status: dict[str, Any] = {
            "hicache_storage_backend": self._backend if attached else None,
            "hicache_storage_backend_extra_config": self._extra_config if attached else None,
            "hicache_storage_prefetch_policy": self._prefetch_policy,
            "hicache_write_policy": self._write_policy,
        }
        if self._backend is not None and not attached:
            status["hicache_storage_backend_detaching"] = self._backend
        if self._pending is not None:
            status["hicache_storage_backend_attaching"] = (
                self._pending.request.hicache_storage_backend
            )
        return status

    @property
    def _is_attached(self) -> bool:
        return self._tree_cache.storage_backend_name() is not None

    def _why_not_cleared(self) -> str:
        if self._backend is None:
            return "no storage backend is attached"
        if not self._is_attached:
            return f"{self._backend} is being detached; calls of it have not returned"
        return f"the backend {self._backend} failed or did not answer in time"

    def _begin_attaching(self, recv: AttachHiCacheStorageReqInput) -> ControlReqOutput | None:
        """Refuse, or change the policies of what is attached; else None, and `poll` goes on."""
        refusal = self._refusal(recv)
        if refusal is not None:
            return AttachHiCacheStorageReqOutput(success=False, message=refusal)
        if self._is_attached:
            success, message = self._attach(recv)
            return AttachHiCacheStorageReqOutput(success=success, message=message)
        if self._backend is not None:  # one whose detachment hung
            success, message = self._detach()
            if not success:
                return AttachHiCacheStorageReqOutput(success=False, message=message)
        opening = self._tree_cache.open_storage_backend(**self._configuration(recv))
        self._pending = _Attachment(recv, opening)
        return None

    def _refusal(self, recv: AttachHiCacheStorageReqInput) -> str | None:
        config = self._configuration(recv)
        policies = (
            ("hicache_storage_prefetch_policy", PREFETCH_POLICIES),
            ("hicache_write_policy", WRITE_POLICIES),
        )
        for name, known in policies:
            if config[name] not in known:
                return f"{name} must be one of {', '.join(known)}, got {config[name]!r}."
        if not recv.hicache_storage_backend:
            return "hicache_storage_backend is missing."
        if self._pending is not None:
            name = self._pending.request.hicache_storage_backend
            return f"Storage backend {name} is being attached; wait for its answer, or detach it."
        if self._detachment is not None:
            return f"{self._backend} is being detached; wait for the answer."
        busy = self._why_busy()
        return None if busy is None else f"Storage is attached to an idle server only: {busy}"

    def poll(self, now: float) -> None:
        """Go on with what is under way. Collective while there is something; once a loop.

        ``now``: unix time, the same on every rank.
        """
        self._go_on_detaching(now)
        self._go_on_attaching(now)

    def _begin_detaching(self, recv: DetachHiCacheStorageReqInput) -> ControlReqOutput | None:
        """Detach or refuse; None where calls of the backend hang, and `poll` goes on."""
        if self._detachment is not None:
            refusal = f"{self._backend} is being detached; wait for the answer."
            return DetachHiCacheStorageReqOutput(success=False, message=refusal)
        was_attached = self._is_attached
        success, message = self._detach()
        if success or self._is_attached or not was_attached:
            return DetachHiCacheStorageReqOutput(success=success, message=message)
        self._detachment = _Detachment(recv, message)
        return None

    def _go_on_detaching(self, now: float) -> None:
        detachment = self._detachment
        if detachment is None or now < detachment.next_look:
            return
        if detachment.last_moment is None:
            detachment.last_moment = now + _HANG_WAIT_S
        detachment.next_look = now + _LOOK_INTERVAL_S
        success = False
        if self._why_busy() is None:
            success, detachment.message = self._detach()
        if success or now >= detachment.last_moment:
            self._detachment = None
            if not success:
                logger.warning("Storage not detached: %s", detachment.message)
            output = DetachHiCacheStorageReqOutput(success=success, message=detachment.message)
            self._reply(detachment.request, output)

    def _go_on_attaching(self, now: float) -> None:
        pending = self._pending
        if pending is None:
            return
        state = self._tree_cache.opening_state(pending.opening)
        if state is AttemptState.PENDING:
            return
        if state is AttemptState.FAILED:
            self._give_up(pending.opening.failure or "Another rank could not attach storage.")
            return
        if pending.last_moment is None:
            pending.last_moment = now + _IDLE_WAIT_S
        busy = self._why_busy()
        if busy is None:
            self._pending = None
            self._answer(pending, *self._attach(pending.request, pending.opening))
        elif now >= pending.last_moment:
            self._give_up(f"Storage is attached to an idle server only: {busy}")

    def _give_up(self, why: str) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            name = pending.request.hicache_storage_backend
            logger.warning("Storage backend %s not attached: %s", name, why)
            pending.opening.give_up()
            self._answer(pending, False, why)

    def _answer(self, pending: _Attachment, success: bool, message: str) -> None:
        output = AttachHiCacheStorageReqOutput(success=success, message=message)
        self._reply(pending.request, output)

    def _configuration(self, recv: AttachHiCacheStorageReqInput) -> dict[str, Any]:
        """What the tree is told; policies that are not named stay."""
        return {
            "storage_backend": recv.hicache_storage_backend,
            "storage_backend_extra_config_json": recv.hicache_storage_backend_extra_config_json,
            "served_model_name": self._served_model_name,
            "hicache_storage_prefetch_policy": recv.hicache_storage_prefetch_policy
            or self._prefetch_policy,
            "hicache_write_policy": recv.hicache_write_policy or self._write_policy,
        }

    def _attach(
        self, recv: AttachHiCacheStorageReqInput, opened: BackendOpening | None = None
    ) -> tuple[bool, str]:
        was_attached = self._is_attached
        config = self._configuration(recv)
        success, message = self._tree_cache.attach_storage_backend(opened, **config)
        if success:
            if not was_attached:
                self._extra_config = recv.hicache_storage_backend_extra_config_json
            self._backend = recv.hicache_storage_backend
            self._prefetch_policy = config["hicache_storage_prefetch_policy"]
            self._write_policy = config["hicache_write_policy"]
            logger.info(
                "Storage backend %s attached (%s, %s)",
                self._backend,
                self._prefetch_policy,
                self._write_policy,
            )
        return success, message

    def _detach(self) -> tuple[bool, str]:
        self._give_up("It was detached before it was attached.")
        if self._backend is None:
            return True, "no storage backend is attached"
        busy = self._why_busy()
        if busy:
            return False, f"Storage is detached from an idle server only: {busy}"
        success, message = self._tree_cache.detach_storage_backend(_SHORT_WAIT_S)
        if success:
            logger.info("Storage backend %s detached", self._backend)
            self._backend = None
        return success, message
