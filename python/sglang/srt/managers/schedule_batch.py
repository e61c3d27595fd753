"""State of a request on the scheduler (`Req`) and of one step's batch (`ScheduleBatch`).

`Req` is the only mutable record of a request: its tokens, its KV slots, its place in the prefix
cache. `ScheduleBatch` owns which requests run together and the integer arrays from which a
`ForwardBatch` is built. Neither decides anything: admission is `schedule_policy`, results are
`batch_result_processor`, order is `scheduler`. Scheduler thread only.

Lengths of a request (tokens), always ordered left to right:

    len(prefix_indices) <= kv_committed_len <= kv_allocated_len
      |                    |                   slots in the req_to_token row
      |                    tokens whose KV is (or, in stream order, will be) in these slots
      slots that the prefix cache already knows

A decode step in flight has allocated more slots than are committed (one; with speculation as many
as it may write); they are given back if the request turns out to have finished.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang.srt.constrained.base_grammar_backend import GrammarMatcher
from sglang.srt.managers.io_struct import (
    DecodeParams,
    LogprobDelta,
    RequestOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.state_snapshots import PrefillSpan, StatePlan
from sglang.srt.mem_cache.tree_components.base import TreeNode
from sglang.srt.model_executor.forward_batch_info import ForwardMode, LogprobRequest
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.spec_counters import SpecCounters

# `max_new_tokens` of a request that may go on to the end of its context.
NO_LIMIT = 1 << 30


class ReqStatus(Enum):
    """Life of a request on the scheduler; `Req.set_status` holds the legal moves."""

    GRAMMAR = auto()  # its grammar is being compiled
    WAITING = auto()  # in the waiting queue, holds no slot
    PREFILL = auto()
    DECODE = auto()
    FINISHED = auto()  # also after an abort


_LEGAL_MOVES: dict[ReqStatus, tuple[ReqStatus, ...]] = {
    ReqStatus.GRAMMAR: (ReqStatus.WAITING, ReqStatus.FINISHED),
    ReqStatus.WAITING: (ReqStatus.PREFILL, ReqStatus.FINISHED),
    ReqStatus.PREFILL: (ReqStatus.DECODE, ReqStatus.WAITING, ReqStatus.FINISHED),
    ReqStatus.DECODE: (ReqStatus.WAITING, ReqStatus.FINISHED),
    ReqStatus.FINISHED: (),
}


@dataclass(slots=True)
class LogprobState:
    """Logprobs of one request, gathered over chunks and steps, and how much of them was sent."""

    # Input side; complete once the prefill ended. Sent once.
    input_val: list[float] = field(default_factory=list)
    input_top: list[tuple[list[float], list[int]] | None] = field(default_factory=list)
    input_token_ids: list[tuple[list[float], list[int]] | None] = field(default_factory=list)
    input_done: bool = False
    # Output side: the deltas since the last message.
    pending: LogprobDelta = field(default_factory=LogprobDelta)

    def take(self) -> LogprobDelta:
        """Hand out what is new and start an empty delta."""
        delta, self.pending = self.pending, LogprobDelta()
        return delta


@dataclass(slots=True)
class StreamState:
    """What of a request was sent; written by the output streamer only."""

    decode: DecodeParams  # for the first message
    num_sent_tokens: int = 0
    output: RequestOutput | None = None  # the message object, filled anew for each message
    flush_number: int = -1  # the flush that the object was last collected for


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedSources:
    """Where the cached tokens of a prompt came from. `storage_backend`: None without storage."""

    device: int
    host: int
    storage: int
    storage_backend: str | None

    def to_json(self) -> dict[str, Any] | None:
        """`meta_info.cached_tokens_details`; None when nothing was cached."""
        if self.device + self.host + self.storage == 0:
            return None
        details: dict[str, Any] = {"device": self.device, "host": self.host}
        if self.storage_backend is not None:
            details |= {"storage": self.storage, "storage_backend": self.storage_backend}
        return details


class WeightVersionSpans:
    """Which weight version produced which output tokens: half-open spans from 0, contiguous."""

    __slots__ = ("_starts",)

    def __init__(self, version: str) -> None:
        self._starts: list[tuple[str, int]] = [(version, 0)]

    def change(self, version: str, num_output_tokens: int) -> None:
        """From this output token on, tokens come from `version`. The same version is a no-op."""
        last_version, last_start = self._starts[-1]
        if last_version == version:
            return
        if last_start == num_output_tokens:
            self._starts.pop()
            if self._starts and self._starts[-1][0] == version:
                return
        self._starts.append((version, num_output_tokens))

    def as_list(self, num_output_tokens: int) -> list[tuple[str, int, int]]:
        """(version, start, end) of each span; the last end is `num_output_tokens`."""
        if len(self._starts) == 1:
            return [(self._starts[0][0], 0, num_output_tokens)]
        ends = [start for _, start in self._starts[1:]] + [num_output_tokens]
        return [(v, s, e) for (v, s), e in zip(self._starts, ends)]


class Req:
    """One request on the scheduler."""

    def __init__(
        self,
        recv: TokenizedGenerateReqInput,
        *,
        eos_token_ids: frozenset[int],
        weight_version: str,
        stream_interval: int = 1,
    ) -> None:
        self.rid = recv.rid
        # An array: slices and keys of a long prompt are copied without a look at each token.
        self.origin_input_ids: array[int] = recv.input_ids
        self.output_ids: list[int] = []
        self.sampling_params: SamplingParams = recv.sampling_params
        self.eos_token_ids = eos_token_ids
        self.extra_key = recv.extra_key
        self.priority = recv.priority
        self.stream = recv.stream
        self.stream_interval = recv.sampling_params.stream_interval or stream_interval
        self.is_health_check = recv.is_health_check

        # A token in this set, or the last of the budget, makes the full finish check necessary;
        # so does every token where text or a grammar is watched.
        params = recv.sampling_params
        self.end_token_ids = (
            frozenset()
            if params.ignore_eos
            else eos_token_ids | frozenset(params.stop_token_ids or ())
        )
        self.always_check_finish = bool(
            params.stop_strs or params.stop_regex_strs or params.grammar is not None
        )

        # Logprobs and hidden states.
        self.return_logprob = recv.return_logprob
        self.logprob_start_len = recv.logprob_start_len  # -1: none of the prompt
        self.top_logprobs_num = recv.top_logprobs_num
        self.token_ids_logprob = recv.token_ids_logprob
        self.logprobs = LogprobState() if recv.return_logprob else None
        self.return_hidden_states = recv.return_hidden_states
        self.hidden_states: list[Any] = []
        self.num_hidden = 0  # positions up to which they were taken

        # What the match of its prefix found out, beside the prefix.
        self.known_len = 0  # tokens that the cache has seen before, of use or not
        self.kv_fingerprint: str | None = None
        self._start_without_memory()

        # Output tokens allowed; the waiting queue caps it by context and pool, on entering.
        self.max_new_tokens = NO_LIMIT if params.max_new_tokens is None else params.max_new_tokens

        # Progress; `status` by set_status only.
        self.status = ReqStatus.WAITING
        self.fill_ids: array[int] = self.origin_input_ids  # tokens the running prefill covers
        self.num_pending_tokens = 0  # steps launched whose token the host has not seen
        self.finish_reason: Any = None
        self.grammar: GrammarMatcher | None = None
        # The logits of its next step depend on tokens that the host must have seen.
        self.needs_host_tokens = (
            recv.sampling_params.has_penalties or recv.sampling_params.grammar is not None
        )

        self._init_reports(recv, weight_version)

    def _start_without_memory(self) -> None:
        """No row, no slots, no prefix: as a new request, and as one whose memory was taken back."""
        # Place in memory; written by prepare_for_* and by the prefix cache.
        self.req_pool_idx: int | None = None
        self.prefix_indices: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self.last_node: TreeNode | None = None
        self.last_host_node: TreeNode | None = None
        self.best_match_node: TreeNode | None = None
        self.host_hit_length = 0
        self.cache_protected_len = 0
        self.kv_committed_len = 0
        self.kv_allocated_len = 0
        self.extend_len = 0  # tokens of the next prefill step, set by the PrefillAdder
        self.is_chunked = False  # more of the prompt is to come after the running step

    def _init_reports(self, recv: TokenizedGenerateReqInput, weight_version: str) -> None:
        """What the client is told, and when things happened."""
        self.cached_tokens = 0
        self.host_cached_tokens = 0  # of the present prefix: copied from the host
        self.storage_loaded_tokens = 0  # fetched from storage for this request so far
        self.cached_sources: CachedSources | None = None
        self.already_counted_cache = False
        self.num_retractions = 0
        self.spec: SpecCounters | None = None  # made at the first verification
        self.weight_versions = WeightVersionSpans(weight_version)
        self.news = StreamState(
            decode=DecodeParams(
                skip_special_tokens=recv.sampling_params.skip_special_tokens,
                no_stop_trim=recv.sampling_params.no_stop_trim,
                stop_strs=list(recv.sampling_params.stop_strs),
                skip_tokenizer=recv.skip_tokenizer,
            )
        )

        # By the scheduler's clock that stands during pauses; times by the waiting queue.
        self.queue_entry_time = 0.0
        self.waiting_since = 0.0  # later than the entry after a retraction
        self.waited_s = 0.0  # in the waiting queue, up to the last admission
        # Unix times.
        self.received_time = recv.received_time
        self.forward_entry_time = 0.0
        self.prefill_finished_time = 0.0

    # -- status ---------------------------------------------------------------------------------

    def set_status(self, status: ReqStatus) -> None:
        """Move to `status`. Raises RuntimeError for a move that the life of a request forbids."""
        if status not in _LEGAL_MOVES[self.status]:
            raise RuntimeError(f"request {self.rid}: {self.status.name} -> {status.name}")
        self.status = status

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    # -- lengths --------------------------------------------------------------------------------

    @property
    def seq_len(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.origin_input_ids) + len(self.output_ids)

    @property
    def remaining_new_tokens(self) -> int:
        """Tokens still to be produced at most, those in flight taken off."""
        return self.max_new_tokens - len(self.output_ids) - self.num_pending_tokens

    # -- prefix ---------------------------------------------------------------------------------

    def max_prefix_len(self) -> int:
        """Longest prefix that may come from a cache.

        One token at least is computed, to have logits; input logprobs from position s on need the
        hidden states of s, so nothing from s on may come from the cache.
        """
        limit = len(self.fill_ids) - 1
        if self.needs_input_logprobs:
            limit = min(limit, self.logprob_start_len)
        return max(limit, 0)

    def cacheable_ids(self, tree_cache: BasePrefixCache) -> array[int]:
        """The tokens of the key under which the prefix may come from a cache.

        A key has `lookahead` units less than tokens, so it takes as many tokens more.
        """
        return self.fill_ids[: self.max_prefix_len() + tree_cache.lookahead]

    @property
    def needs_input_logprobs(self) -> bool:
        return (
            self.logprobs is not None
            and not self.logprobs.input_done
            and 0 <= self.logprob_start_len < len(self.origin_input_ids)
        )

    def init_next_round_input(self, tree_cache: BasePrefixCache) -> None:
        """Match the tokens of the coming prefill against the prefix cache. Takes no lock."""
        self.fill_ids = self.origin_input_ids + array("i", self.output_ids)
        key = tree_cache.make_key(self.cacheable_ids(tree_cache), self.extra_key)
        match = tree_cache.match_prefix(MatchPrefixParams(key=key))
        self.kv_fingerprint = tree_cache.weights_fingerprint
        self.prefix_indices = match.device_indices
        self.last_node = match.last_device_node
        self.last_host_node = match.last_host_node
        self.best_match_node = match.best_match_node
        self.host_hit_length = match.host_hit_length
        self.known_len = match.known_len
        self.host_cached_tokens = 0
        self.cache_protected_len = len(match.device_indices)

    def count_cached_tokens(self, storage_backend: str | None) -> None:
        """Remember, at the first prefill step, how much of the prompt was cached, and where."""
        if self.already_counted_cache:
            return
        self.already_counted_cache = True
        self.cached_tokens = len(self.prefix_indices)
        from_storage = min(self.storage_loaded_tokens, self.host_cached_tokens)
        self.cached_sources = CachedSources(
            device=self.cached_tokens - self.host_cached_tokens,
            host=self.host_cached_tokens - from_storage,
            storage=from_storage,
            storage_backend=storage_backend,
        )

    def reset_for_retract(self) -> None:
        """Forget all memory state (already released); the request starts over as a prefill."""
        self.num_retractions += 1
        self._start_without_memory()
        if self.logprobs is not None and not self.logprobs.input_done:
            self.logprobs = LogprobState()

    def __repr__(self) -> str:
        return (
            f"Req(rid={self.rid}, {self.status.name}, prompt={len(self.origin_input_ids)}, "
            f"output={len(self.output_ids)})"
        )


@dataclass(slots=True, kw_only=True)
class BatchTraits:
    """What follows from the composition of a batch; made anew when it changes."""

    needs_host_tokens: bool = False
    wants_logprobs: bool = False
    wants_hidden_states: bool = False
    # Decode steps until some request has used up its budget, results in flight counted.
    steps_to_limit: int = 0

    @classmethod
    def of(cls, reqs: Sequence[Req]) -> BatchTraits:
        return cls(
            needs_host_tokens=any(req.needs_host_tokens for req in reqs),
            wants_logprobs=any(req.return_logprob for req in reqs),
            wants_hidden_states=any(req.return_hidden_states for req in reqs),
            steps_to_limit=min((req.remaining_new_tokens for req in reqs), default=0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What one decode step of the worker may take, per request.

    ``max_tokens``: tokens it can add. ``num_slots``: slots behind the committed ones that it
    writes, those of proposals and scratch included; the scheduler takes them beforehand.
    """

    max_tokens: int = 1
    num_slots: int = 1
    num_draft_tokens: int = 1  # verified a step, for the statistics
    needs_host_tokens: bool = False  # every step: the worker reads what the requests have so far


class StepKind(NamedTuple):
    """Steps that are equal in it and follow each other take about equal time."""

    mode: ForwardMode
    num_reqs: int
    num_new_tokens: int  # of prompts; 0 in decode
    is_loading: bool  # a part of the KV comes from the host meanwhile


class ScheduleBatch:
    """Requests that take the next step together, and the arrays of that step.

    `req_pool_indices` and `seq_lens` are int64 numpy arrays parallel to `reqs`; seq_lens counts
    the tokens of the step too. In decode they are kept from step to step, so that the cost of a
    step does not grow with what the requests have done before.
    """

    def __init__(
        self,
        reqs: list[Req],
        *,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator,
        tree_cache: BasePrefixCache,
        vocab_size: int,
        device: str,
        step_shape: StepShape | None = None,
    ) -> None:
        self.reqs = reqs
        self.step_shape = step_shape or StepShape()
        self.req_to_token_pool = req_to_token_pool
        self.token_to_kv_pool_allocator = token_to_kv_pool_allocator
        self.tree_cache = tree_cache
        self.vocab_size = vocab_size
        self.device = device
        self.forward_mode = ForwardMode.IDLE
        self.req_pool_indices = np.empty(0, dtype=np.int64)
        self.seq_lens = np.empty(0, dtype=np.int64)
        self.out_cache_loc: torch.Tensor = torch.empty(0, dtype=torch.int64)
        self.extend_lens: list[int] = []
        self.prefix_lens: list[int] = []
        # Extend only: of the prefixes, what a request did not compute in an earlier chunk itself.
        self.num_cached_tokens = 0
        # Extend only: whether more of the prompt follows after this step (a copy, because the
        # request's own flag may speak of the next chunk when the result is read).
        self.chunked: list[bool] = []
        self.sampling_info: SamplingBatchInfo | None = None
        self.traits = BatchTraits.of(reqs)
        self.hicache_consumer_index = -1
        self.state_plan: StatePlan | None = None  # of the step being prepared

    def __len__(self) -> int:
        return len(self.reqs)

    def is_empty(self) -> bool:
        return not self.reqs

    # -- composition ----------------------------------------------------------------------------

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the requests at these positions, in this order."""
        if len(keep) == len(self.reqs):
            return
        self.reqs = [self.reqs[i] for i in keep]
        index = np.asarray(keep, dtype=np.int64)
        self.req_pool_indices = self.req_pool_indices[index]
        self.seq_lens = self.seq_lens[index]
        self._composition_changed()

    def merge(self, other: ScheduleBatch) -> None:
        """Append the requests of `other`."""
        self.reqs = self.reqs + other.reqs
        self.req_pool_indices = np.concatenate([self.req_pool_indices, other.req_pool_indices])
        self.seq_lens = np.concatenate([self.seq_lens, other.seq_lens])
        self._composition_changed()

    def _composition_changed(self) -> None:
        self.sampling_info = None
        self.traits = BatchTraits.of(self.reqs)

    @property
    def kind(self) -> StepKind:
        """What the time of the step depends on most."""
        is_prefill = self.forward_mode is ForwardMode.EXTEND
        return StepKind(
            mode=self.forward_mode,
            num_reqs=len(self.reqs),
            num_new_tokens=sum(self.extend_lens) if is_prefill else 0,
            is_loading=self.hicache_consumer_index >= 0,
        )

    def snapshot(self) -> ScheduleBatch:
        """The step as launched, for the result processor: later filters do not change it.

        Shallow, because what changes a batch rebinds its lists and arrays and never writes to them.
        """
        launched = object.__new__(ScheduleBatch)  # `copy.copy`, without its search for how to copy
        launched.__dict__.update(self.__dict__)
        return launched

    # -- steps ----------------------------------------------------------------------------------

    def prepare_for_extend(self) -> None:
        """Give every request its row and the slots of its next tokens.

        The PrefillAdder has made certain that both exist; failing here is a broken invariant.
        Raises RuntimeError.
        """
        self.forward_mode = ForwardMode.EXTEND
        goes_on = [req.req_pool_idx is not None for req in self.reqs]
        new_rows = [req for req in self.reqs if req.req_pool_idx is None]
        rows = self.req_to_token_pool.alloc(len(new_rows))
        if rows is None:
            raise RuntimeError(f"no request rows left for {len(new_rows)} admitted requests")
        for req, row in zip(new_rows, rows):
            req.req_pool_idx = row

        self.prefix_lens = [len(req.prefix_indices) for req in self.reqs]
        self.num_cached_tokens = sum(
            prefix_len for prefix_len, own in zip(self.prefix_lens, goes_on) if not own
        )
        self.extend_lens = [req.extend_len for req in self.reqs]
        self.chunked = [req.is_chunked for req in self.reqs]
        seq_lens = [p + e for p, e in zip(self.prefix_lens, self.extend_lens)]
        last_locs = [
            int(req.prefix_indices[-1]) if len(req.prefix_indices) else -1 for req in self.reqs
        ]
        slots = self._alloc_extend(seq_lens, last_locs)

        start = 0
        for req, prefix_len, extend_len in zip(self.reqs, self.prefix_lens, self.extend_lens):
            row = self._row_of(req)
            if prefix_len:
                self.req_to_token_pool.write(row, 0, req.prefix_indices)
            own = slots[start : start + extend_len]
            self.req_to_token_pool.write(row, prefix_len, own)
            start += extend_len
            req.kv_committed_len = req.kv_allocated_len = prefix_len + extend_len
        self.out_cache_loc = slots
        self.req_pool_indices = np.array([self._row_of(r) for r in self.reqs], dtype=np.int64)
        self.seq_lens = np.array(seq_lens, dtype=np.int64)
        self.state_plan = self.tree_cache.plan_prefill_states(
            [self._prefill_span(i, goes_on[i]) for i in range(len(self.reqs))]
        )
        for req in self.reqs:
            if not req.is_chunked:
                req.num_pending_tokens += 1
        # A cut prompt brings no token, but the batch is filtered before it decodes.
        self.traits.steps_to_limit -= 1
        self._refresh_sampling_info()

    def _prefill_span(self, index: int, goes_on: bool) -> PrefillSpan:
        req, start = self.reqs[index], self.prefix_lens[index]
        return PrefillSpan(
            row=self._row_of(req),
            start=start,
            end=start + self.extend_lens[index],
            is_last=not req.is_chunked,
            node=None if goes_on else req.last_node,
            known_len=req.known_len,
        )

    def _alloc_extend(self, seq_lens: list[int], last_locs: list[int]) -> torch.Tensor:
        """Slots of all new tokens; evicts from the prefix cache what is missing."""
        allocator = self.token_to_kv_pool_allocator
        slots = allocator.alloc_extend(self.prefix_lens, seq_lens, last_locs)
        if slots is None:
            page = allocator.page_size
            need = sum(-(-e // page) * page + page for e in self.extend_lens)
            self._evict_to_have(need)
            slots = allocator.alloc_extend(self.prefix_lens, seq_lens, last_locs)
        if slots is None:
            raise RuntimeError(
                f"admitted {sum(self.extend_lens)} new tokens, free {allocator.available_size()}, "
                f"evictable {self.tree_cache.evictable_size()}; of window rows "
                f"{allocator.available_swa_size()} and {self.tree_cache.swa_evictable_size()}"
            )
        return slots

    def _evict_to_have(self, num_tokens: int) -> None:
        """Evict from the prefix cache until this many slots are free, or nothing is evictable."""
        allocator = self.token_to_kv_pool_allocator
        missing = max(0, num_tokens - allocator.available_size())
        free_swa = allocator.available_swa_size()
        missing_swa = 0 if free_swa is None else max(0, num_tokens - free_swa)
        if missing or missing_swa:
            self.tree_cache.evict(EvictParams(num_tokens=missing, num_swa_tokens=missing_swa))

    def decode_pages_needed(self) -> int:
        """Pages that the next decode step takes: one for each request at a page's end.

        More where a step takes several slots a request.
        """
        page = self.token_to_kv_pool_allocator.page_size
        if self.step_shape.num_slots > 1:
            held, wanted = self._held_and_wanted()
            return int((-(-wanted // page) - -(-held // page)).sum())
        if page == 1:
            return len(self.reqs)
        return int(np.count_nonzero(self.seq_lens % page == 0))

    def has_decode_memory(self) -> bool:
        """True when the next decode step fits, after evicting from the prefix cache if need be."""
        page = self.token_to_kv_pool_allocator.page_size
        if self.step_shape.num_slots == 1 and self._has_free(len(self.reqs) * page):
            return True  # a page for everybody: no need to count who is at a page's end
        need = self.decode_pages_needed() * page
        self._evict_to_have(need)
        return self._has_free(need)

    def _has_free(self, num_tokens: int) -> bool:
        allocator = self.token_to_kv_pool_allocator
        free_swa = allocator.available_swa_size()
        return allocator.available_size() >= num_tokens and (
            free_swa is None or free_swa >= num_tokens
        )

    def prepare_for_decode(self) -> None:
        """Give every request the slot of the token it sampled last.

        Of the request table only the mirror is written; the worker writes the device's with the
        step. Raises RuntimeError when the slots are missing: `has_decode_memory` comes first.
        """
        self.forward_mode = ForwardMode.DECODE
        self.state_plan = None
        self.hicache_consumer_index = -1
        if self.step_shape.num_slots > 1:
            self._prepare_for_multi_token_decode()
            return
        allocator = self.token_to_kv_pool_allocator
        rows, old_lens = self.req_pool_indices, self.seq_lens
        if allocator.page_size > 1:
            last_locs = self.req_to_token_pool.mirror[rows, old_lens - 1].astype(np.int64)
        else:
            last_locs = old_lens  # pages of one slot are never gone on with
        self.seq_lens = old_lens + 1
        self.state_plan = self.tree_cache.plan_decode_states(rows, self.seq_lens)
        slots = allocator.alloc_decode(self.seq_lens, last_locs)
        if slots is None:
            raise RuntimeError(f"no slots for a decode step of {len(self.reqs)} requests")
        self.req_to_token_pool.write_mirror(rows, old_lens, slots.numpy())
        self.out_cache_loc = slots
        for req in self.reqs:
            req.kv_allocated_len += 1
            req.num_pending_tokens += 1
        self.traits.steps_to_limit -= 1
        self._refresh_sampling_info()

    def _held_and_wanted(self) -> tuple[np.ndarray, np.ndarray]:
        """Slots of each request now, and those that it must hold for the next decode step.

        How many tokens the steps in flight accept is not known yet: each may add the most.

            [0, committed) [committed, + in flight * max_tokens) [+ num_slots)
             KV is there    may be committed by then              the next step writes here
        """
        shape = self.step_shape
        held = np.array([req.kv_allocated_len for req in self.reqs], dtype=np.int64)
        upper = np.array(
            [req.kv_committed_len + req.num_pending_tokens * shape.max_tokens for req in self.reqs],
            dtype=np.int64,
        )
        return held, np.maximum(held, upper + shape.num_slots)

    def _prepare_for_multi_token_decode(self) -> None:
        """Take the slots of a step that may add several tokens; ``seq_lens`` is an upper bound.

        The worker knows the lengths on the device. Raises RuntimeError as the caller does.
        """
        held, wanted = self._held_and_wanted()
        rows = self.req_pool_indices
        last_locs = self.req_to_token_pool.mirror[rows, held - 1].astype(np.int64)
        slots = self.token_to_kv_pool_allocator.alloc_extend(held, wanted, last_locs)
        if slots is None:
            raise RuntimeError(f"no slots for a decode step of {len(self.reqs)} requests")
        counts = wanted - held
        if len(slots):
            columns = np.arange(len(slots)) + np.repeat(held - (np.cumsum(counts) - counts), counts)
            self.req_to_token_pool.write_at(
                torch.from_numpy(np.repeat(rows, counts)), torch.from_numpy(columns), slots
            )
        for req, num_slots in zip(self.reqs, wanted.tolist()):
            req.kv_allocated_len = num_slots
            req.num_pending_tokens += 1
        self.seq_lens = wanted - self.step_shape.num_slots + self.step_shape.max_tokens
        self.traits.steps_to_limit -= 1
        self._refresh_sampling_info()

    def _refresh_sampling_info(self) -> None:
        if self.sampling_info is None:
            self.sampling_info = SamplingBatchInfo.from_reqs(
                self.reqs, self.vocab_size, self.device
            )
        self.sampling_info.update_host_state(self.reqs)

    @staticmethod
    def _row_of(req: Req) -> int:
        if req.req_pool_idx is None:
            raise RuntimeError(f"{req} has no row")
        return req.req_pool_idx

    # -- inputs of the forward pass -------------------------------------------------------------

    def extend_input_ids(self) -> np.ndarray:
        """New tokens of all requests, one after the other; int64."""
        ids = [
            np.frombuffer(req.fill_ids, dtype=np.int32)[prefix_len : prefix_len + extend_len]
            for req, prefix_len, extend_len in zip(self.reqs, self.prefix_lens, self.extend_lens)
        ]
        return np.concatenate(ids, dtype=np.int64)

    def logprob_request(self) -> LogprobRequest | None:
        """Logprob wishes of this step; None where no request has any."""
        if not self.traits.wants_logprobs:
            return None
        wishes = LogprobRequest(
            enabled=[req.return_logprob for req in self.reqs],
            top_nums=[req.top_logprobs_num for req in self.reqs],
            token_ids=[req.token_ids_logprob for req in self.reqs],
        )
        if self.forward_mode is ForwardMode.EXTEND:
            for req, prefix_len, extend_len in zip(self.reqs, self.prefix_lens, self.extend_lens):
                start = extend_len
                if req.needs_input_logprobs:
                    start = min(max(req.logprob_start_len - prefix_len, 0), extend_len)
                # The token after the last prompt token is an output token: no input logprob.
                ids = req.fill_ids[prefix_len + start + 1 : prefix_len + extend_len + 1].tolist()
                ids = ids + [-1] * (extend_len - start - len(ids))
                wishes.start_lens.append(start)
                wishes.target_ids.append(ids)
        return wishes
