"""A storage backend being made in a thread of its own, while the scheduler serves.

`BackendOpening` is the attempt of one rank: connecting to a store may take as long as the store
likes. Trees start, take and give up attempts on the scheduler thread; that all ranks come to the
same end is theirs.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, StorageError
from sglang.srt.utils.attempt import Attempt

logger = logging.getLogger(__name__)

# Longer than any backend of ours takes to connect or to give up.
OPENING_TIMEOUT_S = 60.0


class BackendOpening(Attempt[HiCacheStorage]):
    """One attempt, at work once it is made; see the module docstring."""

    def __init__(
        self,
        name: str,
        make: Callable[[], HiCacheStorage],
        timeout_s: float = OPENING_TIMEOUT_S,
    ) -> None:
        super().__init__(
            f"open-{name}",
            functools.partial(_make, name, make),
            functools.partial(_begin_closing, name),
            timeout_s=timeout_s,
            late=f"{name} has not answered for {timeout_s:g} s",
        )


def _make(name: str, make: Callable[[], HiCacheStorage]) -> HiCacheStorage:
    """Make the backend. An error that would end the thread without a word fails the attempt."""
    try:
        return make()
    except Exception:
        raise
    except BaseException as error:  # noqa: BLE001 - the user's class may raise SystemExit
        raise StorageError(f"{name} could not be made: {error!r}") from error


def _begin_closing(name: str, backend: HiCacheStorage) -> None:
    """Close a backend in a thread: its last words may take long."""

    def close() -> None:
        try:
            backend.close()
        except Exception as error:  # noqa: BLE001 - a backend's last words change nothing
            logger.warning("Closing storage backend %s failed: %r", name, error)

    threading.Thread(target=close, name=f"close-{name}", daemon=True).start()
