"""``HiCacheFile``: what counts as read, healing, sharing a folder, recency, clearing, options."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.environ import envs
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    StorageError,
)
from sglang.srt.mem_cache.page_key import draft_page_key, state_page_key
from sglang.srt.mem_cache.storage import page_file
from sglang.srt.mem_cache.storage.folder_quota import Reservation
from sglang.srt.mem_cache.storage.page_file import HEADER_BYTES
from sglang.test.fakes.host_pages import (
    fill_page,
    get,
    holds,
    make_file_store,
    make_host_pool,
    page_hash,
    put,
    read_page,
    transfer,
)

SUFFIX = "_org-model_0_1.bin"


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages_come_back_byte_for_byte_also_after_a_restart(tmp_path: Path, layout: str) -> None:
    pool = make_host_pool(layout=layout)
    store = make_file_store(tmp_path, pool)
    assert put(store, pool, range(6)) == [True] * 6
    store.close()
    assert {path.name for path in tmp_path.glob("*.bin")} == {
        page_hash(seed) + SUFFIX for seed in range(6)
    }
    again = make_file_store(tmp_path, pool)
    assert again.batch_exists([page_hash(seed) for seed in (*range(6), 99, 0)]) == 6
    assert get(again, pool, range(6)) == [True] * 6
    stats = again.get_stats()
    assert stats["hits"] == 6
    assert stats["bytes_read"] == 6 * pool.bytes_per_page
    again.close()


def test_a_miss_ends_the_reading_of_a_prefix(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, read_threads=1)
    put(store, pool, [0, 1, 3])
    assert get(store, pool, [0, 1, 2, 3]) == [True, True, False, False]
    assert store.get_stats()["misses"] == 1
    store.close()


def test_pools_have_files_of_their_own_and_draft_may_have_holes(tmp_path: Path) -> None:
    target, draft, state = (
        make_host_pool(),
        make_host_pool(layer_num=1),
        make_host_pool(page_size=1),
    )
    store = make_file_store(tmp_path, target)
    store.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    store.register_mem_host_pool_v2(state, PoolName.MAMBA)
    digest = bytes(range(32))
    hashes = [page_hash(seed) for seed in range(3)]
    draft_keys = [draft_page_key(key, digest) for key in hashes]
    for page in range(3):
        fill_page(target, page, f"target {page}")
        fill_page(draft, page, f"draft {page}")
    fill_page(state, 0, "state")
    transfers = [
        transfer(draft, range(3), draft_keys, PoolName.DRAFT),
        transfer(state, [0], [state_page_key(hashes[2])], PoolName.MAMBA),
        transfer(target, range(3), hashes),
    ]
    assert store.batch_set_v2(transfers) == {
        PoolName.DRAFT: [True] * 3,
        PoolName.MAMBA: [True],
        PoolName.KV: [True] * 3,
    }
    names = sorted(path.name for path in tmp_path.glob("*.bin"))
    assert len([name for name in names if f".{PoolName.DRAFT}" in name]) == 3
    assert f"{hashes[2]}.mamba{SUFFIX}" in names
    os.unlink(tmp_path / f"{hashes[1]}.draft_{digest.hex()[:16]}{SUFFIX}")
    for page in range(3):
        fill_page(target, page, "stale")
        fill_page(draft, page, "stale")
    found = store.batch_get_v2(transfers)
    assert found[PoolName.DRAFT] == [True, False, True]
    assert found[PoolName.KV] == [True] * 3
    assert all(holds(target, page, f"target {page}") for page in range(3))
    assert holds(draft, 2, "draft 2")
    # Another draft's pages are no hits, the target's still are.
    assert store.batch_exists([draft_page_key(hashes[0], bytes(32))]) == 0
    assert store.batch_exists([draft_keys[0], hashes[0]]) == 2
    store.close()


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(data[:10])
    elif kind == "torn":
        path.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    elif kind == "flipped":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    else:
        path.write_bytes(b"")


@pytest.mark.parametrize("kind", ["truncated", "torn", "flipped", "empty"])
def test_a_damaged_page_is_a_miss_is_removed_and_heals(tmp_path: Path, kind: str) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, [1])
    path = tmp_path / (page_hash(1) + SUFFIX)
    damage(path, kind)
    assert get(store, pool, [1]) == [False]
    assert not path.exists()
    assert store.get_stats()["corrupt"] == 1
    assert put(store, pool, [1]) == [True]
    assert get(store, pool, [1]) == [True]
    # Shortened by others: counted at the old length until the next scan.
    assert store.get_stats()["used_bytes"] >= path.stat().st_size
    store.close()


def test_a_write_heals_a_file_whose_header_or_length_is_wrong(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    for kind in ("truncated", "empty"):
        put(store, pool, [1])
        damage(tmp_path / (page_hash(1) + SUFFIX), kind)
        assert store.batch_exists([page_hash(1)]) == 0
        assert put(store, pool, [1]) == [True]
        assert get(store, pool, [1]) == [True]
    assert store.get_stats()["written"] == 3
    store.close()


def test_a_whole_file_is_not_written_again(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, [1])
    inode = (tmp_path / (page_hash(1) + SUFFIX)).stat().st_ino
    assert put(store, pool, [1]) == [True]
    assert (tmp_path / (page_hash(1) + SUFFIX)).stat().st_ino == inode
    assert (store.get_stats()["written"], store.get_stats()["existing"]) == (1, 1)
    store.close()


def test_swapped_files_miss(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, read_threads=1)
    put(store, pool, [1, 2])
    a, b = (tmp_path / (page_hash(seed) + SUFFIX) for seed in (1, 2))
    a.rename(tmp_path / "aside")
    b.rename(a)
    (tmp_path / "aside").rename(b)
    assert get(store, pool, [1]) == [False]
    assert get(store, pool, [2]) == [False]
    assert store.get_stats()["foreign"] == 2
    store.close()


def test_another_namespace_under_the_same_key_misses(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    mine, other = (HiCacheStorageExtraInfo(namespace_digest=bytes([i]) * 32) for i in (1, 2))
    fill_page(pool, 0, 1)
    pages = [transfer(pool, [0], [page_hash(1)])]
    store.batch_set_v2(pages, mine)
    assert store.batch_get_v2(pages, mine) == {PoolName.KV: [True]}
    assert store.batch_get_v2(pages) == {PoolName.KV: [True]}
    assert store.batch_get_v2(pages, other) == {PoolName.KV: [False]}
    assert store.get_stats()["foreign"] == 1
    store.close()


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "org/other"},
        {"tp_rank": 1, "tp_size": 2},
        {"tp_size": 2},
        {"is_mla_model": True},
    ],
)
def test_another_owner_in_the_same_folder_misses_and_survives_our_clear(
    tmp_path: Path, other: dict[str, object]
) -> None:
    pool = make_host_pool()
    ours = make_file_store(tmp_path, pool)
    theirs = make_file_store(tmp_path, pool, **other)  # type: ignore[arg-type]
    put(ours, pool, [1, 2])
    assert theirs.batch_exists([page_hash(1)]) == 0
    assert get(theirs, pool, [1]) == [False]
    put(theirs, pool, [1])
    (tmp_path / "notes.txt").write_text("not ours")
    assert ours.clear() is True
    assert ours.batch_exists([page_hash(1)]) == 0
    assert get(theirs, pool, [1]) == [True]
    assert (tmp_path / "notes.txt").exists()
    assert ours.clear() is True
    ours.close()
    theirs.close()


def test_other_page_sizes_and_layouts_never_count(tmp_path: Path) -> None:
    """The hash chain keeps them apart; if it did not, the header's length would."""
    small, large = make_host_pool(page_size=4), make_host_pool(page_size=8)
    store = make_file_store(tmp_path, small)
    put(store, small, [1])
    store.close()
    other = make_file_store(tmp_path, large)
    assert other.batch_exists([page_hash(1)]) == 0
    other.close()


def test_mla_pages_are_shared_by_the_ranks_and_states_are_not(tmp_path: Path) -> None:
    pool, state = make_host_pool(), make_host_pool(page_size=1)
    ranks = [
        make_file_store(tmp_path, pool, tp_rank=rank, tp_size=2, is_mla_model=True)
        for rank in range(2)
    ]
    put(ranks[0], pool, [1])
    assert (tmp_path / f"{page_hash(1)}_org-model.bin").exists()
    assert get(ranks[1], pool, [1]) == [True]
    ranks[0].register_mem_host_pool_v2(state, PoolName.MAMBA)
    fill_page(state, 0, "rank 0")
    ranks[0].batch_set_v2([transfer(state, [0], [state_page_key(page_hash(1))], PoolName.MAMBA)])
    assert (tmp_path / f"{page_hash(1)}.mamba_org-model_0_2.bin").exists()
    assert ranks[1].batch_exists([state_page_key(page_hash(1))]) == 0
    for store in ranks:
        assert store.clear()
        store.close()
    assert not list(tmp_path.glob("*.bin"))


def test_a_page_that_goes_away_after_exists_is_a_miss(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, [1])
    for _ in range(2):  # the second look comes from the memory of known headers
        assert store.batch_exists([page_hash(1)]) == 1
    os.unlink(tmp_path / (page_hash(1) + SUFFIX))
    assert store.batch_exists([page_hash(1)]) == 0
    assert get(store, pool, [1]) == [False]
    assert store.get_stats()["io_errors"] == 0
    store.close()


def test_recency_is_refreshed_by_hits_and_falls_along_the_prefix(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, read_threads=1, write_threads=1)
    put(store, pool, range(4))
    paths = [tmp_path / (page_hash(seed) + SUFFIX) for seed in range(4)]
    times = [path.stat().st_mtime_ns for path in paths]
    assert times == sorted(times, reverse=True)
    for path in paths:
        os.utime(path, (1, 1))
    assert get(store, pool, range(3)) == [True] * 3
    assert [path.stat().st_mtime > time.time() - 60 for path in paths] == [True] * 3 + [False]
    os.utime(paths[3], (1, 1))
    put(store, pool, range(4))  # found written: used as well
    assert paths[3].stat().st_mtime > time.time() - 60
    # A later call of the same prefix is older still, when it is told what came before.
    info = HiCacheStorageExtraInfo(prefix_keys=tuple(page_hash(seed) for seed in range(1000)))
    store.batch_get_v2([transfer(pool, [0], [page_hash(3)])], info)
    assert paths[3].stat().st_mtime_ns < paths[2].stat().st_mtime_ns
    assert info.prefix_keys is not None
    assert len(info.prefix_keys) == 1000
    store.close()


def test_a_draft_is_written_whole_before_the_target_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = make_host_pool(), make_host_pool()
    store = make_file_store(tmp_path, target, write_threads=4)
    store.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    order = []
    commit = store._quota.commit

    def record(reservation: Reservation, path: str) -> None:
        order.append(".draft" in path)
        commit(reservation, path)

    monkeypatch.setattr(store._quota, "commit", record)
    hashes = [page_hash(seed) for seed in range(8)]
    store.batch_set_v2(
        [
            transfer(
                draft, range(8), [draft_page_key(h, bytes(32)) for h in hashes], PoolName.DRAFT
            ),
            transfer(target, range(8), hashes),
        ]
    )
    assert order == [True] * 8 + [False] * 8
    store.close()


def test_reads_and_writes_at_once_from_two_threads(tmp_path: Path) -> None:
    reading, writing = make_host_pool(), make_host_pool()
    reader = make_file_store(tmp_path, reading)
    writer = make_file_store(tmp_path, writing)
    put(reader, reading, range(8))
    thread = threading.Thread(
        target=lambda: [put(writer, writing, range(start, start + 8)) for start in range(8, 80, 8)]
    )
    thread.start()
    while thread.is_alive():
        assert get(reader, reading, range(8)) == [True] * 8
    thread.join()
    assert get(reader, reading, range(72, 80)) == [True] * 8
    reader.close()
    writer.close()


def test_an_invariant_breach_is_raised_after_all_threads_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool, read_threads=4)
    put(store, pool, range(8))
    busy = threading.Semaphore(0)
    read = page_file.read_page

    def slow(path: str, *arguments: Any) -> page_file.PageRead:
        if threading.current_thread() is threading.main_thread():
            raise AssertionError("broken")
        time.sleep(0.02)
        busy.release()
        return read(path, *arguments)

    monkeypatch.setattr(page_file, "read_page", slow)
    with pytest.raises(AssertionError, match="broken"):
        store.batch_get_v2([transfer(pool, range(8), [page_hash(seed) for seed in range(8)])])
    done = busy._value
    time.sleep(0.05)
    assert busy._value == done
    store.close()


def test_wrong_calls_are_errors_of_the_caller(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    with pytest.raises(ValueError, match="no host pool is registered as draft"):
        store.batch_get_v2([transfer(pool, [0], [page_hash(1)], PoolName.DRAFT)])
    with pytest.raises(ValueError, match="not a storage key"):
        store.batch_exists(["nonsense"])
    with pytest.raises(ValueError, match="are not 2 pages of 4"):
        pages = transfer(pool, [0], [page_hash(1)])
        store.batch_get_v2([replace(pages, keys=[page_hash(1), page_hash(2)])])
    store.unregister_mem_host_pool_v2(PoolName.KV)
    assert store.pools == {}
    store.close()


def test_a_closed_backend_misses_and_ends_its_threads(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, range(4))
    store.close()
    store.close()
    assert get(store, pool, range(4)) == [False] * 4
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("hicache-file") for name in names)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_size": "many"}, "max_size='many'"),
        ({"max_size": -1}, "max_size must be"),
        ({"max_size": True}, "max_size must be"),
        ({"eviction_ratio": 1.5}, "eviction_ratio must be"),
        ({"eviction_ratio": "0.5"}, "eviction_ratio must be"),
        ({"min_free_space": 1.5}, "min_free_space must be"),
        ({"read_threads": 0}, "read_threads must be"),
        ({"file_storage_path": 3}, "file_storage_path must be"),
        ({"max_sise": 3}, "knows no option 'max_sise'"),
    ],
)
def test_bad_options_are_refused_by_name(
    tmp_path: Path, extra: dict[str, object], message: str
) -> None:
    config = HiCacheStorageConfig(extra_config={"file_storage_path": str(tmp_path)} | extra)
    with pytest.raises(ValueError, match=message):
        HiCacheFile(config)


def test_the_environment_goes_before_the_extra_config(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = HiCacheStorageConfig(
        extra_config={"file_storage_path": str(tmp_path / "b"), "max_size": "1GB"}
    )
    with (
        envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path / "a")),
        envs.SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE.override(123_456),
    ):
        store = HiCacheFile(config)
    assert store.folder == tmp_path / "a"
    assert store.get_stats()["max_bytes"] == 123_456
    store.close()
    (message,) = caplog.messages
    assert message.startswith(f"Pages go to {tmp_path / 'a'}, as SGLANG_HICACHE_FILE_BACKEND")
    with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(tmp_path / "b")):
        HiCacheFile(config).close()
    assert len(caplog.messages) == 1
    store = HiCacheFile(config)
    assert store.folder == tmp_path / "b"
    assert store.get_stats()["max_bytes"] == 10**9
    store.close()


def test_there_is_a_limit_by_default(tmp_path: Path) -> None:
    store = HiCacheFile(HiCacheStorageConfig(extra_config={"file_storage_path": str(tmp_path)}))
    disk = os.statvfs(tmp_path)
    limit = store.get_stats()["max_bytes"]
    assert 0 < limit <= min(64e9, 0.11 * disk.f_blocks * disk.f_frsize)
    assert 0 < store._quota.limits.min_free_bytes <= 1 << 30
    store.close()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be used"):
        make_file_store(tmp_path / "file" / "folder")


def test_pages_are_read_into_the_pool_itself(tmp_path: Path) -> None:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, [5])
    neighbour = read_page(pool, 2)
    store.batch_get_v2([transfer(pool, [1], [page_hash(5)])])
    assert holds(pool, 1, 5)
    assert read_page(pool, 2) == neighbour
    data = (tmp_path / (page_hash(5) + SUFFIX)).read_bytes()
    assert data[HEADER_BYTES:] == read_page(pool, 1)
    store.close()
