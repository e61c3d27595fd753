"""A whole scheduler in one process, driven step by step over a `FakeModelWorker`.

No sockets, no detokenizer: messages go in by `send`, `RequestOutput`s and replies come out in
lists. Time is real; nothing sleeps.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

from sglang.srt.managers.batch_result_processor import BatchResultProcessor
from sglang.srt.managers.grammar_manager import GrammarManager
from sglang.srt.managers.hicache_control import HiCacheControl
from sglang.srt.managers.invariant_checker import InvariantChecker
from sglang.srt.managers.io_struct import ControlReqOutput
from sglang.srt.managers.output_streamer import OutputStreamer
from sglang.srt.managers.request_receiver import ReceivedStep, RequestReceiver
from sglang.srt.managers.schedule_policy import NewTokenRatio, PrefillLimits, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_parts import SchedulerConfig, SchedulerParts
from sglang.srt.managers.scheduler_profiler import SchedulerProfiler
from sglang.srt.managers.scheduler_reports import ReportFacts, SchedulerReports
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.hicache_records import HiCacheParams
from sglang.srt.mem_cache.registry import CacheInitParams, create_tree_cache
from sglang.srt.mem_cache.storage_control import MinReduce
from sglang.srt.observability.metrics import SchedulerMetrics
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.test.fakes.fake_worker import FAKE_VOCAB, FakeModelWorker
from sglang.test.fakes.stepped_scheduler import SteppedScheduler


class _ListReceiver:
    """Stands in for `RequestReceiver`: hands out what `SchedulerHarness.send` collected."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.now_offset = 0.0  # seconds added to the clock, for tests of deadlines
        self.on_wait: Callable[[float], None] = time.sleep

    def recv(
        self, *, idle: bool, poll_grammars: Callable[[], list[str]], transfers: bool = False
    ) -> ReceivedStep:
        messages, self.messages = self.messages, []
        if idle and transfers and not messages:
            time.sleep(0.001)  # transfer threads need the interpreter too
        return ReceivedStep(
            messages=messages, ready_grammars=poll_grammars(), now=time.time() + self.now_offset
        )

    def wait(self, timeout_s: float) -> None:
        self.on_wait(timeout_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HarnessOptions:
    """What a test may choose of the fake worker, the cache and the scheduler."""

    num_slots: int = 256
    page_size: int = 1
    max_requests: int = 16
    context_len: int = 128
    chunk_size: int | None = None
    overlap: bool = False
    policy: str = "fcfs"
    disable_cache: bool = False
    max_queued: int | None = None
    enable_priority: bool = False
    max_prefill_tokens: int = 4096
    conservativeness: float = 1.0
    vocab_size: int = FAKE_VOCAB
    is_eagle: bool = False
    decode_log_interval: int = 40

    def make_worker(self) -> FakeModelWorker:
        """A worker without a model, with pools of these sizes."""
        return FakeModelWorker(
            num_slots=self.num_slots,
            page_size=self.page_size,
            max_requests=self.max_requests,
            context_len=self.context_len,
        )

    def scheduler_config(self, step_slots: int) -> SchedulerConfig:
        """The settings of a scheduler whose worker writes `step_slots` a request and step."""
        return SchedulerConfig(
            limits=PrefillLimits(
                max_prefill_tokens=self.max_prefill_tokens,
                chunk_size=self.chunk_size,
                page_size=self.page_size,
                step_slots=step_slots,
            ),
            max_running_requests=self.max_requests,
            max_queued_requests=self.max_queued,
            enable_priority=self.enable_priority,
            context_len=self.context_len,
            vocab_size=self.vocab_size,
            eos_token_ids=frozenset({0}),
            weight_version="default",
            stream_interval=1,
            dp_rank=0,
            is_rank_zero=True,
            enable_overlap=self.overlap,
        )

    def report_facts(self) -> ReportFacts:
        """Facts of a server that has none."""
        return ReportFacts(
            server_args={},
            memory_usage={"weight": 0.0, "kv_cache": 0.0, "graph": 0.0},
            max_running_requests=self.max_requests,
            decode_log_interval=self.decode_log_interval,
            dp_rank=0,
            is_logging_rank=False,
        )


class SchedulerHarness(SteppedScheduler):
    """See the module docstring; `replies` collects answers to control requests."""

    def __init__(
        self,
        *,
        worker: Any = None,
        hicache: HiCacheParams | None = None,
        hicache_control: Callable[[BasePrefixCache], HiCacheControl] | None = None,
        scheduler_class: type[Scheduler] = Scheduler,
        metrics: SchedulerMetrics | None = None,
        min_reduce: MinReduce | None = None,
        **options: Any,
    ) -> None:
        """`worker`: a real one instead of the fake, with `hicache` tiers behind its pool.

        `min_reduce`: over the ranks, where a test has several. `options`: fields of
        `HarnessOptions`.
        """
        super().__init__()
        self.options = HarnessOptions(**options)
        self.worker: Any = self.options.make_worker() if worker is None else worker
        self.receiver = _ListReceiver()
        self._metrics = metrics
        self._min_reduce = min_reduce
        self.num_replays = 0  # of captured steps; the fake worker has none
        self.replies: list[ControlReqOutput] = []
        self.tree = self._make_tree(hicache)
        control = hicache_control(self.tree) if hicache_control else None
        config = self.options.scheduler_config(self.worker.step_shape.num_slots)
        self.scheduler = scheduler_class(config, self._make_parts(control))

    def _make_tree(self, hicache: HiCacheParams | None) -> BasePrefixCache:
        rows, allocator = self.worker.get_memory_pool()
        tree = create_tree_cache(
            CacheInitParams(
                req_to_token_pool=rows,
                token_to_kv_pool_allocator=allocator,
                page_size=self.options.page_size,
                disable=self.options.disable_cache,
                is_eagle=self.options.is_eagle,
                hicache=hicache,
                weights_fingerprint=None
                if hicache is None
                else hicache.identity.weights_fingerprint,
            )
        )
        if hicache is not None:
            counter = hicache.controller.layer_done_counter
            self.worker.register_hicache_layer_transfer_counter(counter)
        return tree

    def _make_parts(self, hicache_control: HiCacheControl | None) -> SchedulerParts:
        options = self.options
        rows, allocator = self.worker.get_memory_pool()
        streamer = OutputStreamer(self._on_output, dp_rank=0)
        results = BatchResultProcessor(
            tree_cache=self.tree,
            req_to_token_pool=rows,
            streamer=streamer,
            decode_tail=lambda ids: "".join(chr(97 + i % 26) for i in ids),
            min_reduce=self._min_reduce,
        )
        ratio = NewTokenRatio(options.conservativeness)
        return SchedulerParts(
            receiver=cast(RequestReceiver, self.receiver),
            worker=cast(TpModelWorker, self.worker),
            draft_worker=self.worker if isinstance(self.worker, BaseSpecWorker) else None,
            tree_cache=self.tree,
            policy=SchedulePolicy(
                options.policy, self.tree, enable_priority=options.enable_priority, seed=0
            ),
            grammar_manager=GrammarManager(None),
            result_processor=results,
            streamer=streamer,
            reports=SchedulerReports(
                options.report_facts(),
                tree_cache=self.tree,
                allocator=allocator,
                results=results,
                metrics=self._metrics,
                count_replays=lambda: {"decode": self.num_replays},
                new_token_ratio=ratio,
            ),
            profiler=SchedulerProfiler(0, 0),
            new_token_ratio=ratio,
            checker=InvariantChecker(
                tree_cache=self.tree, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator
            ),
            hicache_control=hicache_control,
            send_to_front=self.replies.append,
            beat=self._beat,
        )

    # -- driving --------------------------------------------------------------------------------

    def send(self, *messages: Any) -> None:
        """Messages that the next step receives."""
        self.receiver.messages.extend(messages)

    def generate(self, rid: str, prompt: Sequence[int], max_new_tokens: int, **fields: Any) -> None:
        """Queue one request. Fields of SamplingParams and of the message may be given."""
        self._send_request(rid, prompt, fields, max_new_tokens=max_new_tokens)

    def run_until_idle(self, max_steps: int = 5000) -> None:
        """Step until every request has ended. Raises AssertionError where that never happens."""
        for _ in range(max_steps):
            self.step()
            if not self.receiver.messages and self.scheduler._is_no_request():
                self.step(2)  # the idle self-check runs in an iteration without a batch
                return
        raise AssertionError(
            f"still busy after {max_steps} steps: waiting {self.scheduler.waiting_queue}, "
            f"running {self.scheduler.running_batch.reqs}, chunked {self.scheduler.chunked_req}"
        )
