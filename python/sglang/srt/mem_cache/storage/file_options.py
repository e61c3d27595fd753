"""Options of the file backend: the environment before the extra config before the default.

Owns their names, types and defaults. Called once when the backend is made.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang.srt.environ import EnvVar, envs, parse_bytes
from sglang.srt.mem_cache.storage.backend_options import shown
from sglang.srt.mem_cache.storage.folder_quota import QuotaLimits, scan_folder

logger = logging.getLogger(__name__)

_DEFAULT_MAX_BYTES = 64 * 10**9
_DEFAULT_ROOM_SHARE = 0.1  # of what is free or already ours at the start
_DEFAULT_EVICTION_RATIO = 0.9
_DEFAULT_MIN_FREE_BYTES = 1 << 30
_DEFAULT_MIN_FREE_SHARE = 0.05  # of the whole file system
_MAX_THREADS = 64
_MOST_BYTES = (1 << 63) - 1

OPTION_NAMES = frozenset(
    {
        "file_storage_path",
        "max_size",
        "eviction_ratio",
        "min_free_space",
        "read_threads",
        "write_threads",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions:
    """What the user chose, resolved but for what depends on the folder."""

    folder: Path
    max_bytes: int | None  # None: derive from the file system; 0: no limit
    eviction_ratio: float
    min_free_bytes: int | None  # None: derive from the file system
    read_threads: int
    write_threads: int

    def limits(self) -> QuotaLimits:
        """Return the limits for the folder, which must exist. Raises OSError."""
        disk = os.statvfs(self.folder)
        max_bytes = self.max_bytes
        if max_bytes is None:
            # What the folder holds counts as room, or each restart would shrink the limit.
            room = disk.f_bavail * disk.f_frsize + scan_folder(str(self.folder)).used_bytes
            max_bytes = min(_DEFAULT_MAX_BYTES, int(room * _DEFAULT_ROOM_SHARE))
        min_free = self.min_free_bytes
        if min_free is None:
            whole = disk.f_blocks * disk.f_frsize
            min_free = min(_DEFAULT_MIN_FREE_BYTES, int(whole * _DEFAULT_MIN_FREE_SHARE))
        return QuotaLimits(
            max_bytes=max_bytes or None,
            eviction_ratio=self.eviction_ratio,
            min_free_bytes=min_free,
        )


def file_options(extra: Mapping[str, Any]) -> FileOptions:
    """Resolve the options. Raises ValueError naming the key, or EnvValueError."""
    unknown = sorted(set(extra) - OPTION_NAMES)
    if unknown:
        raise ValueError(
            f"the file backend knows no option {', '.join(map(repr, unknown))}; "
            f"it takes {', '.join(sorted(OPTION_NAMES))}"
        )
    given = extra.get("file_storage_path")
    folder = envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.get() or given
    if folder is None:
        folder = os.path.join(tempfile.gettempdir(), "hicache")
    if not isinstance(folder, str) or not folder:
        raise ValueError(f"file_storage_path must be a path, not {folder!r}")
    if isinstance(given, str) and Path(given).absolute() != Path(folder).absolute():
        logger.warning(
            "Pages go to %s, as SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR says; file_storage_path %s "
            "of the extra config is not used",
            folder,
            given,
        )
    ratio = envs.SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO.get()
    if ratio is None:
        ratio = extra.get("eviction_ratio", _DEFAULT_EVICTION_RATIO)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ValueError(f"eviction_ratio must be a number in (0, 1], not {shown(ratio)}")
    cpus = len(os.sched_getaffinity(0))
    return FileOptions(
        folder=Path(folder).absolute(),
        max_bytes=_size(envs.SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE, extra, "max_size"),
        eviction_ratio=float(ratio),
        min_free_bytes=_size(
            envs.SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE, extra, "min_free_space"
        ),
        read_threads=_threads(extra, "read_threads", min(8, cpus)),
        write_threads=_threads(extra, "write_threads", min(4, cpus)),
    )


def _size(variable: EnvVar[int | None], extra: Mapping[str, Any], key: str) -> int | None:
    size = variable.get()
    if size is not None:
        return size
    value = extra.get(key)
    try:
        size = parse_bytes(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"{key}={shown(value)} is not valid: {error}") from error
    if size is None or (type(size) is int and 0 <= size <= _MOST_BYTES):
        return size
    raise ValueError(f"{key} must be bytes or a text such as '64GB', not {shown(value)}")


def _threads(extra: Mapping[str, Any], key: str, default: int) -> int:
    value = extra.get(key, default)
    if type(value) is not int or not 1 <= value <= _MAX_THREADS:
        raise ValueError(f"{key} must be an integer from 1 to {_MAX_THREADS}, not {shown(value)}")
    return value
