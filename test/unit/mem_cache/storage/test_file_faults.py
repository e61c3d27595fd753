"""Broken folders: full, read-only, gone and back, cleared by two at once. Serving goes on."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.mem_cache.storage.folder_quota import is_temporary
from sglang.test.fakes.host_pages import get, make_file_store, make_host_pool, page_hash, put

PAGE = 512 + 512


def in_child(check: Callable[[], bool], prepare: Callable[[], None]) -> bool:
    """Run ``check`` in a forked child that ``prepare`` has changed for good."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            prepare()
            status = 0 if check() else 2
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def temporaries(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if is_temporary(name)]


def test_a_file_size_limit_drops_writes_and_leaves_nothing(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, read_threads=1, write_threads=1)
    put(store, pool, [1])

    def check() -> bool:
        dropped = put(store, pool, [1, 2, 3]) == [True, False, False]
        return dropped and store.get_stats()["dropped"] == 2 and not temporaries(tmp_path)

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (PAGE // 2, PAGE // 2))

    assert in_child(check, prepare)
    assert put(store, pool, [2]) == [True]
    assert get(store, pool, [1, 2]) == [True, True]
    store.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "hicache-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_evicts_our_pages_or_drops_writes(small_disk: Path) -> None:
    pool = make_host_pool(page_size=64)  # files of 8.5 KiB, 12 KiB on the disk
    folder = small_disk / "cache"
    store = make_file_store(folder, pool)
    for seed in range(12):
        assert put(store, pool, [seed]) == [True], seed
        assert get(store, pool, [seed]) == [True]
    assert store.get_stats()["evicted"] > 0
    (small_disk / "others").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    for path in folder.glob("*.bin"):
        path.unlink()
    with open(small_disk / "others", "ab", buffering=0) as others, pytest.raises(OSError):
        while True:
            others.write(bytes(4096))
    assert put(store, pool, [50]) == [False]
    assert get(store, pool, [50]) == [False]
    assert store.get_stats()["dropped"] == 1
    assert not temporaries(folder)
    (small_disk / "others").unlink()
    assert put(store, pool, [50]) == [True]
    assert get(store, pool, [50]) == [True]
    store.close()


def test_an_error_of_the_disk_while_writing_gives_the_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, max_size=4 * PAGE)
    real = os.pwritev

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset:
            raise OSError(errno.ENOSPC, "no space")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", broken)
    for _ in range(5):
        assert put(store, pool, [1, 2]) == [False, False]
    assert not temporaries(tmp_path)
    monkeypatch.setattr(os, "pwritev", real)
    assert store.get_stats()["used_bytes"] == 0
    assert put(store, pool, [1, 2]) == [True, True]
    store.close()


def test_errors_while_reading_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, [1])
    real = os.preadv

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    assert get(store, pool, [1]) == [False]
    assert store.get_stats()["io_errors"] == 1
    monkeypatch.setattr(os, "preadv", real)
    assert get(store, pool, [1]) == [True]  # an error of the disk says nothing about the page
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_an_unwritable_folder_is_read_only(tmp_path: Path) -> None:
    pool = make_host_pool()
    folder = Path(tempfile.gettempdir()) / f"hicache-test-{os.getpid()}"
    try:
        store = make_file_store(folder, pool)
        put(store, pool, [1])
        store.close()
        folder.chmod(0o755)

        def check() -> bool:
            store = make_file_store(folder, pool, read_threads=1, write_threads=1)
            results = [
                get(store, pool, [1]) == [True],
                put(store, pool, [1, 2]) == [True, False],
                store.get_stats()["dropped"] == 1,
                store.clear() is False,
                store.batch_exists([page_hash(1), page_hash(2)]) == 1,
            ]
            store.close()
            return all(results)

        assert in_child(check, lambda: os.setuid(65534))
        assert in_child(check, lambda: None) is False  # root may write: the check can fail
    finally:
        shutil.rmtree(folder)


def test_a_folder_that_vanishes_with_its_parent_and_returns(tmp_path: Path) -> None:
    pool = make_host_pool()
    parent = tmp_path / "mount"
    store = make_file_store(parent / "cache", pool)
    put(store, pool, range(3))
    parent.rename(tmp_path / "away")
    assert store.batch_exists([page_hash(0)]) == 0
    assert get(store, pool, range(3)) == [False] * 3
    assert put(store, pool, [5]) == [False]
    assert store.clear() is False
    assert not parent.exists()
    (tmp_path / "away").rename(parent)
    assert get(store, pool, range(3)) == [True] * 3
    assert put(store, pool, [5]) == [True]
    store.close()


def test_a_deleted_folder_is_made_anew(tmp_path: Path) -> None:
    pool = make_host_pool()
    folder = tmp_path / "cache"
    stores = [make_file_store(folder, pool, max_size=4 * PAGE) for _ in range(2)]
    put(stores[0], pool, range(4))
    shutil.rmtree(folder)
    assert get(stores[0], pool, range(4)) == [False] * 4
    # Both find the one new lock: the limit holds for the two together.
    for round_ in range(4):
        for number, store in enumerate(stores):
            assert put(store, pool, [100 * number + round_]) == [True]
            assert sum(path.stat().st_size for path in folder.glob("*.bin")) <= 4 * PAGE
    for store in stores:
        store.close()


def test_two_processes_clear_at_once(tmp_path: Path) -> None:
    pool = make_host_pool()
    ours, theirs = make_file_store(tmp_path, pool), make_file_store(tmp_path, pool, "other")
    for start in range(0, 160, 16):
        put(ours, pool, range(start, start + 16))
    put(theirs, pool, range(3))
    read_end, write_end = os.pipe()
    results: list[bool] = []

    def wait_for_the_other() -> None:
        os.read(read_end, 1)

    def clear_in_child() -> None:
        results.append(in_child(ours.clear, wait_for_the_other))

    threads = [threading.Thread(target=clear_in_child) for _ in range(2)]
    for thread in threads:
        thread.start()
    os.write(write_end, b"go")
    for thread in threads:
        thread.join()
    assert results == [True, True]
    assert ours.batch_exists([page_hash(0)]) == 0
    assert get(theirs, pool, range(3)) == [True] * 3
    assert len(list(tmp_path.glob("*.bin"))) == 3
    ours.close()
    theirs.close()


def test_clear_tells_when_a_page_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, range(3))
    real = os.unlink

    def stubborn(path: str) -> None:
        if page_hash(1) in path:
            raise PermissionError(errno.EPERM, "not permitted", path)
        real(path)

    monkeypatch.setattr(os, "unlink", stubborn)
    assert store.clear() is False
    monkeypatch.setattr(os, "unlink", real)
    assert [path.name[:64] for path in tmp_path.glob("*.bin")] == [page_hash(1)]
    assert store.clear() is True
    assert store.get_stats()["used_bytes"] == 0
    store.close()


def test_a_directory_in_the_place_of_a_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, max_size=8 * PAGE, write_threads=1)
    put(store, pool, [1])
    (page,) = tmp_path.glob("*.bin")
    page.unlink()
    page.mkdir()
    assert get(store, pool, [1]) == [False]  # an empty one goes
    assert not page.exists() and store.num_damaged_pages() == 1
    page.mkdir()
    assert put(store, pool, [1]) == [True]
    assert get(store, pool, [1]) == [True]
    page.unlink()
    page.mkdir()
    (page / "something").write_text("of somebody's")
    caplog.clear()
    for _ in range(3):
        assert put(store, pool, [1, 2]) == [False, False]
        assert get(store, pool, [1]) == [False]
    (message,) = caplog.messages
    assert message.startswith(f"{page} is a directory in the place of a page")
    for seed in range(2, 20):  # it does not stand in the way of eviction
        assert put(store, pool, [seed]) == [True], seed
    assert (page / "something").exists() and not temporaries(tmp_path)
    (page / "something").unlink()
    assert put(store, pool, [1]) == [True]
    assert get(store, pool, [1]) == [True]
    store.close()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_size": PAGE - 1}, "max_size of 1023 bytes is less than one page, 1024 bytes"),
        ({"min_free_space": "1000TB"}, "leaves nothing of a disk"),
    ],
)
def test_limits_that_let_nothing_be_written_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], told: str
) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, **options)
    (message,) = caplog.messages
    assert message.startswith(f"no page of kv can be written to {tmp_path}: ") and told in message
    assert put(store, pool, [1]) == [False]
    assert told in caplog.messages[1] and "no room" in caplog.messages[1]
    store.close()


def test_a_limit_below_what_is_used_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, [1, 2, 3])
    store.close()
    assert not caplog.messages
    make_file_store(tmp_path, pool, max_size=2 * PAGE).close()
    (message,) = caplog.messages
    assert message.startswith(f"max_size of {2 * PAGE} bytes is less than the {3 * PAGE} that")


def test_damage_is_counted_and_warnings_say_how_much_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    seeds = [1, 2, 3]
    put(store, pool, seeds)
    for path in tmp_path.glob("*.bin"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    for seed in seeds:
        assert get(store, pool, [seed]) == [False]
    assert store.num_damaged_pages() == 3
    assert len(caplog.messages) == 1 and "is damaged" in caplog.messages[0]
    store._log.interval_s = 0
    put(store, pool, [1])
    (path,) = tmp_path.glob("*.bin")
    path.write_bytes(b"")
    assert get(store, pool, [1]) == [False]
    assert caplog.messages[1].endswith("(and 2 times more since this was last said)")
    store._log.interval_s = 60
    put(store, pool, [1])
    path.write_bytes(b"")
    assert get(store, pool, [1]) == [False]
    store.close()
    assert caplog.messages[2:] == ["1 more warnings of the kind 'discard' were not shown"]


def test_a_damaged_page_that_cannot_be_removed_counts_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder whose files are immutable."""
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, [1])
    (page,) = tmp_path.glob("*.bin")
    page.write_bytes(page.read_bytes()[:-1] + b"?")
    with monkeypatch.context() as patch:

        def refuse(path: str, inode: int) -> bool:
            raise PermissionError(errno.EPERM, "Operation not permitted", path)

        patch.setattr(store._quota, "remove", refuse)
        for _ in range(3):
            assert get(store, pool, [1]) == [False]
    assert store.num_damaged_pages() == 1
    assert "cannot be removed (Operation not permitted)" in caplog.text
    assert ": removed" not in caplog.text
    assert get(store, pool, [1]) == [False]
    assert put(store, pool, [1]) == [True] and get(store, pool, [1]) == [True]
    store.close()
