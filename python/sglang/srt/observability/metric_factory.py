"""Makes Prometheus metrics that share a prefix and labels.

`prometheus_client` decides at its first import whether several processes share their metrics, so it
is imported when a factory is made, not when this module is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "sglang:"


class MetricFactory:
    """Makes metrics that share a prefix and labels."""

    def __init__(
        self, labels: Mapping[str, str], registry: CollectorRegistry | None = None
    ) -> None:
        """`registry`: for tests; by default the process's own, or the shared files alone."""
        import prometheus_client

        prometheus_client.disable_created_metrics()
        self._client = prometheus_client
        self.labels = dict(labels)
        self._names = list(self.labels)
        if registry is None and not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            registry = prometheus_client.REGISTRY
        # In multiprocess mode the files are what is collected; registering would only forbid a
        # second engine in this process.
        self._registry = registry

    def gauge(self, name: str, doc: str, *extra: str) -> Gauge:
        return self._client.Gauge(
            PREFIX + name,
            doc,
            [*self._names, *extra],
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )

    def counter(self, name: str, doc: str, *extra: str) -> Counter:
        """`name` without `_total`, which the client library appends."""
        return self._client.Counter(
            PREFIX + name, doc, [*self._names, *extra], registry=self._registry
        )

    def histogram(self, name: str, doc: str, buckets: Sequence[float], *extra: str) -> Histogram:
        return self._client.Histogram(
            PREFIX + name, doc, [*self._names, *extra], registry=self._registry, buckets=buckets
        )
