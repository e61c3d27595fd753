"""Metrics of the prefix cache and its tiers: names, labels and limits.

Kept apart from `metrics`, which owns the labels of a rank: here is one table of counters and one of
histograms. What is counted when is the caches' business (`mem_cache`). Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from sglang.srt.observability.metric_factory import MetricFactory

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

_PAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_GB_PER_S = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
_SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1, 3, 10)

_TREE = ("cache_type",)
_POOL = ("cache_type", "pool")
_STORAGE = ("cache_type", "storage_backend")


class _Row(NamedTuple):
    doc: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


_COUNTERS: dict[str, _Row] = {
    "evicted_tokens": _Row("Tokens that left the device.", _TREE),
    "load_back_tokens": _Row("Tokens copied from the host to the device.", _POOL),
    "load_back_bytes": _Row("Bytes copied from the host to the device.", _POOL),
    "hicache_backup_tokens": _Row("Tokens copied from the device to the host.", _POOL),
    "hicache_backup_bytes": _Row("Bytes copied from the device to the host.", _POOL),
    "hicache_dropped_tokens": _Row(
        "Tokens that left the cache without a copy.", (*_POOL, "reason")
    ),
    "prefetched_tokens": _Row("Tokens read from storage and kept.", _STORAGE),
    "backuped_tokens": _Row("Tokens written to storage.", _STORAGE),
    "storage_prefetch_hit_tokens": _Row("Tokens of queued prompts that storage has.", _STORAGE),
    "storage_prefetch_unfulfilled_tokens": _Row(
        "Of those, tokens that were not fetched or of no use.", (*_STORAGE, "reason")
    ),
    "storage_prefetch_deferred_tokens": _Row(
        "Tokens that storage was not asked for when their request came.", (*_STORAGE, "reason")
    ),
    "hicache_damaged_pages": _Row(
        "Pages found damaged in storage, or not what their names say; removed.", _STORAGE
    ),
    "storage_read_bytes": _Row("Bytes of KV read from storage.", _STORAGE),
    "storage_read_seconds": _Row("Seconds in which storage was read.", _STORAGE),
    "storage_write_bytes": _Row("Bytes of KV handed to storage.", _STORAGE),
    "storage_write_seconds": _Row("Seconds in which storage was written.", _STORAGE),
    "storage_io_errors": _Row("Calls and transfers of storage that failed.", _STORAGE),
    "storage_outages": _Row("Times that storage went away.", _STORAGE),
    "storage_dropped_pages": _Row(
        "Pages that were to be written to storage and were not.", _STORAGE
    ),
}

_HISTOGRAMS: dict[str, _Row] = {
    "eviction_duration_seconds": _Row("Seconds of an eviction.", _TREE, _SECONDS),
    "load_back_duration_seconds": _Row(
        "Seconds from the decision to load from the host until all is there.", _TREE, _SECONDS
    ),
    "hicache_backup_duration_seconds": _Row(
        "Seconds from the decision to copy to the host until all is there.", _TREE, _SECONDS
    ),
    "prefetch_pgs": _Row("Pages of a read from storage.", _STORAGE, _PAGES),
    "backup_pgs": _Row("Pages of a write to storage.", _STORAGE, _PAGES),
    "prefetch_bandwidth": _Row("GB/s of a read from storage.", _STORAGE, _GB_PER_S),
    "backup_bandwidth": _Row("GB/s of a write to storage.", _STORAGE, _GB_PER_S),
}


class CacheMetrics:
    """All of them, for one scheduler."""

    def __init__(self, make: MetricFactory, labels: Mapping[str, str]) -> None:
        self._labels = dict(labels)
        self._counters: dict[str, Counter] = {
            name: make.counter(name, row.doc, *row.labels) for name, row in _COUNTERS.items()
        }
        self._histograms: dict[str, Histogram] = {
            name: make.histogram(name, row.doc, row.buckets, *row.labels)
            for name, row in _HISTOGRAMS.items()
        }

    def count(self, name: str, amount: float, **labels: str) -> None:
        """Add to a counter, or observe a value of a histogram, by its name."""
        histogram = self._histograms.get(name)
        if histogram is not None:
            histogram.labels(**self._labels, **labels).observe(amount)
        else:
            self._counters[name].labels(**self._labels, **labels).inc(amount)
