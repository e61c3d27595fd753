"""What the caches report: every name and label is known, and found tokens are accounted for."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sglang.srt.mem_cache.cache_metrics import MetricsHook
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.observability.metrics import SchedulerLabels, SchedulerMetrics
from sglang.test.fakes.controller_rig import MemoryStore
from sglang.test.fakes.fake_kv import FakeEngine
from sglang.test.fakes.fault_store import Fault, FaultPlan, FaultStore
from sglang.test.fakes.hicache_engine import HiCacheEngine, HiReq
from sglang.test.fakes.hicache_model import HiCacheModel, ModelConfig
from sglang.test.fakes.tier_cases import PAGE, engine_of, prompt


class Recorded:
    """A metrics hook that writes into real metrics and remembers what it was told."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._metrics = SchedulerMetrics(SchedulerLabels(model_name="m"), self.registry)
        self.sums: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.backends: set[str] = set()

    def __call__(self, name: str, amount: float, **labels: str) -> None:
        self._metrics.count_cache(name, amount, **labels)
        self.sums[name] += amount  # type: ignore[assignment]
        if "reason" in labels and name == "storage_prefetch_unfulfilled_tokens":
            self.reasons[str(labels["reason"])] += int(amount)
        if "storage_backend" in labels:
            self.backends.add(labels["storage_backend"])

    def value(self, name: str, **labels: str) -> float:
        """The sum of a series of the registry."""
        total = 0.0
        for family in self.registry.collect():
            for sample in family.samples:
                has_labels = all(sample.labels.get(key) == labels[key] for key in labels)
                if sample.name == f"sglang:{name}" and has_labels:
                    total += sample.value
        return total


@pytest.fixture
def quiet() -> Iterator[None]:
    """The faults of the stores are meant."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def _tell_both(
    first: MetricsHook, second: MetricsHook, name: str, amount: float, **labels: str
) -> None:
    first(name, amount, **labels)
    second(name, amount, **labels)


def test_random_lives_report_nothing_unknown(quiet: None) -> None:
    for seed, policy in enumerate(("best_effort", "wait_complete", "timeout")):
        recorded = Recorded()
        config = ModelConfig(
            make_tree=UnifiedRadixCache, page_size=4, prefetch_policy=policy, num_ranks=1
        )
        model = HiCacheModel(config, seed)
        model.engines[0].tree._metrics = functools.partial(_tell_both, model._count, recorded)
        model.run(400)
        assert recorded.value("evicted_tokens_total", cache_type="UnifiedRadixCache") > 0
        assert recorded.backends <= {"memory", ""}


def test_a_cache_without_tiers_tells_what_it_evicts() -> None:
    recorded = Recorded()
    engine = FakeEngine(size=64, page_size=4)
    engine.tree._metrics = recorded
    engine.run(list(range(16)))
    assert engine.tree.evict(8).num_tokens_evicted == 16
    assert engine.tree.evict(8).num_tokens_evicted == 0
    assert recorded.value("evicted_tokens_total", cache_type="RadixCache") == 16
    assert recorded.value("eviction_duration_seconds_count", cache_type="RadixCache") == 1


def test_a_page_s_way_through_the_tiers() -> None:
    recorded = Recorded()
    store = MemoryStore()
    engine = engine_of(store=store, prefetch_policy="wait_complete", metrics=recorded)
    tokens, num_tokens = prompt(4), 4 * PAGE
    engine.run(tokens)
    engine.clock.now += 2.0  # the copy takes its time
    engine.settle()
    kv: dict[str, str] = {"cache_type": "HiRadixCache", "pool": "kv"}
    file: dict[str, str] = {"cache_type": "HiRadixCache", "storage_backend": "memory"}
    bytes_a_token = engine.tree.cache_controller.host_pools.bytes_per_token
    assert recorded.value("hicache_backup_tokens_total", **kv) == num_tokens
    assert recorded.value("hicache_backup_bytes_total", **kv) == num_tokens * bytes_a_token
    assert recorded.value("hicache_backup_duration_seconds_sum") == 2.0
    assert recorded.value("backuped_tokens_total", **file) == num_tokens
    assert recorded.value("backup_pgs_sum", **file) == 4
    assert recorded.value("backup_bandwidth_sum", **file) > 0
    engine.evict_all()
    assert recorded.value("evicted_tokens_total") == num_tokens
    engine.run(tokens)
    engine.settle()
    assert recorded.value("load_back_tokens_total", **kv) == num_tokens
    assert recorded.value("load_back_bytes_total", **kv) == num_tokens * bytes_a_token
    assert recorded.value("load_back_duration_seconds_count") == 1
    engine.flush()
    engine.serve(tokens)
    engine.settle()
    assert recorded.value("storage_prefetch_hit_tokens_total", **file) == num_tokens
    assert recorded.value("prefetched_tokens_total", **file) == num_tokens
    assert recorded.value("prefetch_pgs_sum", **file) == 4
    assert recorded.value("prefetch_bandwidth_count", **file) == 1
    assert not recorded.reasons


def _stored(store: Any, num_pages: int) -> None:
    """Let a store hold a prompt."""
    engine = engine_of(store=store)
    engine.run(prompt(num_pages))
    engine.settle()


def _fetch(engine: HiCacheEngine, num_pages: int) -> None:
    """Queue a request and let storage say what it has."""
    engine.submit(HiReq(rid="a", origin_input_ids=prompt(num_pages)))
    engine.controller.step_query()
    engine.tick()


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("below_threshold", {"extra_config": f'{{"prefetch_threshold": {6 * PAGE}}}'}),
        ("host_capacity", {"host_size": 2 * PAGE}),
        ("storage_transfer", {}),
        ("deadline", {}),
        ("dropped", {}),
        ("device_overlap", {}),
    ],
)
def test_why_found_tokens_were_not_fetched(
    quiet: None, reason: str, options: dict[str, Any]
) -> None:
    store = FaultStore()
    _stored(store, 4)
    recorded = Recorded()
    policy = "best_effort" if reason == "deadline" else "wait_complete"
    engine = engine_of(store=store, prefetch_policy=policy, metrics=recorded, **options)
    if reason == "storage_transfer":
        store.plans.append(FaultPlan(fault=Fault.FALSE, call="get", nth=None))
    _fetch(engine, 8 if reason == "below_threshold" else 4)
    if reason == "deadline":
        engine.tree.check_prefetch_progress("a")  # its turn comes before anything is read
    if reason == "dropped":
        engine.tree.release_aborted_request("a")
    if reason == "device_overlap":
        engine.run(prompt(4))
        engine.settle()
    engine.settle()
    found = recorded.sums["storage_prefetch_hit_tokens"]
    assert found == 4 * PAGE
    assert found == recorded.sums["prefetched_tokens"] + recorded.reasons.total()
    assert set(recorded.reasons) == {reason}, recorded.reasons


def test_what_is_not_asked_for_now_is_counted_too() -> None:
    recorded = Recorded()
    engine = engine_of(metrics=recorded)
    engine.tree.cache_controller.prefetch_tokens_occupied = 10**6
    engine.submit(HiReq(rid="a", origin_input_ids=prompt(4)))
    assert recorded.sums["storage_prefetch_deferred_tokens"] > 0
    engine.tree.cache_controller.prefetch_tokens_occupied = 0
