"""Records of the hierarchical cache: its parameters, what is under way, who holds what.

Owns values only. The tables of these records live in ``hicache_tiers.py``, ``hicache_prefetch.py``
and ``hicache_base.py``; a record never changes, it is replaced. Scheduler thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.page_key import CacheIdentity, PageHash, RadixKey
from sglang.srt.mem_cache.pool_transfer import SpanPages
from sglang.srt.mem_cache.storage_control import MinReduce
from sglang.srt.mem_cache.storage_threads import PrefetchOperation
from sglang.srt.mem_cache.tree_components.base import ComponentType, TreeNode

WRITE_POLICIES = ("write_through", "write_through_selective", "write_back")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")

# Loading fewer tokens than this behind a resident prefix costs more than computing them.
LOAD_BACK_THRESHOLD = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheParams:
    """What a hierarchical cache is made from.

    ``identity``: what the cached bytes are a function of, without namespace and weights (both are
    taken from the key of a page). ``min_reduce``: element-wise MIN over the ranks that must stay in
    step, a collective; None for a single rank. ``storage_backend``: attached at once when given;
    ``storage_extra_config``: its configuration, JSON text or ``@file``. ``clock``: seconds,
    monotonic.
    """

    controller: HiCacheController
    identity: CacheIdentity
    write_policy: str = "write_through"
    prefetch_policy: str = "timeout"
    storage_backend: str | None = None
    storage_extra_config: str | None = None
    load_back_threshold: int = LOAD_BACK_THRESHOLD
    min_reduce: MinReduce | None = None
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLock:
    """The host copies of one node that a transfer keeps in place; says what was taken."""

    node: TreeNode
    taken: tuple[ComponentType, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteThroughEntry:
    """A copy device -> host under way.

    ``locked``: the node whose path is locked on the device, None for a copy that is waited for.
    ``nodes``: what the copy covers, from the root down; more than one after a split.
    """

    locked: TreeNode | None
    nodes: tuple[TreeNode, ...]
    backup_len: int
    start_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBackEntry:
    """A copy host -> device under way that ends at ``node``; its device path is locked."""

    node: TreeNode
    host_lock: HostLock
    num_tokens: int
    start_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BackupEntry:
    """A write host -> storage under way.

    ``nodes``: what it covers, from the root down; the pages are the *last* ``num_pages`` of theirs.
    ``extra``: what goes with them in pools with slots of their own.
    """

    nodes: tuple[TreeNode, ...]
    num_pages: int
    host_lock: HostLock
    extra: tuple[SpanPages, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchEntry:
    """A fetch storage -> host under way for one attempt of a request.

    ``key`` continues ``anchor``. ``num_tokens``: what it counts against the capacity.
    ``num_unsaved``: leading tokens that the device had when it began, and the host had not.
    ``is_stopping``: its progress is frozen and taken at the next tick.
    """

    operation: PrefetchOperation
    attempt: int
    anchor: HostLock
    key: RadixKey
    num_tokens: int
    num_unsaved: int
    start_time: float
    is_stopping: bool = False

    @property
    def is_allocated(self) -> bool:
        """Whether it has host pages."""
        return self.operation.host_indices is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedPrefetch:
    """Another request's prefetch that one waits for since ``start_time``, on the tree's clock."""

    rid: str
    attempt: int
    start_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedSpan:
    """Pages from storage to insert: ``key`` below an anchor, one host slot a token.

    ``extra``: pages of pools with slots of their own, all that a prefix ending here needs.
    """

    key: RadixKey
    host_indices: torch.Tensor
    hashes: list[PageHash]
    extra: tuple[SpanPages, ...] = ()
