"""How many bytes a folder of pages may hold, agreed on by every process that writes to it.

Owns the lock file, the count of used bytes, temporary files and eviction. Knows names of files, not
what is in them. Called by the backend's I/O threads; several processes (ranks, servers) may share a
folder.

The rule: under the folder's lock a writer first makes room, then creates its temporary file *at its
full length* and adds that to the count. So what is in flight is in the folder from the first moment
and the sum over the folder never passes the limit, whichever processes write and wherever one of
them is killed. The count lives in the lock file; a process killed between the steps leaves it too
high, never too low, and every scan of the folder (at start, when the limit is met, at intervals)
puts it right. Recency is the modification time, so that it outlives processes and is common to
all; eviction sorts the folder by it.

A temporary file is locked by its writer for as long as it lives: one that can be locked has no
writer any more and is removed, whatever process numbers or containers are involved.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sglang.srt.mem_cache.storage.page_file import TEMP_PREFIX, TEMP_SUFFIX, parse_file_name

logger = logging.getLogger(__name__)

LOCK_NAME = ".hicache.lock"
LOCK_TIMEOUT_S = 5.0
_RESCAN_INTERVAL_S = 600.0
# A scan may cost this share of the time at most.
_RESCAN_SHARE = 0.01
_LEDGER = struct.Struct("<8sQd")  # magic, used bytes, time of the last scan (unix, s)
_LEDGER_MAGIC = b"HSQUOTA1"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """``max_bytes``: of all pages of the folder together, None: no limit. When it is met, the
    oldest go until ``eviction_ratio * max_bytes`` is left. ``min_free_bytes``: left to others on
    the file system."""

    max_bytes: int | None
    eviction_ratio: float = 0.9
    min_free_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Room for one file; ends in exactly one ``commit`` or ``abort``. ``fd``: open for writing."""

    path: str
    fd: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderScan:
    """Pages as (modification time ns, size, path), and the bytes of temporary files."""

    pages: list[tuple[int, int, str]]
    temp_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes of all of it."""
        return self.temp_bytes + sum(size for _, size, _ in self.pages)


def scan_folder(folder: str) -> FolderScan:
    """Look at every page and temporary file once. Raises OSError for an unreadable folder."""
    pages: list[tuple[int, int, str]] = []
    temp_bytes = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            is_temp = is_temporary(entry.name)
            if not is_temp and parse_file_name(entry.name) is None:
                continue
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # gone since the listing
            if stat.S_ISDIR(info.st_mode):
                continue  # nobody's page, whatever its name
            if is_temp:
                temp_bytes += info.st_size
            else:
                pages.append((info.st_mtime_ns, info.st_size, entry.path))
    return FolderScan(pages=pages, temp_bytes=temp_bytes)


def is_temporary(name: str) -> bool:
    """Whether the name is that of a page that is being written."""
    return name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX)


class FolderQuota:
    """Room in one folder. All methods: any thread; each takes the folder's lock for a short time.

    Methods raise OSError (also ``TimeoutError`` when another process keeps the lock); the count is
    then too high at worst.
    """

    def __init__(self, folder: Path, limits: QuotaLimits) -> None:
        self.folder = str(folder)
        self.limits = limits
        self.num_evicted = 0
        self.num_strays_removed = 0
        self.last_used_bytes = 0  # as of the last visit, for reports
        self._lock_path = os.path.join(self.folder, LOCK_NAME)
        self._thread_lock = threading.Lock()
        self._lock_fd: int | None = None
        self._scan_seconds = 0.0
        # Deleted folders are made anew, but never on the disk below a mount that has gone.
        self._device = os.stat(self.folder).st_dev

    def start(self) -> int:
        """Remove temporaries whose writers are dead and count the folder; return how many."""
        with self._locked():
            before = self.num_strays_removed
            self._rescan()
            return self.num_strays_removed - before

    def obstacle(self, size: int) -> str | None:
        """Say why a file of ``size`` bytes has no room, even if all pages go; None when it has."""
        limits = self.limits
        if limits.max_bytes is not None and size > limits.max_bytes:
            return f"max_size of {limits.max_bytes} bytes is less than one page, {size} bytes"
        disk = os.statvfs(self.folder)
        whole, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        if limits.min_free_bytes + size > whole:
            return (
                f"min_free_space of {limits.min_free_bytes} bytes leaves nothing of a disk of "
                f"{whole} bytes"
            )
        if limits.min_free_bytes + size > free + self.last_used_bytes:
            return (
                f"{free} bytes of the disk are free and pages use {self.last_used_bytes}; "
                f"min_free_space keeps {limits.min_free_bytes} free"
            )
        return None

    def reserve(self, size: int) -> Reservation | None:
        """Make room for ``size`` bytes and create the file they go to; None when there is none."""
        with self._locked():
            used, scanned_at = self._read_ledger()
            interval = max(_RESCAN_INTERVAL_S, self._scan_seconds / _RESCAN_SHARE)
            if not 0 <= time.time() - scanned_at < interval:
                used = self._rescan().used_bytes
            if self._excess(used, size) > 0 and not self._make_room(size):
                return None
            used, scanned_at = self._read_ledger()
            path = os.path.join(self.folder, f"{TEMP_PREFIX}{secrets.token_hex(8)}{TEMP_SUFFIX}")
            # Counted before it is there: a process killed in between leaves the count too high.
            self._write_ledger(used + size, scanned_at)
            try:
                fd = _create_locked(path, size)
            except OSError:
                self._write_ledger(used, scanned_at)
                raise
            return Reservation(path=path, fd=fd, size=size)

    def commit(self, reservation: Reservation, path: str) -> None:
        """Publish a written file under its name, in the place of an older one."""
        try:
            with self._locked():
                replaced = _size_of(path)
                os.rename(reservation.path, path)
                if replaced:
                    self._add(-replaced)
        except OSError:
            self.abort(reservation)
            raise
        os.close(reservation.fd)

    def abort(self, reservation: Reservation) -> None:
        """Give the room back."""
        try:
            with self._locked():
                os.unlink(reservation.path)
                self._add(-reservation.size)
        except OSError as error:
            # Unlocked by the close below: the next start of any process takes it away.
            logger.debug("left %s behind: %s", reservation.path, error)
        finally:
            os.close(reservation.fd)

    def remove(self, path: str, inode: int) -> bool:
        """Delete a file if it still has this inode; False when it is another or gone."""
        with self._locked():
            try:
                info = os.lstat(path)
                if info.st_ino != inode:
                    return False
                os.unlink(path)
            except FileNotFoundError:
                return False
            self._add(-info.st_size)
            return True

    def remove_all(self, is_ours: Callable[[str], bool]) -> int:
        """Delete the pages whose file names are ours; return how many. Goes on past failures and
        raises the first of them at the end."""
        failure: OSError | None = None
        num_removed = 0
        with self._locked():
            for _, _, path in scan_folder(self.folder).pages:
                if not is_ours(os.path.basename(path)):
                    continue
                try:
                    os.unlink(path)
                    num_removed += 1
                except FileNotFoundError:
                    continue
                except OSError as error:
                    failure = failure or error
            self._rescan()
        if failure is not None:
            raise failure
        return num_removed

    def close(self) -> None:
        """Give the lock file back; idempotent."""
        with self._thread_lock:
            self._close_lock()

    # -- under the lock --

    def _excess(self, used: int, size: int) -> int:
        """Bytes that must go before ``size`` more fit (<= 0: none)."""
        excess = -1
        if self.limits.max_bytes is not None:
            excess = used + size - self.limits.max_bytes
        disk = os.statvfs(self.folder)
        missing = size + self.limits.min_free_bytes - disk.f_bavail * disk.f_frsize
        return max(excess, missing)

    def _make_room(self, size: int) -> bool:
        """Evict for ``size`` more bytes, generously so that it is rare; whether they fit now."""
        limit = self.limits.max_bytes
        if limit is not None and size > limit:
            return False
        scan = self._rescan()
        excess = self._excess(scan.used_bytes, size)
        if excess <= 0:
            return True  # files were deleted behind our back
        keep = scan.used_bytes - excess
        if limit is not None and scan.used_bytes + size > limit:
            keep = min(keep, int(limit * self.limits.eviction_ratio) - size)
        failure = self._evict(scan, max(keep, 0))
        has_room = self._excess(self._read_ledger()[0], size) <= 0
        if failure is not None and not has_room:
            raise failure
        return has_room

    def _evict(self, scan: FolderScan, keep_bytes: int) -> OSError | None:
        """Delete the oldest; return the first failure. A page that cannot be deleted (another
        user's, an immutable file) must not keep the others from it."""
        used, failure = scan.used_bytes, None
        for _, size, path in sorted(scan.pages):
            if used <= keep_bytes:
                break
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                failure = failure or error
                continue
            used -= size
            self.num_evicted += 1
        self._write_ledger(used, self._read_ledger()[1])
        return failure

    def _rescan(self) -> FolderScan:
        started = time.monotonic()
        strays = sum(_remove_if_dead(path) for path in self._temporaries())
        if strays:
            self.num_strays_removed += strays
            logger.info("%s: removed %d unfinished files of dead writers", self.folder, strays)
        scan = scan_folder(self.folder)
        self._scan_seconds = time.monotonic() - started
        self._write_ledger(scan.used_bytes, time.time())
        return scan

    def _temporaries(self) -> list[str]:
        with os.scandir(self.folder) as entries:
            return [entry.path for entry in entries if is_temporary(entry.name)]

    def _add(self, delta: int) -> None:
        used, scanned_at = self._read_ledger()
        self._write_ledger(used + delta, scanned_at)

    def _read_ledger(self) -> tuple[int, float]:
        """(used bytes, time of the last scan); a ledger that does not parse asks for a scan."""
        assert self._lock_fd is not None
        data = os.pread(self._lock_fd, _LEDGER.size, 0)
        if len(data) != _LEDGER.size:
            return 0, 0.0
        magic, used, scanned_at = _LEDGER.unpack(data)
        return (used, scanned_at) if magic == _LEDGER_MAGIC else (0, 0.0)

    def _write_ledger(self, used: int, scanned_at: float) -> None:
        assert self._lock_fd is not None
        self.last_used_bytes = max(used, 0)
        os.pwrite(self._lock_fd, _LEDGER.pack(_LEDGER_MAGIC, self.last_used_bytes, scanned_at), 0)

    # -- the lock --

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        if not self._thread_lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise TimeoutError(errno.ETIMEDOUT, "lock kept by another thread", self._lock_path)
        try:
            fd = self._acquire(deadline)
            is_well = False
            try:
                yield
                is_well = True
            finally:
                self._unlock(fd, keeps_file=is_well)
        finally:
            self._thread_lock.release()

    def _unlock(self, fd: int, *, keeps_file: bool) -> None:
        """End the lock. A failure may be the lock file's own: then it is opened anew next time,
        since on a file system that was mounted again what was open before is stale for good."""
        if keeps_file:
            try:
                fcntl.flock(fd, fcntl.LOCK_UN)
                return
            except OSError as error:
                logger.debug("%s: %s", self._lock_path, error)
        self._close_lock()  # ends the lock, too

    def _acquire(self, deadline: float) -> int:
        """Lock the file that is in the folder now: it may have been deleted and made anew."""
        pause_s = 0.0005
        while True:
            fd = self._lock_fd if self._lock_fd is not None else self._open_lock()
            self._lock_fd = fd
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same_file(fd, self._lock_path):
                    return fd
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        errno.ETIMEDOUT, "lock kept by another process", self._lock_path
                    ) from None
                # A blocking flock could never be given up: a stopped process would stop us.
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.02)
                continue
            except OSError:
                self._close_lock()  # see `_unlock`
                raise
            self._close_lock()

    def _close_lock(self) -> None:
        if self._lock_fd is not None:
            with suppress(OSError):  # it is closed all the same
                os.close(self._lock_fd)
            self._lock_fd = None

    def _open_lock(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            return os.open(self._lock_path, flags, 0o666)
        except FileNotFoundError:
            parent = os.path.dirname(self.folder)
            if os.stat(parent).st_dev != self._device:
                raise
            os.makedirs(self.folder, exist_ok=True)
            logger.warning("%s had been deleted; made anew", self.folder)
            return os.open(self._lock_path, flags, 0o666)


def _create_locked(path: str, size: int) -> int:
    """Create a temporary file at its full length, locked by this process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def _size_of(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0


def _is_same_file(fd: int, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _remove_if_dead(path: str) -> bool:
    """Remove a temporary file that no living process is writing."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False  # gone, or another user's
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
