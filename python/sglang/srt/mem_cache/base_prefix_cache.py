"""Interface of every prefix cache: what the scheduler may ask, and with what.

Owns the parameter and result types, the request Protocol and the no-op defaults of all
hierarchical-cache calls: the scheduler calls them always and never asks which cache it has.
All methods run on the scheduler thread.

Life of a request's slots, as the caller must drive it:

1. ``match_prefix`` -> set ``req.prefix_indices``, ``req.last_node`` and
   ``req.cache_protected_len = len(prefix_indices)``; ``inc_lock_ref(req.last_node)`` on admission.
2. take a row and slots, write them to the row, run; raise ``kv_allocated_len`` when slots are
   taken, ``kv_committed_len`` when their KV is there to stay.
3. after a prefill chunk ``cache_unfinished_req``; at the end (finish, abort, retract)
   ``cache_finished_req``, then ``req_to_token_pool.free(req.req_pool_idx)`` by the caller.
"""

# ruff: noqa: B027  (the empty methods are defaults that a cache without tiers keeps)
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.backend_opening import BackendOpening
from sglang.srt.mem_cache.cache_metrics import MetricsHook, ignore_metric
from sglang.srt.mem_cache.events import KVEvent
from sglang.srt.mem_cache.hicache_records import HiCacheParams
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.page_key import PageHash, RadixKey, TokenIds
from sglang.srt.mem_cache.state_snapshots import PrefillSpan, StatePlan, StateSnapshots
from sglang.srt.mem_cache.swa_allocator import swa_part
from sglang.srt.mem_cache.tree_components.base import TreeNode
from sglang.srt.utils.attempt import AttemptState

# `CacheableReq.kv_fingerprint` of KV that no cache may take.
MIXED_WEIGHTS = "mixed"


class CacheableReq(Protocol):
    """What a cache reads and writes of a request.

    Slots of the request's row: [0, cache_protected_len) belong to the tree and are locked through
    ``last_node``; [cache_protected_len, kv_allocated_len) are the request's own; KV is final in
    [0, kv_committed_len).
    """

    prefix_indices: torch.Tensor  # int64 CPU; slots whose KV the next forward need not compute
    last_node: TreeNode | None  # None: holds no lock
    cache_protected_len: int
    kv_committed_len: int
    kv_allocated_len: int

    @property
    def rid(self) -> str:
        """Name for messages."""

    @property
    def origin_input_ids(self) -> Sequence[int]:
        """The prompt; an ``array('i')`` is read fastest."""

    @property
    def output_ids(self) -> Sequence[int]:
        """The tokens generated so far."""

    @property
    def req_pool_idx(self) -> int | None:
        """Row in the request table, None while it has none."""

    @property
    def extra_key(self) -> str | None:
        """Namespace: requests that differ here share nothing."""

    @property
    def priority(self) -> int | None:
        """Priority of what it leaves in the tree (policy ``priority``)."""

    @property
    def kv_fingerprint(self) -> str | None:
        """The cache's ``weights_fingerprint`` when this request's KV began.

        Set by the scheduler at match time; None: not tracked; MIXED_WEIGHTS: others came since.
        KV that spans two fingerprints is never inserted.
        """


StateCapture = Callable[[CacheableReq, int], torch.Tensor | None]
"""Copies a request's recurrent state after so many tokens to a fresh slot of the state allocator.

Returns the slot, int64 [1], or None where that state is not at hand or no slot is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInitParams:
    """What a cache is made from.

    ``disable``: no prefix reuse; ``is_eagle``: bigram keys; ``lookahead``: tokens after its own
    that KV of a position is a function of (None: 1 with ``is_eagle``); ``weights_fingerprint``:
    content digest of the loaded weights, part of every key; ``hicache``: the tiers behind the
    device, None without; ``enable_kv_cache_events``: record what comes and goes, for
    ``take_events``; ``metrics``: receives counts;
    ``state_allocator``, ``capture_state``: slots of recurrent-state snapshots and how they are
    made, for a tree with that component; ``state_snapshots``: the owner of both where the forward
    pass takes the snapshots, None where the caller does.
    """

    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    page_size: int
    disable: bool = False
    eviction_policy: str = "lru"
    is_eagle: bool = False
    lookahead: int | None = None
    weights_fingerprint: str | None = None
    hicache: HiCacheParams | None = None
    enable_kv_cache_events: bool = False
    metrics: MetricsHook = ignore_metric
    state_allocator: BaseTokenToKVPoolAllocator | None = None
    capture_state: StateCapture | None = None
    state_snapshots: StateSnapshots | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchPrefixParams:
    """``key``: tokens to look up, at most what may be reused (the caller caps it)."""

    key: RadixKey


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchResult:
    """What is cached of a key.

    ``device_indices``: int64 CPU, whole pages; ``last_device_node``: where they end (to lock);
    ``host_hit_length``: tokens behind them that a load back adds; ``last_host_node``: deepest
    backed-up node, anchor of a prefetch; ``best_match_node``: where a load back would end;
    ``known_len``: tokens of the key that nodes cover, of use or not.
    Nodes are None for a cache without a tree.
    """

    device_indices: torch.Tensor
    last_device_node: TreeNode | None
    last_host_node: TreeNode | None
    best_match_node: TreeNode | None
    host_hit_length: int = 0
    known_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertParams:
    """``value``: slots int64 [>= page-aligned len(key)]; ``is_chunked``: more will follow.

    ``state_slot``: int64 [1], a snapshot of the recurrent state at the key's end.
    """

    key: RadixKey
    value: torch.Tensor
    priority: int = 0
    is_chunked: bool = False
    state_slot: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InsertResult:
    """``prefix_len``: leading tokens whose slots the tree already had (``value``'s are duplicates).

    The slots from ``prefix_len`` to the page-aligned end belong to the tree now. ``node``: where
    the key ends. ``is_state_taken``: whether the tree owns ``state_slot`` now.
    """

    prefix_len: int
    node: TreeNode | None
    is_state_taken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictParams:
    """How much to free at least, where it can be: slots, and window rows beside them."""

    num_tokens: int
    num_swa_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictResult:
    """How much was freed; may exceed the wish by less than one node, or fall short."""

    num_tokens_evicted: int
    num_swa_tokens_evicted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBackParams:
    """``best_match_node``/``host_hit_length`` of the match; ``mem_quota``: tokens it may take."""

    best_match_node: TreeNode | None
    last_device_node: TreeNode | None
    host_hit_length: int
    mem_quota: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBackResult:
    """``device_indices``: slots added behind the device prefix; ``last_node``: the new end."""

    device_indices: torch.Tensor
    last_node: TreeNode | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolUsage:
    """Slots of a pool beside the one of full KV: free ones, and what the tree could give up."""

    total: int
    available: int
    evictable: int

    @property
    def used(self) -> int:
        """What requests hold: neither free nor merely cached."""
        return self.total - self.available - self.evictable


class BasePrefixCache(ABC):
    """A cache of token prefixes over one slot allocator. Scheduler thread only."""

    def __init__(self, params: CacheInitParams) -> None:
        if params.page_size != params.token_to_kv_pool_allocator.page_size:
            raise ValueError(
                f"page size {params.page_size} of the cache is not the allocator's "
                f"{params.token_to_kv_pool_allocator.page_size}"
            )
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size = params.page_size
        self.disable = params.disable  # nothing is ever reused
        self._swa_allocator = swa_part(params.token_to_kv_pool_allocator)
        # Row of a request -> where its own window rows begin that it has not given back.
        self._window_starts: dict[int, int] = {}
        # Tokens after its own that a unit of a key holds; 1: bigrams.
        self.lookahead = int(params.is_eagle) if params.lookahead is None else params.lookahead
        # Namespace of new keys; see ``set_weights_fingerprint``.
        self.weights_fingerprint = params.weights_fingerprint
        self._metrics = params.metrics

    # -- the tree ---------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget everything. The caller clears allocator and request table."""
        self._window_starts.clear()

    @abstractmethod
    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest cached prefix in whole pages. Mutates: may split a node, refreshes."""

    @abstractmethod
    def insert(self, params: InsertParams) -> InsertResult:
        """Hand slots to the tree; see ``InsertResult`` for who owns what afterwards."""

    @abstractmethod
    def cache_unfinished_req(self, req: CacheableReq, chunked: bool = False) -> None:
        """Insert the request's committed whole pages and go on using the tree's slots.

        Frees duplicates, rewrites the row, moves the lock to the new end, sets
        ``prefix_indices`` (all committed slots), ``last_node`` and ``cache_protected_len``. Counts
        as no use of the path: the request's end does, once, whatever chunks it came in.
        """

    @abstractmethod
    def cache_finished_req(self, req: CacheableReq, is_insert: bool = True) -> None:
        """End the request's use of slots: insert (or not), free the rest, unlock.

        Afterwards the request holds nothing (``last_node`` None, lengths 0, empty
        ``prefix_indices``); a second call does nothing. The caller frees the row.
        """

    @abstractmethod
    def evict(self, params: EvictParams | int) -> EvictResult:
        """Free unlocked slots, leaves first, in the policy's order."""

    @abstractmethod
    def inc_lock_ref(self, node: TreeNode | None) -> int:
        """Protect the path to ``node``; return the change of the evictable size (<= 0)."""

    @abstractmethod
    def dec_lock_ref(self, node: TreeNode | None) -> int:
        """Undo one ``inc_lock_ref``; return the change of the evictable size (>= 0)."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Return device tokens in the tree that eviction may free."""

    @abstractmethod
    def protected_size(self) -> int:
        """Return device tokens in the tree that locks hold."""

    def swa_evictable_size(self) -> int:
        """Return window rows in the tree that eviction may free."""
        return 0

    def swa_protected_size(self) -> int:
        """Return window rows in the tree that locks hold."""
        return 0

    def side_pools(self) -> dict[str, PoolUsage]:
        """Return the device pools that a model has beside that of full KV, by the part's name."""
        windows = self._swa_allocator
        if windows is None:
            return {}
        return {
            "swa": PoolUsage(
                total=windows.size_swa,
                available=windows.available_swa_size(),
                evictable=self.swa_evictable_size(),
            )
        }

    def total_size(self) -> int:
        """Return device tokens in the tree."""
        return self.evictable_size() + self.protected_size()

    @abstractmethod
    def check_invariants(self, num_private_slots: int | None = None) -> None:
        """Walk everything and raise InvariantError on the first contradiction.

        ``num_private_slots``: slots (whole pages) that running requests own themselves; when
        given, the pool equation is checked as well.
        """

    def plan_prefill_states(self, spans: Sequence[PrefillSpan]) -> StatePlan | None:
        """Choose where a prefill step's requests begin and which of their states it keeps.

        None where nothing is to be kept: each goes on with its own state, or begins anew.
        """
        return None

    def plan_decode_states(self, rows: np.ndarray, seq_lens: np.ndarray) -> StatePlan | None:
        """Choose which states a decode step keeps; ``seq_lens`` count its tokens. None: none."""
        return None

    # -- rows of sliding windows ----------------------------------------------------------------

    def release_out_of_window(self, reqs: Sequence[CacheableReq]) -> None:
        """Free the requests' own window rows that no coming token looks back on.

        Once per decode step; a stride of tokens at a time. Nothing to do without such rows.
        """
        if self._swa_allocator is None:
            return
        stride = self._swa_allocator.release_stride
        for req in reqs:
            # Else its prefill is still on the way, and the tree is to get the prompt with its rows.
            if req.kv_committed_len < len(req.origin_input_ids) + len(req.output_ids):
                self._release_behind(req, stride)

    def _release_behind(self, req: CacheableReq, stride: int) -> None:
        """See ``release_out_of_window``; ``stride``: fewer tokens than this are left for later."""
        windows, row = self._swa_allocator, req.req_pool_idx
        if windows is None or row is None:
            return
        page = self.page_size
        # Should the request end now, its last whole page must still have a window before it.
        end = max(0, req.kv_committed_len - self.lookahead) // page * page
        behind = max(0, end - (windows.window - 1)) // page * page
        # [0, protected)       the tree's
        # [protected, start)   given back before
        # [start, behind)      given back now
        start = max(req.cache_protected_len, self._window_starts.get(row, 0))
        if behind - start >= max(stride, 1):
            windows.free_swa(self.req_to_token_pool.read(row, start, behind))
            self._window_starts[row] = behind

    def _forget_window(self, req: CacheableReq) -> None:
        """The request holds nothing any more."""
        if req.req_pool_idx is not None:
            self._window_starts.pop(req.req_pool_idx, None)

    def make_key(self, token_ids: TokenIds, extra_key: str | None = None) -> RadixKey:
        """Build a key as this cache uses it (its lookahead, current weights)."""
        return RadixKey(
            token_ids,
            extra_key,
            weights_fingerprint=self.weights_fingerprint,
            lookahead=self.lookahead,
        )

    @property
    def is_eagle(self) -> bool:
        """Whether a position's KV depends on tokens after its own."""
        return self.lookahead > 0

    def set_weights_fingerprint(self, fingerprint: str | None) -> None:
        """Continue under other weights: nodes of the old ones are never matched again.

        They stay until evicted (requests may hold them). Requests begun before are not inserted.
        """
        self.weights_fingerprint = fingerprint

    def take_events(self) -> list[KVEvent]:
        """Return and forget the KV events since the last call."""
        return []

    # -- hierarchical cache: nothing to do without tiers ---------------------------------------

    def check_hicache_events(self) -> None:
        """Process finished transfers. Once per loop on every rank (collective with tiers)."""

    def init_load_back(self, params: LoadBackParams) -> LoadBackResult:
        """Reserve device slots for the host part of a match and queue its copy."""
        empty = torch.empty(0, dtype=torch.int64)
        return LoadBackResult(device_indices=empty, last_node=params.last_device_node)

    def ready_to_load_host_cache(self) -> int:
        """Start the queued loads; return the consumer index of the batch, -1 for none."""
        return -1

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
        """Begin to fetch from storage what continues a match.

        ``new_input_tokens`` begin where the match ended (``matched_node``, its
        ``best_match_node``) and end where the key of the match does.
        """

    def check_prefetch_progress(self, rid: str) -> bool:
        """Return whether the request may be scheduled as far as its prefetch is concerned."""
        return True

    def has_followed_prefetch(self, rid: str) -> bool:
        """Return whether the request waited for another one's prefetch, which has ended.

        What that did not bring is still to be asked for.
        """
        return False

    def terminate_prefetch(self, rid: str) -> None:
        """Ask a prefetch to stop where it is."""

    def pop_prefetch_loaded_tokens(self, rid: str) -> int:
        """Return and forget how many tokens came from storage for this request."""
        return 0

    def release_aborted_request(self, rid: str) -> None:
        """Give up whatever is under way for a request that left the waiting queue."""

    def flush_write_through_acks(self) -> None:
        """Wait for the device-to-host copies in flight and settle them."""

    def has_pending_transfers(self) -> bool:
        """Return whether backups or loads are queued or under way, storage included."""
        return False

    def has_pending_copies(self) -> bool:
        """Return whether device<->host copies are queued or under way: their nodes are locked."""
        return False

    def hicache_controller(self) -> HiCacheController | None:
        """Return the controller of the tiers behind the device, None without."""
        return None

    def storage_backend_name(self) -> str | None:
        """Return the class name of the attached storage backend, None without one."""
        return None

    def prepare_weights_update(self) -> None:
        """Let nothing of the present weights go to or come from storage any more; bounded wait."""

    def finish_weights_update(self, fingerprint: str | None) -> None:
        """Go on under these weights (the old ones where the update failed)."""
        self.set_weights_fingerprint(fingerprint)

    def open_storage_backend(self, **config: Any) -> BackendOpening:
        """Begin to make a backend in a thread; ``attach_storage_backend`` attaches it."""

        def refuse() -> HiCacheStorage:
            raise ValueError("hierarchical cache is not enabled")

        return BackendOpening("no storage", refuse)

    def opening_state(self, opening: BackendOpening) -> AttemptState:
        """How it ended on all ranks, FAILED if on one; PENDING until it has on every one."""
        return opening.state

    def attach_storage_backend(
        self, opened: BackendOpening | None = None, **config: Any
    ) -> tuple[bool, str]:
        """Attach storage at run time; (success, message)."""
        return False, "hierarchical cache is not enabled"

    def detach_storage_backend(self, wait_s: float | None = None) -> tuple[bool, str]:
        """Detach storage at run time; (success, message).

        `wait_s`: how long calls of the backend may take to return, None: the join timeout. Where
        they do not, storage is off and this is to be called again.
        """
        return False, "hierarchical cache is not enabled"

    def clear_storage_backend(self) -> bool:
        """Delete our own namespaces from storage; False where there is none."""
        return False

    def shutdown(self) -> None:
        """Stop threads and close storage; idempotent."""
