"""What the Mooncake backend asks of the store's client: one block a record, and how many a call.

Over a client that keeps records in a dictionary; the real store has its tests in
``test/registered/hicache``.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import sys
import threading
import time
import types
import weakref
from typing import Any

import pytest

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.storage import checksums, mooncake_store
from sglang.srt.mem_cache.storage.availability import Availability
from sglang.srt.mem_cache.storage.mooncake_options import mooncake_options
from sglang.srt.mem_cache.storage.mooncake_store import MooncakeStore
from sglang.srt.mem_cache.storage.page_file import HEADER_BYTES
from sglang.test.fakes.host_pages import get, holds, make_host_pool, page_hash, put


class Client:
    """The store's client, as far as the backend uses it; refuses memory that it does not know."""

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.blocks: dict[int, int] = {}
        self.calls: list[int] = []
        self.priorities: set[int] = set()

    def register_buffer(self, address: int, num_bytes: int) -> int:
        self.blocks[address] = num_bytes
        return 0

    def unregister_buffer(self, address: int) -> int:
        del self.blocks[address]
        return 0

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [int(name in self.records) for name in names]

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.calls.append(len(names))
        self.priorities.add(os.getpriority(os.PRIO_PROCESS, 0))
        for name, address, size in zip(names, addresses, sizes):
            self._check(address, size)
            self.records.setdefault(name, ctypes.string_at(address, size))
        return [0] * len(names)

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        self.priorities.add(os.getpriority(os.PRIO_PROCESS, 0))
        return [self._get(*each) for each in zip(names, addresses, sizes)]

    def _get(self, name: str, address: int, size: int) -> int:
        self._check(address, size)
        data = self.records.get(name)
        if data is None:
            return -704
        if len(data) > size:
            return -600
        ctypes.memmove(address, data, len(data))
        return len(data)

    def _check(self, address: int, size: int) -> None:
        assert any(
            start <= address and address + size <= start + length
            for start, length in self.blocks.items()
        ), "memory that is not registered"

    def remove(self, name: str, force: bool) -> int:
        return 0 if self.records.pop(name, None) is not None else -704

    def close(self) -> None:
        assert self.blocks == {}, "memory is still registered"


def make(monkeypatch: pytest.MonkeyPatch, pool: HostKVCache) -> tuple[MooncakeStore, Client]:
    client = Client()
    monkeypatch.setattr(mooncake_store, "_load", lambda options: None)
    monkeypatch.setattr(mooncake_store, "_connect", lambda module, options: client)
    extra: dict[str, Any] = {"master_server_address": "127.0.0.1:1"}
    store = MooncakeStore(HiCacheStorageConfig(model_name="m", extra_config=extra))
    store.register_mem_host_pool_v2(pool, PoolName.KV)
    return store, client


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_a_record_is_one_block_whatever_the_layout(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    pool, other = (make_host_pool(layout=layout) for _ in range(2))
    store, client = make(monkeypatch, pool)
    assert put(store, pool, range(8)) == [True] * 8
    assert {len(data) for data in client.records.values()} == {HEADER_BYTES + pool.bytes_per_page}
    store.unregister_mem_host_pool_v2(PoolName.KV)
    store.register_mem_host_pool_v2(other, PoolName.KV)
    assert get(store, other, range(8)) == [True] * 8
    assert all(holds(other, page, page) for page in range(8))
    assert store._reading.has_staging == (layout == "layer_first")


@pytest.mark.parametrize("num_bytes", [1, HEADER_BYTES, -1])
def test_a_record_of_another_length_is_foreign_and_goes(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """The client answers with a length: a short one must not count with what the pool had."""
    pool = make_host_pool()
    store, client = make(monkeypatch, pool)
    put(store, pool, [1])
    (name,) = client.records
    for data in (client.records[name][:num_bytes], client.records[name] + b"x"):
        client.records[name] = data
        assert get(store, pool, [1]) == [False]
        assert client.records == {} and store.batch_exists([page_hash(1)]) == 0
        put(store, pool, [1])
    assert store.get_stats()["foreign"] == 2


@pytest.mark.parametrize(
    ("num_pages", "page_bytes", "most", "count"),
    [
        (1, 1000, 64 << 20, 1),
        (128, 1000, 64 << 20, 128),
        (129, 1000, 64 << 20, 65),
        (128, 1 << 20, 64 << 20, 43),  # 63 would leave two over
        (32, 1 << 20, 24 << 20, 16),
        (32, 4 << 20, 64 << 20, 6),
        (32, 8 << 20, 64 << 20, 3),
        (2, 128 << 20, 64 << 20, 1),
    ],
)
def test_many_small_records_and_few_large_ones_a_call(
    num_pages: int, page_bytes: int, most: int, count: int
) -> None:
    size = HEADER_BYTES + page_bytes
    assert mooncake_store._records_a_call(num_pages, size, most) == count


def test_a_long_transfer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_host_pool(num_pages=200)
    store, client = make(monkeypatch, pool)
    assert put(store, pool, range(200)) == [True] * 200
    assert client.calls == [100, 100]
    assert get(store, pool, range(200)) == [True] * 200


def test_who_polls_has_less_priority_than_who_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_host_pool()
    store, client = make(monkeypatch, pool)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    put(store, pool, [1])
    get(store, pool, [1])
    assert client.priorities == {min(own + mooncake_store._NICENESS, 19)}
    assert os.getpriority(os.PRIO_PROCESS, 0) == own


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_headers_are_made_while_others_move(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """A call ends when a page of the next one has been looked at."""
    pool = make_host_pool(num_pages=12, layout=layout)
    store, client = make(monkeypatch, pool)
    of_three_pages(store, pool)
    seen = threading.Semaphore(0)
    put_from, checksum = client.batch_put_from, checksums.checksum

    def see(*arguments: Any) -> int:
        seen.release()
        return checksum(*arguments)

    def put_slowly(*arguments: Any) -> list[int]:
        for _ in range(3 if len(client.calls) == 3 else 4):
            assert seen.acquire(timeout=5), "the pages of the next call wait for this one"
        for _ in range(0 if len(client.calls) == 3 else 1):
            seen.release()
        return put_from(*arguments)

    monkeypatch.setattr(checksums, "checksum", see)
    monkeypatch.setattr(client, "batch_put_from", put_slowly)
    assert put(store, pool, range(12)) == [True] * 12
    assert client.calls == [3] * 4
    monkeypatch.undo()
    assert get(store, pool, range(12)) == [True] * 12


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_are_checked_while_others_move(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """What a call has brought is looked at when the next one has begun."""
    pool, other = (make_host_pool(num_pages=12, layout=layout) for _ in range(2))
    store, client = make(monkeypatch, pool)
    assert put(store, pool, range(12)) == [True] * 12
    store.unregister_mem_host_pool_v2(PoolName.KV)
    store.register_mem_host_pool_v2(other, PoolName.KV)
    of_three_pages(store, other)
    begun = [threading.Event() for _ in range(4)]
    numbers, num_seen = itertools.count(), itertools.count()
    get_into, checksum = client.batch_get_into, checksums.checksum

    def see(*arguments: Any) -> int:
        call = next(num_seen) // 3
        assert begun[min(call + 1, 3)].wait(timeout=5), "the next call waits for these pages"
        return checksum(*arguments)

    def get_and_tell(*arguments: Any) -> list[int]:
        begun[next(numbers)].set()
        return get_into(*arguments)

    monkeypatch.setattr(checksums, "checksum", see)
    monkeypatch.setattr(client, "batch_get_into", get_and_tell)
    assert get(store, other, range(12)) == [True] * 12
    assert next(num_seen) == 12
    assert all(holds(other, page, page) for page in range(12))


@pytest.mark.parametrize("code", [-800, -900])
def test_nothing_moves_behind_a_transfer_that_failed(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Nor is anything on its way when the answer is there."""
    pool = make_host_pool(num_pages=12)
    store, client = make(monkeypatch, pool)
    of_three_pages(store, pool)
    put(store, pool, range(12))
    calls: list[str] = []

    def fail(names: list[str], *arguments: Any) -> list[int]:
        calls.append(names[0])
        time.sleep(0.05)
        return [code] * len(names)

    monkeypatch.setattr(client, "batch_get_into", fail)
    monkeypatch.setattr(client, "batch_put_from", fail)
    assert get(store, pool, range(12)) == [False] * 12
    assert len(calls) == 1
    client.records.clear()
    monkeypatch.setattr(store, "availability", Availability("the store", lambda: True))
    assert put(store, pool, range(12)) == [False] * 12
    assert len(calls) == 2


def of_three_pages(store: MooncakeStore, pool: HostKVCache) -> None:
    """Let a call move three pages at most."""
    store._reading.run_bytes = store._writing.run_bytes = 3 * (HEADER_BYTES + pool.bytes_per_page)


def test_a_call_that_meets_a_closed_connection_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed while a transfer goes on in another thread."""
    pool = make_host_pool()
    store, _ = make(monkeypatch, pool)
    put(store, pool, [1])
    store._reading.close()
    assert get(store, pool, [1]) == [False]
    store.close()


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_a_closed_store_keeps_nothing(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """Not even the client, whose memory only goes with it; nobody waits for the collector."""
    pool = make_host_pool(layout=layout)
    store, client = make(monkeypatch, pool)
    put(store, pool, [1])
    assert get(store, pool, [1]) == [True]
    monkeypatch.undo()  # it holds the client, too
    kept, closed = weakref.ref(client), weakref.ref(store)
    gc.disable()
    try:
        store.close()
        del client
        assert kept() is None
        assert store.batch_exists([page_hash(1)]) == 0
        del store
        assert closed() is None
    finally:
        gc.enable()


TIMES = ("MC_TCP_PROGRESS_TIMEOUT_SEC", "MC_RPC_TIMEOUT_MS")


def test_each_attachment_has_its_own_time_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the user's variables hold before the options."""
    monkeypatch.setattr(mooncake_store, "_our_settings", {})
    monkeypatch.setitem(sys.modules, "mooncake.store", types.ModuleType("mooncake.store"))
    for name in (*TIMES, "MC_STORE_CLIENT_SETUP_RETRIES", "MC_LOG_LEVEL", "MC_YLT_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
        del os.environ[name]

    def load(**options: Any) -> list[str]:
        address = {"master_server_address": "127.0.0.1:1"}
        mooncake_store._load(mooncake_options({**address, **options}))
        return [os.environ[name] for name in TIMES]

    assert load(transfer_timeout=7, rpc_timeout=3) == ["7", "3000"]
    assert load() == ["5", "2000"]
    monkeypatch.setenv(TIMES[1], "123")
    assert load(transfer_timeout=8, rpc_timeout=3) == ["8", "123"]


def test_a_record_that_stays_is_not_called_removed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_host_pool()
    store, client = make(monkeypatch, pool)
    put(store, pool, [1])
    (name,) = client.records
    client.records[name] = client.records[name][:-1] + b"?"
    monkeypatch.setattr(client, "remove", lambda name, force: -706)
    for _ in range(3):
        assert get(store, pool, [1]) == [False]
    assert "could not be removed" in caplog.text and "-706" in caplog.text
    assert ": removed" not in caplog.text
    assert store.num_damaged_pages() == 1 and store.availability.is_up


def test_a_read_that_fails_for_good_is_said_and_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_host_pool()
    store, client = make(monkeypatch, pool)
    put(store, pool, [1])
    with monkeypatch.context() as patch:
        patch.setattr(client, "batch_get_into", lambda names, *rest: [-10] * len(names))
        for _ in range(3):
            assert store.batch_exists([page_hash(1)]) == 1
            assert get(store, pool, [1]) == [False]
        assert caplog.text.count("could not be read") == 1 and "-10" in caplog.text
        assert store.batch_exists([page_hash(1)]) == 0
    assert put(store, pool, [1]) == [True]
    assert store.batch_exists([page_hash(1)]) == 1
    assert get(store, pool, [1]) == [True]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("master_server_address", "foo"),
        ("master_server_address", "127.0.0.1:" + "1" * 23),
        ("master_server_address", "127.0.0.1:97836"),
        ("master_server_address", "127.0.0.1:0"),
        ("master_server_address", ":50051"),
        ("replica_num", 2**31),
        ("replica_num", 2**80),
        ("local_buffer_size", "1000TB"),
        pytest.param("local_buffer_size", "9" * 400, id="local_buffer_size: 400 digits"),
        ("transfer_timeout", 1e10),
        pytest.param("transfer_timeout", 10**400, id="transfer_timeout: an integer of 400 digits"),
        ("rpc_timeout", 0.0),
    ],
)
def test_values_that_the_client_would_take_for_others(key: str, value: object) -> None:
    good = {"master_server_address": "127.0.0.1:50051", "local_hostname": "here"}
    mooncake_options(good)
    with pytest.raises(ValueError, match=key) as raised:
        mooncake_options({**good, key: value})
    assert len(str(raised.value)) < 300


def test_a_bad_master_of_the_environment_is_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_MASTER", "foo")
    monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", "here")
    with pytest.raises(ValueError, match="MOONCAKE_MASTER in the environment"):
        mooncake_options({})


@pytest.mark.parametrize("name", ["batch_is_exist", "batch_get_into", "batch_put_from"])
def test_fewer_results_than_records_are_a_store_that_is_away(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pool = make_host_pool()
    store, client = make(monkeypatch, pool)
    assert put(store, pool, [0]) == [True]
    monkeypatch.setattr(client, name, lambda *_: [], raising=False)
    if name == "batch_get_into":
        assert get(store, pool, range(3)) == [False] * 3
    else:
        assert put(store, pool, range(3))[1:] == [False] * 2
    assert store.availability.num_outages == 1
    store.close()
