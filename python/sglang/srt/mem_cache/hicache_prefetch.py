"""Life of the fetches storage -> host: ask, decide on the hit, stop, insert, abort.

Owns the table of prefetches, their capacity, and when one ends. Does not own the queries and reads
(``storage_io.py``), the order of the tick (``hicache_base.py``) nor the copies
between host and device (``hicache_tiers.py``). Scheduler thread only; no collective.

One prefetch:

    asked for -> queried -> hit drained -> allocated -> reading -> taken at a tick -> in the tree
        \\__________\\___________\\__ revoked            \\________ aborted

Host pages of a prefetch, and who frees them; [0, usable) is what all ranks have:

    [0, usable)         the tree's; those of tokens that the tree has already are freed at once
    [usable, completed) this thread puts them into the release queue
    [completed, end)    the I/O side puts them into the release queue after its last touch

Pages of pools with slots of their own are all the tree's or all released: a span is of use only
whole where such pools are (``PrefetchOperation``).

A request whose pages another one's prefetch brings waits for that instead of asking for them again
(`_prefetch_ahead`); when it has ended, whoever queues the request asks for what is still missing.

Pages go through the release queues one an item, so that ranks whose reads got differently far free
the same number at the same tick. Entries are (request, attempt): results of an earlier attempt of
the same request find no entry.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from sglang.srt.mem_cache.base_prefix_cache import CacheInitParams
from sglang.srt.mem_cache.cache_metrics import Unfulfilled
from sglang.srt.mem_cache.hicache_records import (
    FetchedSpan,
    FollowedPrefetch,
    PrefetchEntry,
)
from sglang.srt.mem_cache.hicache_tiers import HiCacheTiers
from sglang.srt.mem_cache.page_key import TOKEN_BYTES, PageHash, RadixKey, TokenIds, pack_tokens
from sglang.srt.mem_cache.pool_transfer import PoolName, SpanPages
from sglang.srt.mem_cache.storage.extra_config import ExtraConfig, PrefetchOptions
from sglang.srt.mem_cache.storage_threads import PoolSlots, PrefetchOperation
from sglang.srt.mem_cache.tree_components.base import ComponentType, InvariantError, TreeNode

logger = logging.getLogger(__name__)


class HiCachePrefetch(HiCacheTiers):
    """The tree with a host tier that storage fills."""

    default_storage_options: ClassVar[PrefetchOptions] = PrefetchOptions()

    def __init__(
        self,
        params: CacheInitParams,
        components: Sequence[ComponentType] = (ComponentType.FULL,),
    ) -> None:
        super().__init__(params, components)
        self.prefetch_stop_policy = (
            "best_effort" if params.hicache is None else params.hicache.prefetch_policy
        )
        self.storage_options = self.default_storage_options
        self._attached_config: ExtraConfig | None = None  # as the user gave it
        self._reported_totals: defaultdict[str, float] = defaultdict(float)  # of storage, by metric
        self.ongoing_prefetch: dict[str, PrefetchEntry] = {}
        self.prefetch_loaded_tokens_by_reqid: dict[str, int] = {}
        # Requests that wait for another one's prefetch.
        self._following: dict[str, FollowedPrefetch] = {}
        self._num_attempts = 0
        # Pages that have left a table of this thread and are to come back through the release
        # queue, less those that came back; below 0 when they come back first.
        self._returning_pages: Counter[PoolName] = Counter()
        self._storage_is_paused = False  # a weight update is under way

    @property
    @abstractmethod
    def enable_storage(self) -> bool:
        """Whether a storage backend is attached."""

    @property
    def prefetch_threshold(self) -> int:
        """Tokens below which a hit is not fetched."""
        return self.storage_options.prefetch_threshold

    @property
    def prefetch_capacity_limit(self) -> int:
        """Tokens that may be asked for at a time: a share of the host pool, whatever its size."""
        return self.cache_controller.prefetch_capacity_limit

    @property
    def prefetch_tokens_occupied(self) -> int:
        """Tokens that the prefetches under way have asked for."""
        return self.cache_controller.prefetch_tokens_occupied

    def prefetch_rate_limited(self) -> bool:
        """Whether enough is being fetched already."""
        return self.cache_controller.prefetch_rate_limited()

    def prefetch_timeout_s(self, num_tokens: int) -> float:
        """Return the seconds that a prefetch of so many tokens may take under ``timeout``."""
        options = self.storage_options
        allowed = options.prefetch_timeout_base
        allowed += options.prefetch_timeout_per_ki_token * num_tokens / 1024
        return min(options.prefetch_timeout_max, allowed)

    # -- begin -------------------------------------------------------------------------------------

    def prefetch_from_storage(
        self,
        rid: str,
        last_host_node: TreeNode | None,
        new_input_tokens: TokenIds,
        last_hash: PageHash | None = None,
        prefix_keys: list[PageHash] | None = None,
        *,
        extra_key: str | None = None,
        matched_node: TreeNode | None = None,
    ) -> None:
        """Begin to fetch what continues the match of a request.

        ``new_input_tokens`` (raw) begin where the match ended and end where the key of the match
        does, so that nothing is fetched that could not be matched. ``matched_node``: where the
        match ended (``best_match_node``); without it the tokens continue ``last_host_node``. Where
        that node is not on the host, the fetch begins at the deepest one above it that is, and
        the pages in between become the host copies of what only the device has. So ``last_hash``
        and ``prefix_keys`` are computed here: they belong to where the fetch begins.
        ``extra_key``: the request's namespace; the root has none to offer.

        Does nothing where storage is off or paused, the tokens behind the match are fewer than the
        threshold or enough is being fetched. An earlier attempt of the same request is given up.
        Where a prefetch under way begins with the same pages, the request waits for that one first.
        """
        followed = self._following.get(rid)
        self.release_aborted_request(rid)
        if not self.enable_storage or self._storage_is_paused:
            return
        anchor = matched_node or last_host_node or self.root_node
        unsaved: list[TreeNode] = []
        while not anchor.backuped and anchor.parent is not None:
            unsaved.append(anchor)
            anchor = anchor.parent
        # A node's raw tokens, without those that the next node repeats.
        raw = b"".join(node.key.raw[: len(node.key) * TOKEN_BYTES] for node in reversed(unsaved))
        key = self.make_key(raw + pack_tokens(new_input_tokens), extra_key)
        key = key.page_aligned(self.page_size)
        if anchor is not self.root_node and anchor.key.namespace != key.namespace:
            return
        num_unsaved = sum(len(node.key) for node in unsaved)
        if not self._is_worth_it(len(key), num_unsaved):
            return
        ahead = None if followed else self._prefetch_ahead(anchor, key, num_unsaved)
        if ahead is not None:
            self._following[rid] = FollowedPrefetch(
                rid=ahead.operation.request_id,
                attempt=ahead.attempt,
                start_time=self.hicache.clock(),
            )
        elif self.prefetch_rate_limited():
            self._count_storage("storage_prefetch_deferred_tokens", len(key), reason="rate_limited")
        else:
            # Storage that is slow for two in a row is waited for once.
            start_time = followed.start_time if followed else self.hicache.clock()
            self._begin_prefetch(rid, anchor, key, num_unsaved, start_time)

    def _prefetch_ahead(
        self, anchor: TreeNode, key: RadixKey, num_unsaved: int
    ) -> PrefetchEntry | None:
        """The prefetch under way that brings enough of what continues ``anchor`` with ``key``."""
        for entry in self.ongoing_prefetch.values():
            if (
                entry.anchor.node is anchor
                and not entry.is_stopping
                and entry.key.namespace == key.namespace
                and self._is_worth_it(entry.key.match(key, self.page_size), num_unsaved)
            ):
                return entry
        return None

    def _is_worth_it(self, num_tokens: int, num_unsaved: int) -> bool:
        """Whether to fetch so many tokens, of which the device has the first ``num_unsaved``."""
        return num_tokens - num_unsaved >= max(self.prefetch_threshold, 1)

    def _begin_prefetch(
        self, rid: str, anchor: TreeNode, key: RadixKey, num_unsaved: int, start_time: float
    ) -> None:
        hashes_before = self.page_hashes(anchor)
        prefix_keys = None
        if self.storage_options.hicache_storage_pass_prefix_keys:
            prefix_keys = tuple(self.path_hashes(anchor))
        self._num_attempts += 1
        operation = self.cache_controller.prefetch(
            rid,
            self._num_attempts,
            key,
            hashes_before[-1] if hashes_before else None,
            prefix_keys,
        )
        self.cache_controller.prefetch_tokens_occupied += len(key)
        self.ongoing_prefetch[rid] = PrefetchEntry(
            operation=operation,
            attempt=self._num_attempts,
            anchor=self._take_host_lock(anchor),
            key=key,
            num_tokens=len(key),
            num_unsaved=num_unsaved,
            start_time=start_time,
        )

    def path_hashes(self, node: TreeNode) -> list[PageHash]:
        """Return the hashes of all pages from the root to the end of ``node``."""
        path: list[TreeNode] = []
        current = node
        while current.parent is not None:
            path.append(current)
            current = current.parent
        return [page_hash for part in reversed(path) for page_hash in self.page_hashes(part)]

    # -- the hit -----------------------------------------------------------------------------------

    def _drain_and_alloc_storage_hit(self, operation: PrefetchOperation) -> None:
        """Decide on one query's result: host pages for what was found, or nothing."""
        entry = self.ongoing_prefetch.get(operation.request_id)
        if entry is None or entry.attempt != operation.attempt:
            return  # given up meanwhile, perhaps for a later attempt of the same request
        num_hit = operation.storage_hit_count
        self._count_storage("storage_prefetch_hit_tokens", num_hit)
        if operation.is_terminated:
            self._count_unfulfilled(num_hit, Unfulfilled.DROPPED)
            self._revoke_pending_prefetch(entry)
            return
        if not self._is_worth_it(num_hit, entry.num_unsaved):
            logger.debug(
                "Prefetch of %s revoked: %d tokens in storage, %d on the device, threshold %d",
                operation.request_id,
                num_hit,
                entry.num_unsaved,
                self.prefetch_threshold,
            )
            self._count_unfulfilled(num_hit, Unfulfilled.BELOW_THRESHOLD)
            self._revoke_pending_prefetch(entry)
            return
        num_pages = self._alloc_hit(operation, entry.num_unsaved)
        self._count_unfulfilled(num_hit - num_pages * self.page_size, Unfulfilled.HOST_CAPACITY)
        if num_pages == 0:
            logger.debug("Prefetch of %s revoked: no room on the host", operation.request_id)
            self._revoke_pending_prefetch(entry)
            return
        operation.storage_hit_count = num_pages * self.page_size
        operation.hash_value = operation.hash_value[:num_pages]
        self.cache_controller.prefetch_buffer.put(operation)

    def _alloc_hit(self, operation: PrefetchOperation, num_unsaved: int) -> int:
        """Give an operation host slots for its hit, or for the longest usable part of it that has
        room and is worth it; return its pages, 0 for none."""
        page, pool = self.page_size, self.cache_controller.mem_pool_host
        num_pages = operation.storage_hit_count // page
        if self._alloc_pages(operation, num_pages):
            return num_pages
        self.evict_host(num_pages * page - pool.available_size())
        self._make_host_room(self._extra_sizes(num_pages))
        if self._alloc_pages(operation, num_pages):
            return num_pages
        fits = operation.usable_pages(min(num_pages, pool.available_size() // page))
        is_worth_it = self._is_worth_it(fits * page, num_unsaved)
        return fits if is_worth_it and self._alloc_pages(operation, fits) else 0

    def _extra_sizes(self, num_pages: int) -> dict[PoolName, int]:
        """Return how many host slots a span of so many pages needs in pools with their own."""
        return {
            entry.name: len(entry.rule.needed(num_pages)) * entry.host_pool.page_size
            for entry in self.cache_controller.host_pools.own_slot_entries
        }

    def _alloc_pages(self, operation: PrefetchOperation, num_pages: int) -> bool:
        """Give an operation host slots in all pools, or none."""
        group = self.cache_controller.host_pools
        taken = group.alloc(num_pages * self.page_size, self._extra_sizes(num_pages))
        if taken is None:
            return False
        operation.host_indices = taken[group.anchor.name]
        operation.extra = tuple(
            SpanPages(
                name=entry.name,
                positions=tuple(entry.rule.needed(num_pages)),
                host_indices=taken[entry.name],
            )
            for entry in group.own_slot_entries
        )
        return True

    def _revoke_pending_prefetch(self, entry: PrefetchEntry) -> None:
        """End a prefetch that has no host pages yet."""
        if entry.is_allocated:
            raise InvariantError(f"prefetch of {entry.operation.request_id} has host pages")
        entry.operation.terminate()
        self._release_reservations(entry)
        self._forget_prefetch(entry)

    def _forget_prefetch(self, entry: PrefetchEntry) -> None:
        """The one end of every prefetch: anchor, table, capacity."""
        del self.ongoing_prefetch[entry.operation.request_id]
        self._return_host_lock(entry.anchor)
        self.cache_controller.prefetch_tokens_occupied -= entry.num_tokens
        if self.prefetch_tokens_occupied < 0:
            raise InvariantError(f"{self.prefetch_tokens_occupied} tokens are being prefetched")

    # -- the end -----------------------------------------------------------------------------------

    def _is_overdue(self, entry: PrefetchEntry) -> bool:
        """Whether the policy's clock says stop; best_effort stops when the request is reached."""
        if self.prefetch_stop_policy == "best_effort":
            return False
        allowed_s = self.prefetch_timeout_s(entry.num_tokens)
        if self.prefetch_stop_policy == "wait_complete":
            # Storage that hangs must not hold a request for ever.
            allowed_s += self.storage_options.prefetch_timeout_max
        return self.hicache.clock() - entry.start_time > allowed_s

    def check_prefetch_progress(self, rid: str) -> bool:
        """See ``BasePrefixCache``: a look at what was decided; no collective.

        Under best_effort getting here is what stops the prefetch; what it has read by then is taken
        at the next tick.
        """
        followed = self._following.get(rid)
        if followed is not None:
            return self._may_leave(rid, followed)
        entry = self.ongoing_prefetch.get(rid)
        if entry is None:
            return True
        if self.prefetch_stop_policy == "best_effort":
            self.terminate_prefetch(rid)
        return rid not in self.ongoing_prefetch

    def _may_leave(self, rid: str, followed: FollowedPrefetch) -> bool:
        """Whether a request need not wait for another one's prefetch any longer."""
        if self.prefetch_stop_policy == "best_effort":
            del self._following[rid]
            return True
        entry = self.ongoing_prefetch.get(followed.rid)
        return entry is None or entry.attempt != followed.attempt

    def has_followed_prefetch(self, rid: str) -> bool:
        """See ``BasePrefixCache``."""
        return rid in self._following

    def terminate_prefetch(self, rid: str) -> None:
        """See ``BasePrefixCache``. One without host pages is over; else the next tick takes it."""
        entry = self.ongoing_prefetch.get(rid)
        if entry is None:
            return
        if not entry.is_allocated:
            self._revoke_pending_prefetch(entry)
        elif not entry.is_stopping:
            completed = entry.operation.terminate()
            self.ongoing_prefetch[rid] = replace(entry, is_stopping=True)
            if self.hicache.min_reduce is None:
                self._finish_prefetch(entry, completed)  # nobody to agree with

    def _finish_prefetch(self, entry: PrefetchEntry, num_usable: int) -> None:
        """Insert what every rank has of a prefetch and end it."""
        operation = entry.operation
        host_indices = operation.host_indices
        if host_indices is None:
            raise InvariantError(f"prefetch of {operation.request_id} has no host pages")
        completed = operation.terminate()
        usable = num_usable // self.page_size * self.page_size
        lack = Unfulfilled.STORAGE_TRANSFER if operation.has_failed else Unfulfilled.DEADLINE
        if operation.extra and usable < len(host_indices):
            # What other pools need was read for the planned end only.
            usable, lack = 0, Unfulfilled.AUX_WINDOW_TRIM
        if entry.key.weights_fingerprint != self.weights_fingerprint:
            usable, lack = 0, Unfulfilled.DROPPED  # nobody can match it any more
        self._count_unfulfilled(len(host_indices) - usable, lack)
        self._count_transfer("prefetch", completed, operation.io_seconds)
        num_loaded = 0
        if usable:
            span = FetchedSpan(
                key=entry.key[:usable],
                host_indices=host_indices[:usable],
                hashes=operation.hash_value[: usable // self.page_size],
                extra=operation.extra,
            )
            num_loaded = self._insert_fetched(entry.anchor.node, span)
        else:
            self._release_reservations(entry)
            self._count_returning(operation.extra)
        self._queue_release({PoolName.KV: host_indices[usable:completed]})
        self._returning_pages[PoolName.KV] += (len(host_indices) - usable) // self.page_size
        rid = operation.request_id
        self._forget_prefetch(entry)
        self.prefetch_loaded_tokens_by_reqid[rid] = num_loaded
        self._count_unfulfilled(usable - num_loaded, Unfulfilled.DEVICE_OVERLAP)
        self._count_storage("prefetched_tokens", num_loaded)

    def _count_storage(self, name: str, amount: float, **labels: str) -> None:
        """Add to a metric of the attached storage, or observe a value."""
        backend = self.cache_controller.storage_backend_type
        self._count(name, amount, storage_backend=backend or "", **labels)

    def _count_unfulfilled(self, num_tokens: int, reason: Unfulfilled) -> None:
        if num_tokens:
            self._count_storage("storage_prefetch_unfulfilled_tokens", num_tokens, reason=reason)

    def _count_transfer(self, what: str, num_tokens: int, seconds: float) -> None:
        """Observe the size and the speed of one read (``prefetch``) or write (``backup``)."""
        if not num_tokens or not seconds:
            return
        num_bytes = num_tokens * self.cache_controller.host_pools.bytes_per_token
        self._count_storage(f"{what}_pgs", num_tokens // self.page_size)
        self._count_storage(f"{what}_bandwidth", num_bytes / seconds / 1e9)

    def _queue_release(self, slots: PoolSlots) -> None:
        """Put host pages into the release queues, one an item."""
        self.cache_controller.release_pages(slots)

    def _count_returning(self, extra: Sequence[SpanPages]) -> None:
        for pages in extra:
            self._returning_pages[pages.name] += len(pages.positions)

    @property
    def _num_returning_pages(self) -> int:
        """Pages of all pools that are to come back."""
        return self._returning_pages.total()

    def pop_prefetch_loaded_tokens(self, rid: str) -> int:
        """See ``BasePrefixCache``."""
        self._following.pop(rid, None)
        return self.prefetch_loaded_tokens_by_reqid.pop(rid, 0)

    def release_aborted_request(self, rid: str) -> None:
        """See ``BasePrefixCache``; idempotent."""
        self.prefetch_loaded_tokens_by_reqid.pop(rid, None)
        self._following.pop(rid, None)
        entry = self.ongoing_prefetch.get(rid)
        if entry is not None:
            self._abort_prefetch(entry)

    def _abort_prefetch(self, entry: PrefetchEntry) -> None:
        host_indices = entry.operation.host_indices
        if host_indices is None:
            self._revoke_pending_prefetch(entry)
            return
        completed = entry.operation.terminate()
        self._count_unfulfilled(len(host_indices), Unfulfilled.DROPPED)
        self._queue_release({PoolName.KV: host_indices[:completed]})
        self._returning_pages[PoolName.KV] += len(host_indices) // self.page_size
        self._release_reservations(entry)
        self._count_returning(entry.operation.extra)
        self._forget_prefetch(entry)

    def _abort_all_prefetches(self) -> None:
        for entry in list(self.ongoing_prefetch.values()):
            self._abort_prefetch(entry)
