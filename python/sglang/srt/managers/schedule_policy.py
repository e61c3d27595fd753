"""Which waiting requests run next: the order of the queue, and how many fit (`PrefillAdder`).

Owns no request: it sorts the list of the `WaitingQueue` and counts tokens. Every decision is made
from state that all tensor-parallel ranks share, so all ranks decide alike. Scheduler thread only.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar

import torch

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, LoadBackParams
from sglang.srt.mem_cache.swa_allocator import swa_part

# Tokens set aside for one request's future output when admitting; a request may ask for far more
# than it will produce, and retraction covers the rare time when many do not stop.
CLIP_MAX_NEW_TOKENS = 4096

# Prefix-aware orders match every waiting request against the tree; past this length of the queue
# the matching costs more than the order gains, and fcfs is used for that round.
MAX_MATCHED_QUEUE_LEN = 128


class SchedulePolicy:
    """Sorts the waiting queue in place.

    Policies: `fcfs` (arrival), `lpm` (longest cached prefix first), `dfs-weight` (depth-first
    through the prefix tree, heavier branches first), `lof` (longest output first), `random`,
    `priority` (higher number first). With priority scheduling on, `fcfs` and `lof` order inside
    equal priorities.
    """

    def __init__(
        self,
        policy: str,
        tree_cache: BasePrefixCache,
        *,
        enable_priority: bool,
        seed: int,
    ) -> None:
        self.policy = policy
        self.tree_cache = tree_cache
        self.enable_priority = enable_priority or policy == "priority"
        # The same seed on every rank: ranks must shuffle alike.
        self._random = random.Random(seed)

    def sort(self, waiting: list[Req]) -> None:
        """Order `waiting`. Matches prefixes (no lock) where the policy looks at them."""
        policy = self.policy
        if policy in ("lpm", "dfs-weight") and len(waiting) > MAX_MATCHED_QUEUE_LEN:
            policy = "fcfs"
        if policy == "lpm":
            self._match_all(waiting)
            waiting.sort(key=lambda r: -len(r.prefix_indices))
        elif policy == "dfs-weight":
            self._match_all(waiting)
            self._sort_depth_first(waiting)
        elif policy == "random":
            self._random.shuffle(waiting)
        elif policy == "lof":
            waiting.sort(key=lambda r: (self._rank(r), -r.max_new_tokens))
        elif self.enable_priority:
            waiting.sort(key=lambda r: (self._rank(r), r.queue_entry_time))

    def _rank(self, req: Req) -> int:
        """Sort key of priority: higher priority first, none counts as 0."""
        return -(req.priority or 0) if self.enable_priority else 0

    def _match_all(self, waiting: list[Req]) -> None:
        for req in waiting:
            req.init_next_round_input(self.tree_cache)

    def _sort_depth_first(self, waiting: list[Req]) -> None:
        """Requests of one subtree stay together, subtrees with more requests come first."""
        at_node: dict[int, list[Req]] = defaultdict(list)
        weight: dict[int, int] = defaultdict(int)
        children: dict[int, dict[int, object]] = defaultdict(dict)
        roots: dict[int, object] = {}
        for req in waiting:
            node = req.last_node
            at_node[id(node)].append(req)
            while node is not None:
                weight[id(node)] += 1
                parent = getattr(node, "parent", None)
                (children[id(parent)] if parent is not None else roots)[id(node)] = node
                node = parent
        order: list[Req] = []
        stack = sorted(roots, key=lambda n: weight[n])
        while stack:
            node_id = stack.pop()
            order.extend(at_node[node_id])
            stack.extend(sorted(children[node_id], key=lambda n: weight[n]))
        # Of a cache without a tree nobody has a node.
        waiting[:] = order + at_node[id(None)]


class AddResult(Enum):
    """What became of an attempt to admit a request."""

    ADDED = auto()
    NO_TOKEN = auto()  # the KV pool cannot take it now: stop admitting
    OTHER = auto()  # the step is full (prefill tokens, chunk): stop admitting


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLimits:
    """Budgets of one prefill step, in tokens."""

    max_prefill_tokens: int
    chunk_size: int | None  # None: prompts are never cut
    page_size: int
    step_slots: int = 1  # slots that a decode step writes per request


class PrefillAdder:
    """Admits waiting requests into one prefill step until a budget is used up.

    `rem_total` is what the KV pool can still promise: free + evictable slots, less what the
    running requests are expected to need until they end (`new_token_ratio` of their remaining
    tokens). Admitted requests are locked in the prefix cache at once.
    """

    def __init__(
        self,
        limits: PrefillLimits,
        *,
        tree_cache: BasePrefixCache,
        allocator: BaseTokenToKVPoolAllocator,
        running: list[Req],
        new_token_ratio: float,
    ) -> None:
        self.limits = limits
        self.tree_cache = tree_cache
        self.allocator = allocator
        self.rem_input = limits.max_prefill_tokens
        self.rem_chunk = limits.chunk_size
        self.new_token_ratio = new_token_ratio
        self.reserved = sum(self._future_tokens(req) * new_token_ratio for req in running)
        # The same for rows of sliding windows, of which no request takes more and more.
        self._windows = swa_part(allocator)
        self.reserved_swa = sum(self._future_rows(req) * new_token_ratio for req in running)
        self.can_run: list[Req] = []
        self.new_chunked_req: Req | None = None
        self._nothing_runs = not running

    def _future_tokens(self, req: Req) -> int:
        tokens = min(max(req.remaining_new_tokens, 0), CLIP_MAX_NEW_TOKENS)
        return tokens + self.limits.page_size + self.limits.step_slots - 1

    def _future_rows(self, req: Req) -> int:
        """Window rows that a request may still come to hold, of its own."""
        if self._windows is None:
            return 0
        most = self._windows.rows_of_decode(self.limits.step_slots)
        held = req.kv_committed_len - req.cache_protected_len
        return min(self._future_tokens(req), max(0, most - held))

    def _swa_room(self, req: Req | None) -> float:
        """Tokens of a request that the window pool can take now; no limit without one.

        None: of the request that goes on, for which nothing is set aside.
        """
        free = self.allocator.available_swa_size()
        if free is None:
            return float("inf")
        free += self.tree_cache.swa_evictable_size() - self._kept_free
        if req is None or self._is_alone:
            return free
        return free - self.reserved_swa - self._future_rows(req) * self.new_token_ratio

    def _ceil(self, num_tokens: int) -> int:
        page = self.limits.page_size
        return -(-num_tokens // page) * page

    @property
    def rem_total(self) -> float:
        free = self.allocator.available_size() + self.tree_cache.evictable_size()
        return free - self.reserved

    def add_chunked_req(self, req: Req) -> AddResult:
        """Go on with the request whose prompt was cut. It holds its lock and slots already."""
        remaining = len(req.fill_ids) - len(req.prefix_indices)
        free = self.allocator.available_size() + self.tree_cache.evictable_size()
        budget = min(self._chunk_budget(), free - self._kept_free, self._swa_room(None))
        cut = self._cut(remaining, budget)
        if cut <= 0:
            return AddResult.NO_TOKEN
        self._admit(req, cut, is_chunked=cut < remaining)
        return AddResult.ADDED

    def add_one_req(self, req: Req) -> AddResult:
        """Admit `req` (prefix matched just before) whole or cut to the chunk, or say why not."""
        if self.rem_input <= 0 or (self.rem_chunk is not None and self.rem_chunk <= 0):
            return AddResult.OTHER
        extend_len = len(req.fill_ids) - len(req.prefix_indices)
        # A page more than the tokens: the last page may be shared with nobody.
        need = self._ceil(extend_len) + self._future_tokens(req)
        node = req.last_node
        # Locking takes the matched prefix out of what can be evicted, so it comes before the test.
        self.tree_cache.inc_lock_ref(node)
        if not (self._fits(need, req, extend_len) and self._fits_windows(req, extend_len)):
            self.tree_cache.dec_lock_ref(node)
            return AddResult.NO_TOKEN
        if self.can_run and self._ceil(extend_len - req.host_hit_length) > self.rem_input:
            self.tree_cache.dec_lock_ref(node)
            return AddResult.OTHER
        extend_len = self._load_back(req, extend_len)
        cut = self._cut(extend_len, min(self._chunk_budget(), self._swa_room(req)))
        if cut <= 0:
            self.tree_cache.dec_lock_ref(req.last_node)
            return AddResult.OTHER
        self._admit(req, cut, is_chunked=cut < extend_len)
        return AddResult.ADDED

    def _fits(self, need: int, req: Req, extend_len: int) -> bool:
        if need <= self.rem_total:
            return True
        # With nothing running there is nobody to wait for: the estimate of the future must not
        # keep the last request out when its prompt fits.
        first_decode = self.limits.step_slots if req.remaining_new_tokens > 1 else 0
        return self._is_alone and self._ceil(extend_len + first_decode) <= self.rem_total

    def _load_back(self, req: Req, extend_len: int) -> int:
        """Let the cache bring a host-resident prefix to the device; returns the new extend_len."""
        if req.host_hit_length == 0:
            return extend_len
        loaded = self.tree_cache.init_load_back(
            LoadBackParams(
                best_match_node=req.best_match_node,
                last_device_node=req.last_node,
                host_hit_length=req.host_hit_length,
            )
        )
        if loaded.last_node is not req.last_node:
            self.tree_cache.inc_lock_ref(loaded.last_node)
            self.tree_cache.dec_lock_ref(req.last_node)
            req.last_node = loaded.last_node
        req.host_cached_tokens = len(loaded.device_indices)
        req.prefix_indices = torch.cat([req.prefix_indices, loaded.device_indices])
        req.cache_protected_len = len(req.prefix_indices)
        return len(req.fill_ids) - len(req.prefix_indices)

    def _chunk_budget(self) -> int:
        if self.rem_chunk is None:
            return 1 << 62
        return self.rem_chunk

    def _cut(self, extend_len: int, budget: float) -> int:
        """Tokens of this step: all, or as many whole pages as the chunk has room for."""
        if extend_len <= budget:
            return extend_len
        return int(budget) // self.limits.page_size * self.limits.page_size

    def _fits_windows(self, req: Req, extend_len: int) -> bool:
        """Whether the window pool can take what is loaded for a request, and a part of its prompt.

        Longer prompts go on in chunks, whatever the chunk size: each gives back the rows behind it.
        """
        if self._windows is None:
            return True
        page = self.limits.page_size
        loaded = self._ceil(min(self._windows.window, req.host_hit_length))
        computed = self._ceil(extend_len - req.host_hit_length)
        # A few tokens at a time are worth a step only where there is nobody to wait for.
        least = page if self._is_alone else min(computed, self._ceil(self._windows.window))
        return loaded + least <= self._swa_room(req)

    @property
    def _is_alone(self) -> bool:
        return self._nothing_runs and not self.can_run

    @property
    def _kept_free(self) -> int:
        """Slots that a prompt leaves to those that run: a page. Who is alone may need the last."""
        return 0 if self._is_alone else self.limits.page_size

    def _admit(self, req: Req, extend_len: int, *, is_chunked: bool) -> None:
        req.extend_len = extend_len
        req.is_chunked = is_chunked
        tokens = self._ceil(extend_len)
        self.can_run.append(req)
        self.rem_input -= tokens
        if self.rem_chunk is not None:
            self.rem_chunk -= tokens
        # The rest of a cut prompt will be needed soon, by this very request.
        rest = len(req.fill_ids) - len(req.prefix_indices) - extend_len
        self.reserved += tokens + self._ceil(rest)
        self.reserved += self._future_tokens(req) * self.new_token_ratio
        self.reserved_swa += tokens + self._future_rows(req) * self.new_token_ratio
        if is_chunked:
            self.new_chunked_req = req


@dataclass(slots=True)
class NewTokenRatio:
    """How much of the running requests' possible output is set aside, between 0 and 1.

    Starts high, decays with every decode step (requests mostly stop early), jumps up when a
    retraction shows that too little was kept.
    """

    conservativeness: float
    value: float = field(init=False)
    initial: float = field(init=False)
    minimum: float = field(init=False)
    _decay: float = field(init=False)  # of one decode step

    INITIAL: ClassVar[float] = 0.7
    MIN_SHARE: ClassVar[float] = 0.14
    DECAY_STEPS: ClassVar[int] = 600

    def __post_init__(self) -> None:
        self.value = self.initial = min(self.INITIAL * self.conservativeness, 1.0)
        self.minimum = min(self.initial * self.MIN_SHARE, 1.0)
        self._decay = (self.initial - self.minimum) / self.DECAY_STEPS

    def decay(self) -> None:
        self.value = max(self.value - self._decay, self.minimum)

    def reset(self) -> None:
        self.value = self.initial

    def after_retraction(self, running: list[Req]) -> None:
        """Estimate anew from what the requests that stay have produced and may still produce."""
        produced = sum(len(r.output_ids) for r in running)
        allowed = sum(r.max_new_tokens for r in running) + 1
        self.value = min(1.0, max(self.value, (produced + 20 * len(running)) / allowed))
