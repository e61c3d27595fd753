"""The file backend under a server while its folder is full, gone, in the way, or damaged.

Requests go on as without storage, nothing stays pinned, and when the folder is back it is used.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.mem_cache.hicache_storage import HiCacheFile
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.page_writer import faults_of
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=15, suite="hicache")

FULL = 128


def prompt(number: int) -> list[int]:
    return [3 + (number * 37 + 7 * i + i * i // 9) % 190 for i in range(FULL + 2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    with ServedScheduler(model, "--max-total-tokens", 512) as served:
        return [served.answer(prompt(number), 4).tokens for number in range(8)]


def serve(model: Path, folder: Path, **options: object) -> ServedScheduler:
    config = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": 8, **options})
    return ServedScheduler(
        model,
        *("--max-total-tokens", 512, "--page-size", 8),
        *("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", config),
    )


def ask_all(served: ServedScheduler, expected: list[list[int]]) -> int:
    """Every prompt, and an empty cache afterwards; tokens that came from storage."""
    from_storage = 0
    for number, tokens in enumerate(expected):
        answer = served.answer(prompt(number), 4)
        assert answer.tokens == tokens
        from_storage += answer.sources.get("storage", 0)
    served.flush()
    pool = served.tree.cache_controller.mem_pool_host
    assert pool.available_size() == pool.size
    return from_storage


def stats(served: ServedScheduler) -> dict[str, float]:
    store = served.tree.cache_controller.storage_backend
    assert isinstance(store, HiCacheFile)
    return store.get_stats()


def test_a_folder_that_vanishes_and_comes_back(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    folder, away = tmp_path / "l3", tmp_path / "away"
    with serve(model, folder) as served:
        ask_all(served, expected)
        assert ask_all(served, expected) == FULL * len(expected)
        folder.rename(away)
        assert ask_all(served, expected) == 0
        assert ask_all(served, expected) == FULL * len(expected)  # it has made a new one
        shutil.rmtree(folder)
        folder.write_text("something else is here")
        assert ask_all(served, expected) == 0
        folder.unlink()
        away.rename(folder)
        assert ask_all(served, expected) == FULL * len(expected)
        shutil.rmtree(folder)
        ask_all(served, expected)
        assert ask_all(served, expected) == FULL * len(expected)


def test_what_is_queued_at_the_end_is_written(
    model: Path, expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = HiCacheFile._write

    def write_slowly(*arguments: Any) -> bool:
        time.sleep(0.004)
        return write(*arguments)

    monkeypatch.setattr(HiCacheFile, "_write", write_slowly)
    with serve(model, tmp_path) as served:
        for number, tokens in enumerate(expected):
            assert served.answer(prompt(number), 4).tokens == tokens
        assert served.tree.has_pending_transfers()
    with serve(model, tmp_path) as served:
        assert ask_all(served, expected) == FULL * len(expected)


def test_no_room_left(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    with serve(model, tmp_path, min_free_space="1000TB") as served:
        assert ask_all(served, expected) == 0
        assert ask_all(served, expected) == 0
        assert stats(served)["dropped"] > 0
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".bin")]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for a few pages."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a file system needs rights that this user lacks")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(model: Path, expected: list[list[int]], small_disk: Path) -> None:
    with serve(model, small_disk, min_free_space=0, max_size=0) as served:
        ask_all(served, expected)
        ask_all(served, expected)
        (small_disk / "other").write_bytes(b"")
        counts = stats(served)
        assert counts["io_errors"] + counts["dropped"] > 0
        served.control_clear()
        ask_all(served, expected[:2])
        assert ask_all(served, expected[:2]) == 2 * FULL  # there is room again
    assert faults_of(small_disk, 256 * 1024) == []


def test_the_quota_is_kept_and_what_is_left_is_whole(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    limit = 200_000
    with serve(model, tmp_path, max_size=limit) as served:
        for _ in range(3):
            ask_all(served, expected)
        assert stats(served)["evicted"] > 0
    assert faults_of(tmp_path, limit) == []


def test_damaged_files_are_misses_and_heal(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    with serve(model, tmp_path) as served:
        ask_all(served, expected)
        pages = sorted(tmp_path.glob("*.bin"))
        for number, page in enumerate(pages):
            data = bytearray(page.read_bytes())
            if number % 4 == 0:
                page.write_bytes(data[:10])
            elif number % 4 == 1:
                data[len(data) // 2 :] = b"\x41" * (len(data) - len(data) // 2)
                page.write_bytes(data)
            elif number % 4 == 2:
                page.write_bytes(bytes(len(data)))
        assert ask_all(served, expected) < FULL * len(expected)
        assert stats(served)["corrupt"] + stats(served)["foreign"] > 0
        # A page whose bytes are wrong is found when it is read: one of a prompt at a time.
        passes = [ask_all(served, expected) for _ in range(6)]
        assert passes[-1] == FULL * len(expected), passes
