"""The RESP backend over a real server: pages, faults, and the draft's KV between two servers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName, StorageError
from sglang.srt.mem_cache.memory_pool_host import HostKVCache
from sglang.srt.mem_cache.storage.redis_store import RedisStore, redis_options
from sglang.srt.mem_cache.storage.shared_store import SharedPageStore
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.host_pages import get, make_host_pool, page_hash, put
from sglang.test.fakes.store_servers import RespServer, record_name
from sglang.test.shared_draft_suite import SharedDraftSuite
from sglang.test.shared_store_suite import SharedServingSuite, SharedStoreSuite, wait_until

register_cpu_ci(est_time=150, suite="hicache")


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RespServer]:
    server = RespServer(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.close()


class TestRedisStore(SharedStoreSuite):
    def test_unused_records_expire(self, make_store: Callable[..., SharedPageStore]) -> None:
        pool = make_host_pool()
        store = make_store(pool, ttl=0.6)
        put(store, pool, [1, 2, 3])
        for _ in range(4):
            time.sleep(0.3)
            assert get(store, pool, [1]) == [True]  # used: lives on
            assert put(store, pool, [1, 2])[1], "found written: lives on"
        keys = [page_hash(seed) for seed in (1, 2, 3)]
        assert [store.batch_exists([key]) for key in keys] == [1, 1, 0]

    def test_values_are_moved_in_bounded_batches(
        self, make_store: Callable[..., SharedPageStore]
    ) -> None:
        pool = make_host_pool(64)
        store = make_store(pool, batch_bytes=3000)
        assert put(store, pool, range(50)) == [True] * 50
        assert get(store, pool, range(50)) == [True] * 50

    def test_a_value_of_another_type_is_no_page(
        self, make_store: Callable[..., SharedPageStore]
    ) -> None:
        pool = make_host_pool()
        store = make_store(pool)
        assert isinstance(store, RedisStore)
        store._ask([[b"LPUSH", record_name(store, page_hash(1)).encode(), b"x"]])
        assert get(store, pool, [1]) == [False]
        assert store.availability.is_up

    def test_a_value_of_another_type_in_the_way_is_replaced(
        self, make_store: Callable[..., SharedPageStore], caplog: pytest.LogCaptureFixture
    ) -> None:
        pool = make_host_pool()
        store = make_store(pool)
        assert isinstance(store, RedisStore)
        name = record_name(store, page_hash(1)).encode()
        store._ask([[b"HSET", name, b"field", b"x"]])
        assert store.batch_exists([page_hash(1)]) == 0
        assert "another type of value" in caplog.text and store.num_damaged_pages() == 1
        store._ask([[b"HSET", name, b"field", b"x"]])
        assert put(store, pool, [1]) == [True]
        assert get(store, pool, [1]) == [True]


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., RespServer]]:
    made: list[RespServer] = []

    def start(*flags: str) -> RespServer:
        server = RespServer(tmp_path, *flags)
        server.start()
        made.append(server)
        return server

    yield start
    for server in made:
        server.close()


def make(server: RespServer, pool: HostKVCache | None = None, **options: Any) -> RedisStore:
    config = HiCacheStorageConfig(model_name="m", extra_config=server.extra_config(**options))
    store = RedisStore(config)
    if pool is not None:
        store.register_mem_host_pool_v2(pool, PoolName.KV)
    return store


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru"])
def test_full(own_server: Callable[..., RespServer], policy: str) -> None:
    # Twice a write of 32 pages, which lies in the server's buffer while it is stored, and more.
    server = own_server("--maxmemory", "12mb", "--maxmemory-policy", policy)
    pool = make_host_pool(64, layer_num=16, head_dim=256)  # 128 KiB a page
    store = make(server, pool)
    verdicts = [put(store, pool, range(first, first + 32)) for first in range(0, 320, 32)]
    stats = store.get_stats()
    if policy == "noeviction":
        assert verdicts[0] == [True] * 32 and not any(verdicts[-1])
        assert stats["dropped"] > 100
        assert get(store, pool, range(32)) == [True] * 32, "what was written stays"
    else:
        assert all(map(all, verdicts)) and stats["dropped"] == 0
        assert get(store, pool, range(316, 320)) == [True] * 4
    assert store.availability.is_up, "a full server is not away"
    store.close()


def test_passwords_and_databases(own_server: Callable[..., RespServer]) -> None:
    server = own_server("--requirepass", "s3cret")
    host = server.url.partition("//")[2].partition("/")[0]
    pool = make_host_pool()
    stores = {
        number: make(server, pool, url=f"redis://:s3cret@{host}/{number}") for number in (0, 1)
    }
    put(stores[1], pool, [1])
    assert get(stores[1], pool, [1]) == [True]
    assert get(stores[0], pool, [1]) == [False]
    for url in (f"redis://{host}", f"redis://:wrong@{host}", f"redis://:s3cret@{host}/99"):
        with pytest.raises(StorageError, match="refuses us") as raised:
            make(server, url=url)
        assert "wrong@" not in str(raised.value)
    with pytest.raises(StorageError, match="no RESP server"):
        make(server, url="redis://127.0.0.1:1")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"ttl": 1e30}, "ttl must be"),
        ({"batch_bytes": 0}, "batch_bytes must be from 1"),
        ({"url": "redis://h?socket_timeout=3"}, "url takes no socket_timeout"),
    ],
)
def test_options_that_cannot_be_meant(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        redis_options(options)


def test_a_bad_url_of_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_REDIS_URL", "http://h")
    with pytest.raises(ValueError, match=r"url \(SGLANG_HICACHE_REDIS_URL in the environment\)"):
        redis_options({})


def test_a_server_that_loses_its_memory_is_filled_again(
    own_server: Callable[..., RespServer],
) -> None:
    server = own_server()
    pool = make_host_pool()
    store = make(server, pool)
    put(store, pool, [1, 2])
    server.server.kill()
    server.server.start()
    # The first call meets a dead connection and makes another: no outage.
    assert get(store, pool, [1, 2])[0] is False
    assert put(store, pool, [1, 2]) == [True, True]
    assert get(store, pool, [1, 2]) == [True, True]
    assert store.get_stats()["outages"] == 0
    wait_until(lambda: store.availability.is_up)


class TestRedisDrafts(SharedDraftSuite):
    """See the suite."""


class TestRedisServing(SharedServingSuite):
    """See the suite."""


def test_the_benchmark_measures_it(tmp_path: Path) -> None:
    script = Path(__file__).parents[3] / "benchmark" / "bench_hicache_storage.py"
    out = tmp_path / "figures.json"
    command = [sys.executable, str(script), "--backend", "redis", "--small", "--json", str(out)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["read_ratio"] > 0 and row["write_ratio"] > 0
