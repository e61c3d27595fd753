"""Page batches over a user's class that stores one flat tensor a key.

Owns the translation only. The user's class has ``get(key, target) -> tensor | bool | None``,
``set(key, tensor) -> bool`` and ``exists(key) -> bool``; with ``interface_v1`` it moves KV itself
by ``batch_get_v1`` / ``batch_set_v1(keys, host_indices, extra_info) -> [bool]`` after
``register_mem_pool_host(pool)``. Whatever it raises is a failed page; of each kind one line a
minute says so, and every traceback is logged at debug level.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    page_indices,
)
from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.pool_transfer import PoolName, PoolTransfer
from sglang.srt.mem_cache.storage.rate_limited_log import RateLimitedLog

logger = logging.getLogger(__name__)

_FLAT_METHODS = ("get", "set", "exists")
_V1_METHODS = ("batch_get_v1", "batch_set_v1", "exists")


class FlatPageAdapter(HiCacheStorage):
    """See the module docstring. Two threads may call at once, as for any backend."""

    def __init__(
        self, config: HiCacheStorageConfig, user_object: Any, *, uses_v1: bool = False
    ) -> None:
        super().__init__(config)
        self.user_object = user_object
        self._uses_v1 = uses_v1
        self._log = RateLimitedLog(logger)

    @staticmethod
    def accepts(user_class: type[Any], *, uses_v1: bool) -> bool:
        """Whether the class has the methods that are called."""
        names = _V1_METHODS if uses_v1 else _FLAT_METHODS
        return all(callable(getattr(user_class, name, None)) for name in names)

    def register_mem_host_pool_v2(self, pool: HostKVCache, name: PoolName) -> None:
        """See the base class; the KV pool is passed on to a class that moves pages itself."""
        super().register_mem_host_pool_v2(pool, name)
        register = getattr(self.user_object, "register_mem_pool_host", None)
        if name == PoolName.KV and self._uses_v1 and register is not None:
            register(pool)

    def batch_exists(
        self, keys: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading keys the user's object has."""
        for position, key in enumerate(keys):
            try:
                if not self.user_object.exists(key):
                    return position
            except Exception as error:  # the user's code
                self._failed("exists", f"exists({key})", error, "counts as absent")
                return position
        return len(keys)

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Read flat pages and copy each into its host page."""
        verdicts: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            pool = self.pools[transfer.name]
            indices = page_indices(transfer, pool.page_size)
            if self._moves_itself(transfer):
                found = self._batch_v1("batch_get_v1", transfer, extra_info)
            else:
                keys = transfer.keys or []
                found = [self._get(pool, index, key) for index, key in zip(indices, keys)]
            verdicts.setdefault(transfer.name, []).extend(found)
        return verdicts

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Write flat pages, in order, up to the first that fails."""
        verdicts: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            pool = self.pools[transfer.name]
            indices = page_indices(transfer, pool.page_size)
            if self._moves_itself(transfer):
                written = self._batch_v1("batch_set_v1", transfer, extra_info)
            else:
                written = [False] * len(indices)
                for position, key in enumerate(transfer.keys or []):
                    if not self._set(pool, indices[position], key):
                        break
                    written[position] = True
            verdicts.setdefault(transfer.name, []).extend(written)
        return verdicts

    def clear(self) -> bool:
        """Clear the user's object; False when it cannot or says so."""
        clear = getattr(self.user_object, "clear", None)
        if clear is None:
            return False
        try:
            return clear() is not False
        except Exception as error:  # the user's code
            self._failed("clear", "clear()", error, "nothing counts as removed")
            return False

    def get_stats(self) -> dict[str, float]:
        """Return the numbers among the user's statistics."""
        get_stats = getattr(self.user_object, "get_stats", None)
        stats: object = None if get_stats is None else get_stats()
        if not isinstance(stats, dict):
            return {}
        return {str(name): float(v) for name, v in stats.items() if isinstance(v, int | float)}

    def close(self) -> None:
        """Close the user's object where it can be."""
        self._log.flush()
        close = getattr(self.user_object, "close", None)
        if close is not None:
            close()

    def _failed(self, kind: str, call: str, error: Exception, result: str) -> None:
        self._log.warning(kind, "%s failed (%r): %s", call, error, result)
        logger.debug("%s failed", call, exc_info=error)

    def _moves_itself(self, transfer: PoolTransfer) -> bool:
        return self._uses_v1 and transfer.name == PoolName.KV

    def _batch_v1(
        self, method: str, transfer: PoolTransfer, extra_info: HiCacheStorageExtraInfo | None
    ) -> list[bool]:
        keys = list(transfer.keys or [])
        try:
            answer = getattr(self.user_object, method)(keys, transfer.host_indices, extra_info)
            verdicts = [bool(verdict) for verdict in answer]
        except Exception as error:  # the user's code
            self._failed(method, method, error, f"{len(keys)} pages fail")
            return [False] * len(keys)
        if len(verdicts) != len(keys):
            self._log.warning(
                f"answers of {method}",
                "%s gave %d answers for %d keys, one each is expected: all count as failed",
                method,
                len(verdicts),
                len(keys),
            )
            return [False] * len(keys)
        return verdicts

    def _get(self, pool: HostKVCache, index: int, key: str) -> bool:
        target = pool.get_dummy_flat_data_page()
        try:
            answer = self.user_object.get(key, target)
        except Exception as error:  # the user's code
            self._failed("get", f"get({key})", error, "counts as a miss")
            return False
        if answer is None or answer is False:
            return False
        if answer is not True and not _copy_page(answer, target):
            message = "get(%s) returned no page of %d bytes: counts as a miss"
            self._log.warning("page", message, key, target.nbytes)
            return False
        pool.set_from_flat_data_page(index, target)
        return True

    def _set(self, pool: HostKVCache, index: int, key: str) -> bool:
        try:
            # A copy: the object may keep the tensor for as long as it likes.
            return self.user_object.set(key, pool.get_data_page(index).clone()) is True
        except Exception as error:  # the user's code
            self._failed("set", f"set({key})", error, "the page is not stored")
            return False


def _copy_page(page: Any, target: torch.Tensor) -> bool:
    """Copy the bytes of what a user's object returned; False where it is no page.

    A tensor of any type, shape and place in memory may come, such as a part of a larger buffer.
    """
    if not isinstance(page, torch.Tensor):
        return False
    try:
        if page.nbytes != target.nbytes:
            return False
        target.view(-1).view(torch.uint8).copy_(page.contiguous().view(-1).view(torch.uint8))
    except RuntimeError:
        logger.debug("a page of layout %s cannot be copied", page.layout, exc_info=True)
        return False
    return True
