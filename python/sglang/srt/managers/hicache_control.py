"""Control requests of the hierarchical cache's storage: attach, detach, clear, status.

Owns what was configured last (it is echoed to clients). The tree does the work. Scheduler thread
only; every rank handles the same messages in the same order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

logger = logging.getLogger(__name__)

_PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
_WRITE_POLICIES = ("write_back", "write_through", "write_through_selective")


class HiCacheControl:
    """Storage of one scheduler's hierarchical cache, as its operators see it.

    ``why_busy()`` returns None when the scheduler is idle, else a sentence with the counts.
    """

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

    def attach_initial(self) -> None:
        """Attach the storage that the command line names. Raises ValueError with the reason."""
        if self._initial_backend is None:
            return
        request = AttachHiCacheStorageReqInput(
            hicache_storage_backend=self._initial_backend,
            hicache_storage_backend_extra_config_json=self._extra_config,
        )
        success, message = self._attach(request, busy=None)
        if not success:
            raise ValueError(f"--hicache-storage-backend {self._initial_backend}: {message}")

    def handlers(
        self, why_busy: Callable[[], str | None]
    ) -> dict[type, Callable[[Any], ControlReqOutput]]:
        """Message type -> handler that returns the reply."""

        def attach(recv: AttachHiCacheStorageReqInput) -> ControlReqOutput:
            success, message = self._attach(recv, why_busy())
            return AttachHiCacheStorageReqOutput(success=success, message=message)

        def detach(recv: DetachHiCacheStorageReqInput) -> ControlReqOutput:
            success, message = self._detach(why_busy())
            return DetachHiCacheStorageReqOutput(success=success, message=message)

        def clear(recv: ClearHiCacheReqInput) -> ControlReqOutput:
            cleared = self._tree_cache.clear_storage_backend()
            message = "" if cleared else self._why_not_cleared()
            if not cleared:
                logger.warning("Storage was not cleared: %s", message)
            return ClearHiCacheReqOutput(success=cleared, message=message)

        def status(recv: GetHiCacheStatusReqInput) -> ControlReqOutput:
            return GetHiCacheStatusReqOutput(status=self.status())

        return {
            AttachHiCacheStorageReqInput: attach,
            DetachHiCacheStorageReqInput: detach,
            ClearHiCacheReqInput: clear,
            GetHiCacheStatusReqInput: status,
        }

    def status(self) -> dict[str, Any]:
        """The backend in use (None: none), its configuration as given, and the policies.

        ``hicache_storage_backend_detaching``, only where there is one: a backend that is off and
        not let go of, because calls of it hang.
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

    def _attach(self, recv: AttachHiCacheStorageReqInput, busy: str | None) -> tuple[bool, str]:
        prefetch = recv.hicache_storage_prefetch_policy or self._prefetch_policy
        write = recv.hicache_write_policy or self._write_policy
        refusal = _unknown("hicache_storage_prefetch_policy", prefetch, _PREFETCH_POLICIES)
        refusal = refusal or _unknown("hicache_write_policy", write, _WRITE_POLICIES)
        if not recv.hicache_storage_backend:
            refusal = refusal or "hicache_storage_backend is missing."
        if refusal or busy:
            return False, refusal or f"Storage is attached to an idle server only: {busy}"
        was_attached = self._is_attached
        success, message = self._tree_cache.attach_storage_backend(
            storage_backend=recv.hicache_storage_backend,
            storage_backend_extra_config_json=recv.hicache_storage_backend_extra_config_json,
            served_model_name=self._served_model_name,
            hicache_storage_prefetch_policy=prefetch,
            hicache_write_policy=write,
        )
        if success:
            if not was_attached:
                self._extra_config = recv.hicache_storage_backend_extra_config_json
            self._backend = recv.hicache_storage_backend
            self._prefetch_policy, self._write_policy = prefetch, write
            logger.info("Storage backend %s attached (%s, %s)", self._backend, prefetch, write)
        return success, message

    def _detach(self, busy: str | None) -> tuple[bool, str]:
        if self._backend is None:
            return True, "no storage backend is attached"
        if busy:
            return False, f"Storage is detached from an idle server only: {busy}"
        success, message = self._tree_cache.detach_storage_backend()
        if success:
            logger.info("Storage backend %s detached", self._backend)
            self._backend = None
        return success, message


def _unknown(name: str, value: str, known: tuple[str, ...]) -> str | None:
    """The refusal of a value that is none of the known ones."""
    return None if value in known else f"{name} must be one of {', '.join(known)}, got {value!r}."
