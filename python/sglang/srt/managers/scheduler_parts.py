"""What a `Scheduler` is made of: its settings and its collaborators.

Values only; `scheduler_process` fills them in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sglang.srt.managers.batch_result_processor import BatchResultProcessor
from sglang.srt.managers.grammar_manager import GrammarManager
from sglang.srt.managers.hicache_control import HiCacheControl
from sglang.srt.managers.invariant_checker import InvariantChecker
from sglang.srt.managers.io_struct import ControlReqOutput
from sglang.srt.managers.kv_event_publisher import KVEventPublisher
from sglang.srt.managers.output_streamer import OutputStreamer
from sglang.srt.managers.request_receiver import RequestReceiver
from sglang.srt.managers.schedule_policy import NewTokenRatio, PrefillLimits, SchedulePolicy
from sglang.srt.managers.scheduler_profiler import SchedulerProfiler
from sglang.srt.managers.scheduler_reports import SchedulerReports
from sglang.srt.managers.tp_worker import BatchWorker
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.model_executor.memory_saver import MemorySaver
from sglang.srt.model_executor.weight_updater import WeightUpdater
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The part of the server's arguments that scheduling itself reads."""

    limits: PrefillLimits
    max_running_requests: int
    max_queued_requests: int | None
    enable_priority: bool
    context_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    weight_version: str
    stream_interval: int
    dp_rank: int
    is_rank_zero: bool
    enable_overlap: bool
    # After an update without a flush, cached KV of the old weights is never matched again.
    isolate_weights: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerParts:
    """Collaborators, made by `scheduler_process`."""

    receiver: RequestReceiver
    worker: BatchWorker
    draft_worker: BaseSpecWorker | None  # `worker` itself where it speculates
    tree_cache: BasePrefixCache
    policy: SchedulePolicy
    grammar_manager: GrammarManager
    result_processor: BatchResultProcessor
    streamer: OutputStreamer
    reports: SchedulerReports
    profiler: SchedulerProfiler
    new_token_ratio: NewTokenRatio
    checker: InvariantChecker
    hicache_control: HiCacheControl | None  # None without a hierarchical cache
    send_to_front: Callable[[ControlReqOutput], None]
    beat: Callable[[], None]  # liveness counter
    # None where a worker without weights stands in; then there are no weight messages either.
    weight_updater: WeightUpdater | None = None
    kv_events: KVEventPublisher | None = None  # None: nobody follows what the cache holds
    memory_saver: MemorySaver = field(default_factory=MemorySaver)
