"""Tests that every backend of a shared store passes, over the real store.

A test module derives classes from `SharedStoreSuite` and `SharedServingSuite` and has the fixture
`servers`. What only one store does (being full, parts of it being away) is tested in its module.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    StorageError,
)
from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost
from sglang.srt.mem_cache.page_key import draft_page_key
from sglang.srt.mem_cache.pool_transfer import PageRule
from sglang.srt.mem_cache.storage.backend_factory import create_storage_backend
from sglang.srt.mem_cache.storage.page_file import HEADER_BYTES
from sglang.srt.mem_cache.storage.shared_store import SharedPageStore
from sglang.test.fakes.host_pages import (
    fill_page,
    get,
    holds,
    make_host_pool,
    page_hash,
    put,
    transfer,
)
from sglang.test.fakes.store_servers import (
    StoreServers,
    put_raw_record,
    raw_record,
    record_name,
)
from sglang.test.hicache_fault_server import (
    FULL,
    WAIT_S,
    StoredServer,
    from_storage,
    serve_over_store,
)
from sglang.test.slow_store_case import run_behind_slow_network, why_no_slow_network

LAYOUTS = ("page_first", "page_first_direct", "layer_first")
DIGEST = b"d" * 32
OURS = HiCacheStorageConfig(model_name="org/model")
# A store that is away costs one call; the calls of these tests have limits of one second.
AWAY_S = 8.0
BACK_S = 15.0


def wait_until(condition: Callable[[], bool], timeout_s: float = BACK_S) -> None:
    """Poll. Raises AssertionError in the end."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


class SharedStoreSuite:
    """See the module docstring."""

    @pytest.fixture
    def make_store(self, servers: StoreServers) -> Iterator[Callable[..., SharedPageStore]]:
        """Make a backend with the extra config `options`; closed and cleared in the end."""
        made: list[SharedPageStore] = []

        def make(
            pool: MHATokenToKVPoolHost | None = None,
            config: HiCacheStorageConfig = OURS,
            **options: Any,
        ) -> SharedPageStore:
            config = replace(config, extra_config=servers.extra_config(**options))
            store = create_storage_backend(servers.backend, config)
            assert isinstance(store, SharedPageStore)
            assert type(store).__name__ == servers.class_name
            if pool is not None:
                store.register_mem_host_pool_v2(pool, PoolName.KV)
            made.append(store)
            return store

        yield make
        for store in made:
            store.clear()
            store.close()

    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_pages_come_back_byte_for_byte_to_another_server(
        self, make_store: Callable[..., SharedPageStore], layout: str
    ) -> None:
        pool, other = (make_host_pool(160, layout=layout) for _ in range(2))
        writer, reader = make_store(pool), make_store(other)
        seeds = range(150)  # more than one call moves
        assert put(writer, pool, seeds) == [True] * 150
        assert reader.batch_exists([page_hash(seed) for seed in seeds]) == 150
        assert get(reader, other, seeds) == [True] * 150
        stats = reader.get_stats()
        assert (stats["hits"], stats["bytes_read"]) == (150, 150 * pool.bytes_per_page)
        assert writer.get_stats()["written"] == 150

    def test_a_prefix_ends_at_a_gap(self, make_store: Callable[..., SharedPageStore]) -> None:
        pool = make_host_pool()
        store = make_store(pool)
        put(store, pool, [1, 2, 4])
        keys = [page_hash(seed) for seed in (1, 2, 3, 4)]
        assert store.batch_exists(keys) == 2
        assert store.batch_exists([]) == 0
        assert get(store, pool, [1, 2, 3, 4])[:3] == [True, True, False]
        assert store.batch_get_v2([transfer(pool, [], [])]) == {PoolName.KV: []}

    def test_pools_have_records_of_their_own_and_drafts_may_have_holes(
        self, make_store: Callable[..., SharedPageStore]
    ) -> None:
        pool, draft = make_host_pool(), make_host_pool(layer_num=1)
        store = make_store(pool)
        store.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        put(store, pool, [0, 1, 2])
        keys = [draft_page_key(page_hash(seed), DIGEST) for seed in range(3)]
        for page in (0, 2):
            fill_page(draft, page, f"draft {page}")
        written = store.batch_set_v2([transfer(draft, [0, 2], [keys[0], keys[2]], PoolName.DRAFT)])
        assert written == {PoolName.DRAFT: [True, True]}
        read = store.batch_get_v2(
            [
                transfer(draft, [3, 4, 5], keys, PoolName.DRAFT),
                transfer(pool, [3, 4, 5], [page_hash(seed) for seed in range(3)]),
            ]
        )
        assert read == {PoolName.DRAFT: [True, False, True], PoolName.KV: [True] * 3}
        assert holds(draft, 3, "draft 0") and holds(draft, 5, "draft 2") and holds(pool, 5, 2)
        other_draft = draft_page_key(page_hash(0), b"e" * 32)
        assert store.batch_exists([other_draft]) == 0

    def test_one_look_answers_for_all_pools(
        self, make_store: Callable[..., SharedPageStore]
    ) -> None:
        pool, draft = make_host_pool(), make_host_pool(layer_num=1)
        store = make_store(pool)
        store.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        put(store, pool, [0, 1, 2, 3])
        hashes = [page_hash(seed) for seed in range(5)]
        keys = [draft_page_key(page, DIGEST) for page in hashes]
        store.batch_set_v2([transfer(draft, [0, 1], [keys[0], keys[2]], PoolName.DRAFT)])
        every = store.batch_exists_v2(hashes, [PoolTransfer(name=PoolName.DRAFT, keys=keys)])
        assert (every.kv_hit_pages, every.present) == (4, {PoolName.DRAFT: [True]})
        last = PoolTransfer(name=PoolName.DRAFT, keys=keys, rule=PageRule(trailing=1))
        trailing = store.batch_exists_v2(hashes, [last])
        assert trailing.present == {PoolName.DRAFT: [True, False, True, False]}

    @pytest.mark.parametrize(
        "other",
        [
            HiCacheStorageConfig(model_name="org/other"),
            HiCacheStorageConfig(model_name="org/model", tp_rank=1, tp_size=2),
            HiCacheStorageConfig(model_name="org/model", pp_rank=1, pp_size=2),
        ],
        ids=["model", "rank", "stage"],
    )
    def test_another_owner_misses_and_survives_our_clear(
        self, make_store: Callable[..., SharedPageStore], other: HiCacheStorageConfig
    ) -> None:
        pool = make_host_pool()
        mine, theirs = make_store(pool), make_store(pool, other)
        put(mine, pool, [1])
        assert theirs.batch_exists([page_hash(1)]) == 0
        put(theirs, pool, [1])
        assert mine.clear()
        assert mine.batch_exists([page_hash(1)]) == 0
        assert get(theirs, pool, [1]) == [True]

    def test_latent_pages_are_shared_by_the_ranks(
        self, make_store: Callable[..., SharedPageStore]
    ) -> None:
        pool = make_host_pool()
        config = HiCacheStorageConfig(model_name="mla", is_mla_model=True, tp_size=4)
        first, last = make_store(pool, config), make_store(pool, replace(config, tp_rank=3))
        put(first, pool, [1])
        assert get(last, pool, [1]) == [True]

    @pytest.mark.parametrize("damage", ["flipped", "torn", "short", "long", "header", "swapped"])
    def test_a_record_that_is_not_right_is_a_miss_is_removed_and_heals(
        self, make_store: Callable[..., SharedPageStore], damage: str
    ) -> None:
        pool = make_host_pool(head_dim=64)
        store = make_store(pool)
        put(store, pool, [1, 2])
        name = record_name(store, page_hash(1))
        data = bytearray(raw_record(store, name) or b"")
        assert len(data) == HEADER_BYTES + pool.bytes_per_page
        if damage == "flipped":
            data[HEADER_BYTES + 1000] ^= 4
        elif damage == "torn":
            data[HEADER_BYTES + 100 :] = bytes(len(data) - HEADER_BYTES - 100)
        elif damage == "short":
            del data[-4:]
        elif damage == "long":
            data += b"more"
        elif damage == "header":
            data[20] ^= 1
        else:
            data = bytearray(raw_record(store, record_name(store, page_hash(2))) or b"")
        put_raw_record(store, name, bytes(data))
        assert store.batch_exists([page_hash(1)]) == 1
        assert get(store, pool, [1, 2])[0] is False
        stats = store.get_stats()
        assert stats["corrupt"] + stats["foreign"] == 1
        assert store.batch_exists([page_hash(1)]) == 0
        assert put(store, pool, [1]) == [True]
        assert get(store, pool, [1, 2]) == [True, True]

    def test_another_namespace_under_the_same_key_misses(
        self, make_store: Callable[..., SharedPageStore]
    ) -> None:
        pool = make_host_pool()
        store = make_store(pool)
        fill_page(pool, 0, 1)
        page = transfer(pool, [0], [page_hash(1)])
        store.batch_set_v2([page], HiCacheStorageExtraInfo(namespace_digest=b"a" * 32))
        mine = HiCacheStorageExtraInfo(namespace_digest=b"a" * 32)
        other = HiCacheStorageExtraInfo(namespace_digest=b"b" * 32)
        assert store.batch_get_v2([page], mine)[PoolName.KV] == [True]
        assert store.batch_get_v2([page], other)[PoolName.KV] == [False]
        assert store.get_stats()["foreign"] == 1

    def test_what_exists_is_not_sent_again(
        self, make_store: Callable[..., SharedPageStore]
    ) -> None:
        pool = make_host_pool()
        store, other = make_store(pool), make_store(pool)
        put(store, pool, [1, 2])
        assert put(other, pool, [1, 2, 3]) == [True] * 3
        stats = other.get_stats()
        assert (stats["existing"], stats["written"]) == (2, 1)

    def test_reads_and_writes_at_once(self, make_store: Callable[..., SharedPageStore]) -> None:
        reading, writing = make_host_pool(64), make_host_pool(64)
        store, writer = make_store(reading), make_store(writing)
        put(writer, writing, range(32))
        failures: list[str] = []

        def read() -> None:
            for _ in range(10):
                if get(store, reading, range(32)) != [True] * 32:
                    failures.append("read")

        def write() -> None:
            for first in range(100, 400, 30):
                if put(writer, writing, range(first, first + 30)) != [True] * 30:
                    failures.append("write")

        threads = [threading.Thread(target=work) for work in (read, write)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def test_wrong_calls_are_errors_of_the_caller(
        self, make_store: Callable[..., SharedPageStore]
    ) -> None:
        pool = make_host_pool()
        store = make_store(pool)
        with pytest.raises(ValueError, match="storage key"):
            store.batch_exists(["no key"])
        with pytest.raises(ValueError, match="no host pool"):
            store.batch_get_v2([transfer(pool, [0], [page_hash(1)], PoolName.DRAFT)])
        with pytest.raises(ValueError, match="not"):
            store.batch_set_v2([transfer(pool, [0], [page_hash(1), page_hash(2)])])

    def test_a_closed_backend_misses(self, make_store: Callable[..., SharedPageStore]) -> None:
        pool = make_host_pool()
        store = make_store(pool)
        put(store, pool, [1])
        store.close()
        store.close()
        assert store.batch_exists([page_hash(1)]) == 0
        assert get(store, pool, [1]) == [False]
        assert put(store, pool, [1]) == [False]
        assert store.clear() is False

    def test_unknown_options_are_refused_by_name(
        self, make_store: Callable[..., SharedPageStore]
    ) -> None:
        with pytest.raises(ValueError, match="'tll'"):
            make_store(tll=3)
        with pytest.raises(ValueError, match="key_prefix"):
            make_store(key_prefix="a.*")

    # -- the store goes away --

    def test_killed_and_back(
        self,
        servers: StoreServers,
        make_store: Callable[..., SharedPageStore],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        pool = make_host_pool()
        store = make_store(pool)
        put(store, pool, [1, 2])
        front = servers.processes[0]
        front.kill()
        start = time.monotonic()
        with caplog.at_level(logging.WARNING):
            for _ in range(50):
                assert get(store, pool, [1, 2])[0] is False
                assert put(store, pool, [1, 3]) == [False, False]
                assert store.batch_exists([page_hash(1)]) == 0
        assert time.monotonic() - start < AWAY_S, "each call tries, instead of the first"
        assert sum("does not answer" in record.message for record in caplog.records) == 1
        assert store.get_stats()["outages"] == store.fault_counts()["outages"] == 1
        assert store.fault_counts()["io_errors"] and store.fault_counts()["dropped_pages"] == 100
        assert store.clear() is False
        with pytest.raises(StorageError):
            make_store()
        front.start()
        wait_until(lambda: put(store, pool, [1, 2]) == [True, True])
        assert get(store, pool, [1, 2]) == [True, True]
        assert store.availability.is_up

    def test_stopped_in_the_middle_nothing_arrives_afterwards(
        self, servers: StoreServers, make_store: Callable[..., SharedPageStore]
    ) -> None:
        pool = make_host_pool(32, layer_num=64, head_dim=256)  # 512 KiB a page
        store = make_store(pool)
        put(store, pool, range(32))
        keys = [page_hash(seed) for seed in range(32)]
        for delay_s in (0.0, 0.004, 0.01):
            done = threading.Event()

            def read(done: threading.Event = done) -> None:
                store.batch_get_v2([transfer(pool, range(32), keys)])
                done.set()

            reader = threading.Thread(target=read)
            reader.start()
            time.sleep(delay_s)
            # Of Mooncake the node, which has the bytes; the master is asked about names only.
            with servers.processes[-1].stopped():
                assert done.wait(40), "a read has no end"
                pool.memory.array[:] = 0xA5
            time.sleep(0.5)
            assert (pool.memory.array == 0xA5).all(), "bytes came after the call had returned"
            reader.join()
            wait_until(lambda: store.availability.is_up)


class SharedServingSuite:
    """A served model over a shared store; module fixture `servers` as above."""

    @pytest.fixture
    def case(self, servers: StoreServers, tmp_path: Path) -> Iterator[StoredServer]:
        with serve_over_store(tmp_path, servers) as running:
            yield running

    def test_serving_goes_on_while_the_store_is_killed_and_hits_return(
        self, servers: StoreServers, case: StoredServer
    ) -> None:
        prompts = range(6)
        expected = [case.tokens(number) for number in prompts]
        case.flush()
        answer = case.ask(0)
        assert (answer["output_ids"], from_storage(answer)) == (expected[0], FULL)
        assert answer["meta_info"]["cached_tokens_details"]["storage_backend"] == case.class_name
        children = case.server.children()
        servers.processes[0].kill()
        assert case.server.post("/flush_cache").status_code == 200
        for number in prompts:
            seconds, answer = case.timed(number)
            assert answer["output_ids"] == expected[number]
            assert from_storage(answer) == 0
            assert seconds < WAIT_S + 2.0
        servers.processes[0].start()

        def hits_again() -> bool:
            tokens = case.tokens(1)  # written, if not before
            case.flush()
            answer = case.ask(1)
            case.flush()
            assert tokens == answer["output_ids"] == expected[1]
            return from_storage(answer) == FULL

        wait_until(hits_again, 30)
        assert case.server.children() == children

    def test_a_slow_network_holds_no_request_up(self, servers: StoreServers) -> None:
        reason = why_no_slow_network()
        if reason:
            pytest.skip(reason)
        result = run_behind_slow_network(servers.backend)
        assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
