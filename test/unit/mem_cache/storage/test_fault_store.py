"""The fake that fails on command does exactly what it is told."""

from __future__ import annotations

import threading

import pytest

from sglang.srt.mem_cache.hicache_storage import PoolName, StorageError
from sglang.test.fakes.fault_store import Fault, FaultPlan, FaultStore
from sglang.test.fakes.host_pages import (
    fill_page,
    holds,
    make_host_pool,
    page_content,
    page_hash,
    read_page,
    transfer,
)

KEYS = [page_hash(seed) for seed in range(4)]


class Setup:
    def __init__(self, *plans: FaultPlan, failure_rate: float = 0.0) -> None:
        self.store = FaultStore(plans=plans, failure_rate=failure_rate)
        self.pool = make_host_pool()
        self.store.register_mem_host_pool_v2(self.pool, PoolName.KV)

    def put(self) -> list[bool]:
        for page in range(4):
            fill_page(self.pool, page, page)
        return self.store.batch_set_v2([transfer(self.pool, range(4), KEYS)])[PoolName.KV]

    def get(self) -> list[bool]:
        for page in range(4):
            fill_page(self.pool, page, "stale")
        found = self.store.batch_get_v2([transfer(self.pool, range(4), KEYS)])[PoolName.KV]
        assert all(holds(self.pool, page, page) for page in range(4) if found[page])
        return found


def test_without_faults_pages_come_back() -> None:
    setup = Setup()
    assert setup.put() == [True] * 4
    assert setup.store.batch_exists([*KEYS, page_hash(9)]) == 4
    assert setup.get() == [True] * 4
    assert [call for call, _ in setup.store.calls].count("exists") == 5


def test_the_nth_page_fails_once() -> None:
    setup = Setup(FaultPlan(fault=Fault.FALSE, call="set", nth=2))
    assert setup.put() == [True, True, False, True]
    assert setup.put() == [True] * 4
    setup.store.plans = [FaultPlan(fault=Fault.FALSE, call="get", nth=5)]
    assert setup.get() == [True] * 4
    assert setup.get() == [True, False, True, True]


def test_a_planned_exception_meets_the_nth_call() -> None:
    setup = Setup(FaultPlan(fault=Fault.RAISE, call="get", nth=1))
    setup.put()
    assert setup.get() == [True] * 4
    with pytest.raises(StorageError, match="planned failure of get"):
        setup.get()
    assert setup.get() == [True] * 4


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.TRUNCATE])
def test_what_is_stored_wrong_is_a_miss_and_goes(fault: Fault) -> None:
    setup = Setup(FaultPlan(fault=fault, call="set", nth=1))
    assert setup.put() == [True] * 4
    assert setup.store.batch_exists(KEYS) == 4
    assert setup.get() == [True, False, True, True]
    assert setup.store.batch_exists(KEYS) == 1


def test_a_short_read_leaves_half_a_page_and_says_so() -> None:
    setup = Setup(FaultPlan(fault=Fault.TRUNCATE, call="get", nth=0))
    setup.put()
    assert setup.get()[0] is False
    size = setup.pool.bytes_per_page
    expected = page_content(0, size)[: size // 2] + page_content("stale", size)[size // 2 :]
    assert read_page(setup.pool, 0) == expected


def test_a_page_vanishes_between_exists_and_get() -> None:
    setup = Setup(FaultPlan(fault=Fault.VANISH, call="exists", nth=2))
    setup.put()
    assert setup.store.batch_exists(KEYS) == 4
    assert setup.get() == [True, True, False, True]


def test_a_hanging_call_waits_for_its_release() -> None:
    setup = Setup(FaultPlan(fault=Fault.HANG, call="get", nth=None))
    setup.put()
    results: list[list[bool]] = []
    thread = threading.Thread(target=lambda: results.append(setup.get()))
    thread.start()
    setup.store.wait_until_hanging()
    assert results == []
    setup.store.release()
    thread.join(5)
    assert results == [[True] * 4]


def test_random_failures_repeat_with_the_seed() -> None:
    first, second = Setup(failure_rate=0.5), Setup(failure_rate=0.5)
    outcomes = [setup.put() + setup.put() for setup in (first, second)]
    assert outcomes[0] == outcomes[1]
    assert set(outcomes[0]) == {True, False}


def test_a_pools_own_fault_and_a_clear_that_fails() -> None:
    plan = FaultPlan(fault=Fault.FALSE, call="set", nth=None, pool=PoolName.DRAFT)
    setup = Setup(plan)
    assert setup.put() == [True] * 4
    draft = make_host_pool()
    setup.store.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    pages = [transfer(draft, [0], [f"d:{KEYS[0]}"], PoolName.DRAFT)]
    assert setup.store.batch_set_v2(pages) == {PoolName.DRAFT: [False]}
    setup.store.clear_result = False
    assert setup.store.clear() is False
    assert setup.store.get_stats() == {"pages": 4}
