"""What a scheduler tells the outside about itself: log lines, metrics, `/server_info`, `/v1/loads`.

Reads counters and lengths; changes nothing but its own statistics. Scheduler thread only.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.managers.batch_result_processor import BatchResultProcessor
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.schedule_policy import NewTokenRatio
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.observability.metrics import SchedulerMetrics, SchedulerStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts:
    """What does not change while serving."""

    server_args: dict[str, Any]  # resolved arguments, for /server_info
    memory_usage: dict[str, float]
    max_running_requests: int
    decode_log_interval: int
    dp_rank: int
    is_logging_rank: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestsNow:
    """Where the requests of a scheduler are at one moment."""

    decoding: Sequence[Req]
    holding: Sequence[Req]  # slots: those, and whose prompts are being computed
    waiting: Sequence[Req]
    num_grammar: int  # that wait for a grammar
    is_paused: bool

    @property
    def num_paused(self) -> int:
        return len(self.holding) if self.is_paused else 0

    @property
    def num_retracted(self) -> int:
        return sum(req.num_retractions > 0 for req in self.waiting)


Look = Callable[[], RequestsNow]


PREFILL_MODE = "prefill"


class SchedulerReports:
    """Statistics of one scheduler.

    A window is the time between two reports of decode steps, without the time at rest.
    """

    def __init__(
        self,
        facts: ReportFacts,
        *,
        tree_cache: BasePrefixCache,
        allocator: BaseTokenToKVPoolAllocator,
        results: BatchResultProcessor,
        metrics: SchedulerMetrics | None,
        new_token_ratio: NewTokenRatio,
        count_replays: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`count_replays`: captured steps that were replayed so far, by what they are of.

        PREFILL_MODE, decode, or a part of a speculative step.
        """
        self.facts = facts
        self.tree_cache = tree_cache
        self.allocator = allocator
        self.results = results
        self.metrics = metrics
        self.new_token_ratio = new_token_ratio
        self.count_replays = count_replays
        self.startup_s = 0.0  # set by the process's entry, once everything is built
        self.last_gen_throughput = 0.0
        self.cache_hit_rate = 0.0
        self.num_retracted_total = 0
        self._waits: list[float] = []  # seconds, of those whose prefill is about to be launched
        self._decode_steps = 0
        self._shown: tuple[object, ...] = ()
        self._is_resting = True  # no step since all results were read
        self._busy_s = 0.0  # of the window: a step was in flight
        self._busy_until = 0.0
        self.occupancy = 0.0  # of the last window: share of time with a step in flight
        self._replays_seen = 0  # of steps that generate
        self._replays_shown: dict[str, int] = {}
        self._is_replaying = False  # the decode steps of the last window were captured ones
        self._window_start = time.perf_counter()
        self._window_tokens = 0
        self._window_spec = (0, 0)  # verifications and accepted drafts at its start
        self.accept_length = 0.0  # of the last window with a verification
        self.accept_rate = 0.0

    # -- events ---------------------------------------------------------------------------------

    def on_admission(self, waited_s: float) -> None:
        """A request left the waiting queue for its first prefill step, yet to be launched."""
        self._waits.append(waited_s)

    def on_weight_update(self, source: str, elapsed_s: float) -> None:
        """Weights were loaded. `source`: disk, distributed, tensor or ipc."""
        if self.metrics is not None:
            self.metrics.observe_weight_load(source, elapsed_s)

    def on_launch(self) -> float:
        """A step begins; returns when, by `time.perf_counter`."""
        now = time.perf_counter()
        if self._is_resting:
            self._is_resting = False
            self._start_window(now)
        return now

    def on_result(self, launched_at: float, ended_at: float) -> None:
        """A step's result was read. Times by `time.perf_counter`; steps come in their order."""
        self._busy_s += max(0.0, ended_at - max(launched_at, self._busy_until))
        self._busy_until = ended_at

    def on_prefill(self, batch: ScheduleBatch, look: Look) -> None:
        """A prefill step has just been launched; `look` does not see it yet."""
        num_new, num_cached = sum(batch.extend_lens), batch.num_cached_tokens
        self.cache_hit_rate = num_cached / (num_cached + num_new)
        waits, self._waits = self._waits, []
        if self.metrics is None and not self.facts.is_logging_rank:
            return
        now = look()
        if self.metrics is not None:
            for waited_s in waits:
                self.metrics.observe_queue_time(waited_s)
            self.metrics.count_prefill(num_new, num_cached)
            holding = list(dict.fromkeys([*now.holding, *batch.reqs]))
            self._log_stats(dataclasses.replace(now, holding=holding))
        if self.facts.is_logging_rank:
            logger.info(
                "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, "
                "token usage: %.2f, #running-req: %d, #queue-req: %d",
                len(batch),
                num_new,
                num_cached,
                self.token_usage,
                *(len(now.decoding), len(now.waiting)),
            )

    def on_decode(self, look: Look) -> None:
        """The result of a decode step was read."""
        self._decode_steps += 1
        if self._decode_steps % self.facts.decode_log_interval:
            return
        self._close_window()
        replays = sum(n for mode, n in self.count_replays().items() if mode != PREFILL_MODE)
        self._is_replaying, self._replays_seen = replays > self._replays_seen, replays
        if self.metrics is None and not self.facts.is_logging_rank:
            return
        now = look()
        self._log_stats(now)
        if self.facts.is_logging_rank:
            logger.info(
                "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, "
                "%sgen throughput (token/s): %.2f, #queue-req: %d",
                len(now.decoding),
                self.num_used_tokens,
                self.token_usage,
                self._accept_words(),
                self.last_gen_throughput,
                len(now.waiting),
            )

    def _accept_words(self) -> str:
        if self.results.spec_total is None:
            return ""
        return f"accept len: {self.accept_length:.2f}, accept rate: {self.accept_rate:.2f}, "

    def on_retract(self, retracted: Sequence[Req], new_ratio: float) -> None:
        """The KV pool ran dry and these requests were sent back to the queue."""
        self.num_retracted_total += len(retracted)
        if self.metrics is not None:
            self.metrics.count_retracted(
                len(retracted),
                sum(len(r.origin_input_ids) for r in retracted),
                sum(len(r.output_ids) for r in retracted),
            )
        logger.info(
            "KV pool is full: retracted %d requests (%s), new token ratio is now %.3f",
            len(retracted),
            ", ".join(r.rid for r in retracted[:4]),
            new_ratio,
        )

    def on_standstill(self, look: Look) -> None:
        """All results were read, and no step follows for now: a pause, or nobody is left."""
        self._close_window()
        self._is_resting = True
        self.last_gen_throughput = self.occupancy = 0.0
        if self.metrics is not None:
            self._log_stats(look())

    def on_rest(self, look: Look) -> None:
        """An iteration without a step: show what messages and transfers have changed."""
        if self.metrics is not None:
            now = look()
            if self._facts_of(now) != self._shown:
                self._log_stats(now)

    def reset_counters(self) -> None:
        """Back to zero, as a cache flush demands."""
        self._close_window()
        self.results.num_generated_tokens = 0
        self.results.spec_total = None
        self._window_spec = (0, 0)
        self._decode_steps = 0
        self._start_window(time.perf_counter())

    def _close_window(self) -> None:
        """Throughput, occupancy and token counter of the time since the last call."""
        now = time.perf_counter()
        generated = self.results.num_generated_tokens - self._window_tokens
        elapsed = now - self._window_start
        self.last_gen_throughput = generated / elapsed if elapsed > 0 else 0.0
        # A step that began in the window before is counted in the one in which it ended.
        self.occupancy = min(1.0, self._busy_s / elapsed) if elapsed > 0 else 0.0
        if self.metrics is not None:
            self.metrics.count_decode(generated)
        self._close_spec_window()
        self._start_window(now)

    def _close_spec_window(self) -> None:
        total = self.results.spec_total
        if total is None:
            return
        verified = total.verify_ct - self._window_spec[0]
        drafts = total.num_correct_drafts - self._window_spec[1]
        if verified:
            self.accept_length = 1 + drafts / verified
            self.accept_rate = drafts / (verified * max(1, total.num_draft_tokens - 1))
        self._window_spec = (total.verify_ct, total.num_correct_drafts)

    def _start_window(self, now: float) -> None:
        self._window_start = now
        self._busy_s = 0.0
        self._window_tokens = self.results.num_generated_tokens

    # -- state ----------------------------------------------------------------------------------

    @property
    def num_used_tokens(self) -> int:
        """Slots that running requests hold: neither free nor merely cached."""
        free = self.allocator.available_size() + self.tree_cache.evictable_size()
        return self.allocator.size - free

    @property
    def token_usage(self) -> float:
        return self.num_used_tokens / self.allocator.size

    def _facts_of(self, now: RequestsNow) -> tuple[object, ...]:
        """What may change without a step."""
        counts = (len(now.holding), len(now.waiting), now.num_grammar, now.is_paused)
        return (*counts, self._host_tokens())

    def _log_stats(self, now: RequestsNow) -> None:
        if self.metrics is None:
            return
        self._shown = self._facts_of(now)
        host_used, host_total = self._host_tokens()
        self.metrics.log_stats(
            SchedulerStats(
                num_running_reqs=len(now.holding),
                num_queue_reqs=len(now.waiting),
                num_grammar_queue_reqs=now.num_grammar,
                num_retracted_reqs=now.num_retracted,
                num_paused_reqs=now.num_paused,
                decode_sum_seq_lens=sum(req.seq_len for req in now.decoding),
                utilization=self._utilization(now),
                fwd_occupancy=self.occupancy,
                is_cuda_graph=float(self._is_replaying),
                num_used_tokens=self.num_used_tokens,
                token_usage=self.token_usage,
                gen_throughput=self.last_gen_throughput,
                cache_hit_rate=self.cache_hit_rate,
                kv_available_tokens=self.allocator.available_size(),
                kv_evictable_tokens=self.tree_cache.evictable_size(),
                new_token_ratio=self.new_token_ratio.value,
                spec_accept_length=self.accept_length,
                spec_accept_rate=self.accept_rate,
                hicache_host_used_tokens=host_used,
                hicache_host_total_tokens=host_total,
            )
        )
        for mode, count in self.count_replays().items():
            self.metrics.count_graph_passes(mode, count - self._replays_shown.get(mode, 0))
            self._replays_shown[mode] = count
        for name, pool in self.tree_cache.side_pools().items():
            self.metrics.log_side_pool(
                name, used=pool.used, evictable=pool.evictable, total=pool.total
            )

    def _host_tokens(self) -> tuple[int, int]:
        """(used, all) tokens of the host KV pool; zeros without one."""
        controller = self.tree_cache.hicache_controller()
        if controller is None:
            return 0, 0
        pool = controller.mem_pool_host
        return pool.size - pool.available_size(), pool.size

    def internal_state(self) -> dict[str, Any]:
        """One entry of `/server_info`'s `internal_states`."""
        total = self.results.spec_total
        return {
            **({} if total is None else {"avg_spec_accept_length": total.accept_length}),
            **self.facts.server_args,
            "last_gen_throughput": self.last_gen_throughput,
            "memory_usage": self.facts.memory_usage,
            "effective_max_running_requests_per_dp": self.facts.max_running_requests,
            "startup_time": self.startup_s,
            "num_retracted_requests_total": self.num_retracted_total,
        }

    def _utilization(self, now: RequestsNow) -> float:
        return len(now.holding) / self.facts.max_running_requests

    def load(self, now: RequestsNow) -> dict[str, Any]:
        """One entry of `/v1/loads`."""
        used = self.num_used_tokens
        running, waiting, num_grammar = now.holding, now.waiting, now.num_grammar
        waiting_tokens = sum(len(r.origin_input_ids) + len(r.output_ids) for r in waiting)
        return {
            "timestamp": time.time(),
            "dp_rank": self.facts.dp_rank,
            "num_running_reqs": len(running),
            "num_waiting_reqs": len(waiting) + num_grammar,
            "num_total_reqs": len(running) + len(waiting) + num_grammar,
            "num_waiting_uncached_tokens": waiting_tokens,
            "num_used_tokens": used,
            "num_total_tokens": used + waiting_tokens,
            "num_active_tokens": sum(r.seq_len for r in running),
            "max_total_num_tokens": self.allocator.size,
            "max_running_requests": self.facts.max_running_requests,
            "token_usage": used / self.allocator.size,
            "gen_throughput": self.last_gen_throughput,
            "cache_hit_rate": self.cache_hit_rate,
            "utilization": self._utilization(now),
            **self._speculative_load(),
            "memory": {
                "weight_gb": self.facts.memory_usage["weight"],
                "kv_cache_gb": self.facts.memory_usage["kv_cache"],
                "graph_gb": self.facts.memory_usage["graph"],
                "token_capacity": self.allocator.size,
            },
            "queues": {
                "waiting": len(waiting),
                "grammar": num_grammar,
                "paused": now.num_paused,
                "retracted": now.num_retracted,
            },
        }

    def _speculative_load(self) -> dict[str, Any]:
        if self.results.spec_total is None:
            return {}
        rates = {"accept_length": self.accept_length, "accept_rate": self.accept_rate}
        return {"speculative": rates}

    @staticmethod
    def freeze_gc() -> None:
        """Take all objects alive now out of the garbage collector's sight."""
        gc.collect()
        gc.freeze()
