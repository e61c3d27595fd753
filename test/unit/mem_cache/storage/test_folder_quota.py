"""Room in a folder: never more than the limit, whoever writes and whoever is killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang.srt.mem_cache.storage import folder_quota
from sglang.srt.mem_cache.storage.folder_quota import (
    LOCK_NAME,
    FolderQuota,
    QuotaLimits,
    is_temporary,
    scan_folder,
)
from sglang.test.fakes.host_pages import get, make_file_store, make_host_pool, page_hash, put
from sglang.test.fakes.page_writer import write_one

ROOT = Path(__file__).resolve().parents[4]
PAGE = 512 + 512  # file of one page of make_host_pool()


def run_writers(*arguments: str) -> dict[str, object]:
    result = subprocess.run(
        [sys.executable, "-m", "sglang.test.fakes.page_writer", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stdout, result.stderr
    return json.loads(result.stdout)


def test_two_processes_never_pass_the_limit_together(tmp_path: Path) -> None:
    result = run_writers("quota", str(tmp_path), "--pages", "200")
    assert result["faults"] == []
    assert 0.5 * result["limit"] < result["greatest"] <= result["limit"]  # type: ignore[operator]


def test_the_check_sees_writers_that_ignore_the_limit(tmp_path: Path) -> None:
    result = run_writers("quota", str(tmp_path), "--pages", "150", "--disobey")
    assert any("the limit is" in fault for fault in result["faults"])  # type: ignore[attr-defined]


def test_killed_writers_leave_only_whole_pages(tmp_path: Path) -> None:
    result = run_writers("kill", str(tmp_path), "--cycles", "20")
    assert result["faults"] == []
    assert result["pages"] > 0  # type: ignore[operator]


def names_left(folder: Path, seeds: Sequence[int]) -> list[int]:
    there = {path.name[:64] for path in folder.glob("*.bin")}
    return [seed for seed in seeds if page_hash(seed) in there]


def test_the_least_recently_used_go_first_and_hits_count_after_a_restart(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, max_size=10 * PAGE, eviction_ratio=0.8)
    for seed in range(10):
        put(store, pool, [seed])
        path = next(tmp_path.glob(f"{page_hash(seed)}*"))
        os.utime(path, (seed, seed))
    get(store, pool, [1])
    store.close()
    store = make_file_store(tmp_path, pool, max_size=10 * PAGE, eviction_ratio=0.8)
    assert put(store, pool, [10]) == [True]
    # Down to 8 pages, the new one included.
    assert names_left(tmp_path, range(11)) == [1, 4, 5, 6, 7, 8, 9, 10]
    stats = store.get_stats()
    assert (stats["evicted"], stats["used_bytes"]) == (3, 8 * PAGE)
    store.close()


def test_tails_of_a_prefix_go_before_its_head(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, max_size=8 * PAGE, eviction_ratio=0.75)
    put(store, pool, range(8))
    put(store, pool, [99])
    assert names_left(tmp_path, range(8)) == [0, 1, 2, 3, 4]
    store.close()


def test_eviction_covers_the_whole_folder_and_nothing_else(tmp_path: Path) -> None:
    pool = make_host_pool()
    (tmp_path / "notes.txt").write_text("x" * 100_000)
    other = make_file_store(tmp_path, pool, model_name="old")
    put(other, pool, range(4))
    ours = make_file_store(tmp_path, pool, max_size=4 * PAGE)
    assert put(ours, pool, range(10, 13)) == [True] * 3
    assert other.batch_exists([page_hash(0)]) in (0, 1)
    assert len(list(tmp_path.glob("*.bin"))) <= 4
    assert (tmp_path / "notes.txt").exists()
    ours.close()
    other.close()


def test_a_page_beyond_the_limit_is_dropped_and_evicts_nothing(tmp_path: Path) -> None:
    small, large = make_host_pool(), make_host_pool(page_size=64)
    store = make_file_store(tmp_path, small, max_size=3 * PAGE)
    put(store, small, range(3))
    big = make_file_store(tmp_path, large, max_size=3 * PAGE)
    assert put(big, large, [50, 51]) == [False, False]
    assert big.get_stats()["dropped"] == 2
    assert names_left(tmp_path, range(3)) == [0, 1, 2]
    store.close()
    big.close()


def test_what_is_being_written_is_counted_and_is_not_evicted(tmp_path: Path) -> None:
    quota = FolderQuota(tmp_path, QuotaLimits(max_bytes=10_000))
    pending = quota.reserve(6_000)
    assert pending is not None
    assert quota.reserve(6_000) is None
    assert scan_folder(str(tmp_path)).used_bytes == 6_000
    assert quota.start() == 0  # a living writer's file stays
    assert write_one(quota, 1, bytes(1_000))
    quota.commit(pending, str(tmp_path / ("cd" * 32 + "_m.bin")))
    assert quota.last_used_bytes == scan_folder(str(tmp_path)).used_bytes == 6_000 + 1_512
    pending = quota.reserve(2_000)
    assert pending is not None
    quota.abort(pending)
    assert quota.last_used_bytes == 7_512
    quota.close()


def test_files_of_dead_writers_are_removed_at_start(tmp_path: Path) -> None:
    for name in (".hicache-0123.tmp", ".hicache-4567.tmp"):
        (tmp_path / name).write_bytes(bytes(100))
    with open(tmp_path / ".hicache-4567.tmp", "rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        make_file_store(tmp_path).close()
        assert [n for n in os.listdir(tmp_path) if is_temporary(n)] == [".hicache-4567.tmp"]
    make_file_store(tmp_path).close()
    assert not [name for name in os.listdir(tmp_path) if is_temporary(name)]


def test_a_count_that_is_wrong_or_unreadable_is_put_right(tmp_path: Path) -> None:
    quota = FolderQuota(tmp_path, QuotaLimits(max_bytes=10_000))
    assert write_one(quota, 1, bytes(1_000))
    for content in (b"", b"nonsense" * 10):
        (tmp_path / LOCK_NAME).write_bytes(content)
        assert write_one(quota, 2, bytes(1_000))
        assert quota.last_used_bytes == scan_folder(str(tmp_path)).used_bytes
    for path in tmp_path.glob("*.bin"):
        path.unlink()
    assert write_one(quota, 3, bytes(9_000))  # deleted by others: no eviction needed
    assert quota.num_evicted == 0
    quota.close()


def test_room_is_left_for_others_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, min_free_space=0)
    put(store, pool, range(4))
    real = os.statvfs(tmp_path)

    def nearly_full(path: str) -> os.statvfs_result:
        used = scan_folder(str(tmp_path)).used_bytes
        free = max(4 * PAGE + 100 - used, 0)
        return os.statvfs_result((1, 1, real.f_blocks, free, free, *real[5:10]))

    monkeypatch.setattr(folder_quota.os, "statvfs", nearly_full)
    assert put(store, pool, range(10, 12)) == [True, True]
    assert len(list(tmp_path.glob("*.bin"))) == 4
    monkeypatch.setattr(
        folder_quota.os, "statvfs", lambda path: os.statvfs_result((1, 1, 9, 0, 0, *real[5:10]))
    )
    assert put(store, pool, [20]) == [False]
    assert store.get_stats()["dropped"] == 1
    store.close()


def test_a_lock_that_is_kept_drops_the_write_and_not_the_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_quota, "LOCK_TIMEOUT_S", 0.05)
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, [1])
    with open(tmp_path / LOCK_NAME, "rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert put(store, pool, [1, 2]) == [True, False]
        assert get(store, pool, [1]) == [True]
        assert store.clear() is False
    assert put(store, pool, [2]) == [True]
    store.close()


def test_threads_of_one_process_share_the_count(tmp_path: Path) -> None:
    quota = FolderQuota(tmp_path, QuotaLimits(max_bytes=20_000))

    def write(first: int) -> None:
        for name in range(first, first + 30):
            write_one(quota, name, bytes(700))

    threads = [threading.Thread(target=write, args=(first,)) for first in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert quota.last_used_bytes == scan_folder(str(tmp_path)).used_bytes <= 20_000
    quota.close()


def test_a_page_that_cannot_be_deleted_does_not_end_eviction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, max_size=4 * PAGE)
    assert put(store, pool, [0]) == [True]
    (kept,) = map(str, tmp_path.glob("*.bin"))
    unlink = os.unlink

    def refuse(path: str) -> None:
        if str(path) == kept:
            raise PermissionError(errno.EPERM, "another user's", path)
        unlink(path)

    monkeypatch.setattr(folder_quota.os, "unlink", refuse)
    for number in range(1, 9):
        assert put(store, pool, [number]) == [True]
    assert os.path.exists(kept)
    assert scan_folder(str(tmp_path)).used_bytes <= 4 * PAGE
    store.close()


def test_a_lock_file_that_is_stale_is_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = FolderQuota(tmp_path, QuotaLimits(max_bytes=20_000))
    assert write_one(quota, 1, bytes(700))
    lock = tmp_path / LOCK_NAME
    with open(lock, "rb") as before:  # kept, so that its number is not given to another file
        stale = os.fstat(before.fileno()).st_ino
        lock.unlink()
        flock = fcntl.flock

        def as_after_a_mount(fd: int, operation: int) -> None:
            if os.fstat(fd).st_ino == stale:
                raise OSError(errno.ESTALE, "Stale file handle")
            flock(fd, operation)

        monkeypatch.setattr(folder_quota.fcntl, "flock", as_after_a_mount)
        with pytest.raises(OSError, match="Stale"):
            write_one(quota, 2, bytes(700))
        assert write_one(quota, 2, bytes(700))
    quota.close()


def test_a_lock_ends_where_its_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota, other = (FolderQuota(tmp_path, QuotaLimits(max_bytes=20_000)) for _ in range(2))
    assert write_one(quota, 1, bytes(700))
    with monkeypatch.context() as patch:
        patch.setattr(folder_quota, "_is_same_file", _broken)
        with pytest.raises(OSError, match="broken"):
            quota.reserve(10)
    assert write_one(other, 2, bytes(700))
    quota.close()
    other.close()


def _broken(fd: int, path: str) -> bool:
    raise OSError(errno.EIO, "broken")
