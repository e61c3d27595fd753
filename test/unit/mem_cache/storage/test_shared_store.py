"""What all shared stores have in common, over a store in memory; whether one is away; options."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName
from sglang.srt.mem_cache.storage.availability import Availability
from sglang.srt.mem_cache.storage.backend_options import BackendOptions
from sglang.srt.mem_cache.storage.page_file import HEADER_BYTES, checksum
from sglang.srt.mem_cache.storage.shared_store import (
    HeaderMaker,
    Outcome,
    Record,
    SharedPageStore,
    StoreRefused,
    StoreUnreachable,
    check_prefix,
    chunks,
    judge,
)
from sglang.test.fakes.host_pages import get, make_host_pool, page_hash, put, transfer


class DictStore(SharedPageStore):
    """Records in a dict. ``is_away``: no call is answered; ``room``: records that fit."""

    display_name = "a dict"

    def __init__(self, model_name: str = "m") -> None:
        super().__init__(HiCacheStorageConfig(model_name=model_name), "test")
        self.records: dict[str, bytes] = {}
        self.is_away = False
        self.room = 100
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.is_away:
            raise StoreUnreachable("away")

    def _probe(self) -> bool:
        return not self.is_away

    def _look_up(self, names: Sequence[str]) -> list[bool]:
        self._call("look")
        return [name in self.records for name in names]

    def _read(self, pool: PoolName, records: Sequence[Record]) -> list[Outcome]:
        self._call("read")
        outcomes = []
        for record in records:
            data = self.records.get(record.name)
            if data is None:
                outcomes.append(Outcome.MISSING)
                continue
            payload = memoryview(data)[HEADER_BYTES:]
            outcomes.append(judge(record, data[:HEADER_BYTES], checksum([payload])))
            record.buffers[0][:] = payload
        return outcomes

    def _write(
        self, pool: PoolName, records: Sequence[Record], make_headers: HeaderMaker
    ) -> list[Outcome]:
        self._call("write")
        outcomes = []
        for record in records:
            if len(self.records) >= self.room:
                outcomes.append(Outcome.FAILED)
                break
            self.records[record.name] = b"".join([*make_headers([record]), *record.buffers])
            outcomes.append(Outcome.DONE)
        return outcomes

    def _remove(self, names: Sequence[str]) -> None:
        self._call("remove")
        for name in names:
            self.records.pop(name, None)

    def _remove_prefix(self, prefix: str) -> int:
        self._call("clear")
        names = [name for name in self.records if name.startswith(prefix)]
        self._remove(names)
        return len(names)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def store() -> Iterator[DictStore]:
    store = DictStore()
    store.register_mem_host_pool_v2(make_host_pool(), PoolName.KV)
    yield store
    store.close()


def test_one_look_answers_for_all_keys_of_a_call(store: DictStore) -> None:
    pool = store.pools[PoolName.KV]
    put(store, pool, [1, 2, 3])
    store.calls.clear()
    assert store.batch_exists([page_hash(seed) for seed in (1, 2, 3, 4)]) == 3
    assert store.calls == ["look"]


def test_what_is_there_is_not_written_again(store: DictStore) -> None:
    pool = store.pools[PoolName.KV]
    put(store, pool, [1, 2])
    store.calls.clear()
    assert put(store, pool, [1, 2]) == [True, True]
    assert store.calls == ["look"]


def test_a_full_store_drops_pages_and_is_not_away(store: DictStore) -> None:
    pool = store.pools[PoolName.KV]
    store.room = 2
    assert put(store, pool, [1, 2, 3, 4]) == [True, True, False, False]
    assert get(store, pool, [1, 2]) == [True, True]
    stats = store.get_stats()
    assert (stats["dropped"], stats["io_errors"], stats["outages"]) == (2, 1, 0)


def test_a_store_that_is_away_is_called_once_and_comes_back(store: DictStore) -> None:
    pool = store.pools[PoolName.KV]
    put(store, pool, [1])
    store.is_away = True
    store.calls.clear()
    for _ in range(5):
        assert get(store, pool, [1]) == [False]
        assert put(store, pool, [1]) == [False]
    assert store.calls == ["read"]
    store.is_away = False
    wait_until(lambda: store.availability.is_up)
    assert get(store, pool, [1]) == [True]


def test_a_store_that_goes_away_while_a_bad_record_is_removed(store: DictStore) -> None:
    pool = store.pools[PoolName.KV]
    put(store, pool, [1])
    (name,) = store.records
    store.records[name] = store.records[name][:-1] + b"?"

    def away(names: Sequence[str]) -> None:
        raise StoreUnreachable("away")

    store._remove = away  # type: ignore[method-assign]
    assert get(store, pool, [1]) == [False]
    assert not store.availability.is_up


def test_a_refusal_is_no_outage_and_removes_nothing(
    store: DictStore, caplog: pytest.LogCaptureFixture
) -> None:
    pool = store.pools[PoolName.KV]
    put(store, pool, [1, 2])
    name = next(iter(store.records))
    store.records[name] = store.records[name][:-1] + b"?"

    def refuse(names: Sequence[str]) -> None:
        raise StoreRefused("UNLINK: NOPERM")

    store._remove = refuse  # type: ignore[method-assign]
    for _ in range(3):
        assert get(store, pool, [1]) == [False]
    assert not store.clear()
    assert store.availability.is_up and get(store, pool, [2]) == [True]
    stats = store.get_stats()
    assert (stats["corrupt"], stats["outages"], len(store.records)) == (1, 0, 2)
    assert "could not be removed" in caplog.text and ": removed" not in caplog.text
    assert caplog.text.count("refuses (remove): UNLINK: NOPERM") == 1
    assert caplog.text.count("refuses (clear): UNLINK: NOPERM") == 1


def test_nothing_counts_as_there_while_reads_are_refused(
    store: DictStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = store.pools[PoolName.KV]
    put(store, pool, [1])
    with monkeypatch.context() as patch:

        def refuse(*arguments: object) -> list[Outcome]:
            raise StoreRefused("MGET: NOPERM")

        patch.setattr(store, "_read", refuse)
        assert get(store, pool, [1]) == [False]
    assert store.batch_exists([page_hash(1)]) == 0
    store.calls.clear()
    assert put(store, pool, [1]) == [True]
    assert store.calls == ["look"], "nor is it written again"
    store._reads_refused_until = time.monotonic()
    assert store.batch_exists([page_hash(1)]) == 1


def test_models_share_a_store_and_not_their_records() -> None:
    pool = make_host_pool()
    stores = [DictStore("a"), DictStore("b/../a"), DictStore("a")]
    stores[1].records = stores[2].records = stores[0].records
    for store in stores:
        store.register_mem_host_pool_v2(pool, PoolName.KV)
    put(stores[0], pool, [1])
    assert [get(store, pool, [1]) for store in stores] == [[True], [False], [True]]
    put(stores[1], pool, [1])
    assert stores[0].clear()
    assert [get(store, pool, [1]) for store in stores] == [[False], [True], [False]]
    assert all(name.isascii() and " " not in name for name in stores[0].records)


@pytest.mark.parametrize("prefix", ["", "a/b", "a*", "ä", "a b", "a\n"])
def test_prefixes_need_no_escaping(prefix: str) -> None:
    with pytest.raises(ValueError, match="key_prefix"):
        check_prefix(prefix)


def test_chunks_are_bounded_and_never_empty(store: DictStore) -> None:
    pool = store.pools[PoolName.KV]
    put(store, pool, range(5))
    records = store._records(transfer(pool, range(5), [page_hash(seed) for seed in range(5)]), None)
    size = records[0].num_bytes
    assert [len(part) for part in chunks(records, 2 * size)] == [2, 2, 1]
    assert [len(part) for part in chunks(records, 1)] == [1] * 5
    assert list(chunks([], 1)) == []


# -- availability --


def test_probes_go_on_until_one_succeeds() -> None:
    answers: list[object] = [OSError("no"), False, True]
    asked = threading.Event()

    def probe() -> bool:
        answer = answers.pop(0)
        asked.set()
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    store = Availability("x", probe, first_probe_s=0.01, last_probe_s=0.01)
    store.report_failure("gone")
    store.report_failure("still gone")
    assert not store.is_up and store.num_outages == 1
    wait_until(lambda: store.is_up)
    assert answers == []
    store.report_failure("again")
    assert store.num_outages == 2
    store.close()


def test_closing_ends_the_probes() -> None:
    store = Availability("x", lambda: True, first_probe_s=60)
    store.report_failure("gone")
    store.close()
    assert not store.is_up
    names = "hicache-x-probe"
    wait_until(lambda: all(thread.name != names for thread in threading.enumerate()))
    assert not store.is_up


# -- options --


def test_the_first_source_that_has_a_key_wins() -> None:
    options = BackendOptions("x", [{"a": 1, "b": None}, {"a": 2, "b": "2kB", "c": 0.5}])
    assert options.integer("a", 0) == 1
    assert options.size("b", 0) == 2000
    assert options.number("c", 0.0) == 0.5
    assert options.text("d", "default") == "default"
    options.check_known(frozenset("abc"))
    with pytest.raises(ValueError, match="'c'"):
        options.check_known(frozenset("ab"))


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("text", 3),
        ("size", "many"),
        ("size", -1),
        ("number", True),
        ("number", float("nan")),
        ("number", -0.1),
        ("integer", 1.5),
        ("integer", True),
        ("integer", 2**80),
        ("number", 1e10),
        pytest.param("number", 10**400, id="number: an integer of 400 digits"),
        pytest.param("size", 10**400, id="size: an integer of 400 digits"),
        pytest.param("size", "9" * 400, id="size: 400 digits"),
        pytest.param("size", "9" * 300 + "TB", id="size: 300 digits and TB"),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(kind: str, value: object) -> None:
    options = BackendOptions("x", [{"key": value}])
    with pytest.raises(ValueError, match="key") as raised:
        getattr(options, kind)("key", 0)
    assert len(str(raised.value)) < 200
