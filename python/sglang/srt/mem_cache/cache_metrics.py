"""What a cache tells its metrics: the hook, and why fetched tokens are fewer than found ones.

Names are those of ``observability/cache_metrics.py``, without prefix and ``_total``. Values only.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class MetricsHook(Protocol):
    """Called with a metric's name, an amount to add or to observe, and its own labels."""

    def __call__(self, name: str, amount: float, **labels: str) -> None: ...


def ignore_metric(name: str, amount: float, **labels: str) -> None:
    """The hook of a cache that nobody measures."""


class Unfulfilled(StrEnum):
    """Why tokens that storage has were not fetched, or of no use when they were."""

    BELOW_THRESHOLD = "below_threshold"  # too few to be worth it
    HOST_CAPACITY = "host_capacity"  # no host pages for them
    STORAGE_TRANSFER = "storage_transfer"  # reading failed
    DEADLINE = "deadline"  # the request's turn, or its time-out, came first
    AUX_WINDOW_TRIM = "aux_window_trim"  # what a window or a recurrent state needs did not come
    DEVICE_OVERLAP = "device_overlap"  # computed here meanwhile
    DROPPED = "dropped"  # the request was aborted, or the weights changed
