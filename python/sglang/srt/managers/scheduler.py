"""`Scheduler`: one per tensor-parallel rank. Wiring, the two event loops and the step functions.

Owns which requests run. Composed of small owners: `RequestReceiver` (what came), `WaitingQueue`
(who waits), `PrefillAdder` (how many fit into a step), the worker (one step on the device),
`BatchResultProcessor` (tokens to request state), `OutputStreamer` (news to the clients),
`SchedulerReports` (logs, metrics, state reports). All ranks run the same schedule in lockstep:
every decision is made from replicated state and from the clock of `ReceivedStep`.

Both loops call the same step functions. `event_loop_overlap` reads the result of step n after it
has launched step n+1; whatever needs the host to be up to date (an abort, a retraction, a request
with penalties or a grammar) calls `_drain_results` first. That order is decided here only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import tp_cpu_group
from sglang.srt.environ import envs
from sglang.srt.managers.control_handlers import make_report_handlers
from sglang.srt.managers.deferred_flush import DeferredFlush
from sglang.srt.managers.finish_check import FinishAbort
from sglang.srt.managers.hicache_setup import register_draft
from sglang.srt.managers.io_struct import (
    AbandonReq,
    AbortReq,
    BatchTokenizedGenerateReqInput,
    ContinueGenerationReqInput,
    ContinueGenerationReqOutput,
    ControlReqInput,
    ControlReqOutput,
    FlushCacheReqInput,
    PauseGenerationReqInput,
    PauseGenerationReqOutput,
    ShutdownReq,
    SlowDownReqInput,
    TokenizedGenerateReqInput,
    UpdateWeightVersionReqInput,
)
from sglang.srt.managers.launch_pacer import LaunchPacer
from sglang.srt.managers.request_receiver import ReceivedStep
from sglang.srt.managers.schedule_batch import Req, ReqStatus, ScheduleBatch
from sglang.srt.managers.schedule_policy import AddResult, PrefillAdder, SchedulePolicy
from sglang.srt.managers.scheduler_parts import SchedulerConfig, SchedulerParts
from sglang.srt.managers.scheduler_reports import RequestsNow
from sglang.srt.managers.scheduler_update_weights_mixin import SchedulerUpdateWeightsMixin
from sglang.srt.managers.step_brake import StepBrake
from sglang.srt.managers.tp_worker import GenerationBatchResult
from sglang.srt.managers.waiting_queue import QueueLimits, WaitingQueue
from sglang.srt.mem_cache.base_prefix_cache import MIXED_WEIGHTS
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.weight_updater import WeightUpdater
from sglang.srt.platforms import current_platform
from sglang.srt.speculative.draft_runner import draft_kv
from sglang.srt.speculative.eagle_worker import DraftModelWorker
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

logger = logging.getLogger(__name__)

# Waiting and running times are compared with their limits this often.
TIMEOUT_SCAN_INTERVAL_S = 0.5


class Scheduler(SchedulerUpdateWeightsMixin):
    """See the module docstring. One thread: the process's main thread."""

    def __init__(self, config: SchedulerConfig, parts: SchedulerParts) -> None:
        self.config = config
        self.receiver = parts.receiver
        self.worker = parts.worker
        self.draft_worker = parts.draft_worker
        self.tree_cache = parts.tree_cache
        self.grammar_manager = parts.grammar_manager
        self.result_processor = parts.result_processor
        self.streamer = parts.streamer
        self.reports = parts.reports
        self.profiler = parts.profiler
        self.checker = parts.checker
        self.hicache_control = parts.hicache_control
        self._send_to_front = parts.send_to_front
        self.beat = parts.beat
        self.kv_events = parts.kv_events
        self.memory_saver = parts.memory_saver
        self._weight_updater = parts.weight_updater

        self.req_to_token_pool, self.token_to_kv_pool_allocator = self.worker.get_memory_pool()

        self.waiting_queue = self._make_waiting_queue(parts.policy)
        self.running_batch = self._new_batch([])
        self.cur_batch: ScheduleBatch | None = None
        self.last_batch: ScheduleBatch | None = None  # a prefill not yet merged into running
        self.chunked_req: Req | None = None
        self.result_queue: deque[tuple[ScheduleBatch, GenerationBatchResult]] = deque()
        self.pacer = LaunchPacer()
        self.new_token_ratio = parts.new_token_ratio
        self.weight_version = config.weight_version
        self.is_paused = False  # retract / in_place pause
        self.brake = StepBrake()
        self.deferred_flush = DeferredFlush(
            flush=self.flush_cache,
            is_idle=lambda: self._is_no_request() and not self.tree_cache.has_pending_transfers(),
            reply=self.reply,
        )
        self.forward_ct_decode = 0
        self.stopping = False
        self._now = time.time()
        self._paused_s = 0.0  # in all, see `_serving_time`
        self._awake_since = 0.0  # by `time.perf_counter`: the iteration had its messages
        self._next_timeout_scan = 0.0
        self._idle_checked = False
        self._kv_is_mixed = False  # KV of other weights is cached under the tree's fingerprint
        self._released_seen = 0  # `num_released` when the running batch was last filtered
        self.hicache_draft_synced: bool | None = None  # None: no draft pool, or no tiers
        self._maybe_register_hicache_draft()
        self._handlers = self._make_handlers()

    def _make_waiting_queue(self, policy: SchedulePolicy) -> WaitingQueue:
        limits = QueueLimits(
            max_queued=self.config.max_queued_requests,
            enable_priority=self.config.enable_priority,
            context_len=self.config.context_len,
            pool_size=self.token_to_kv_pool_allocator.size,
            step_slots=self.worker.step_shape.num_slots,
        )
        return WaitingQueue(
            limits, policy=policy, tree_cache=self.tree_cache, end=self._finish_without_slots
        )

    def _get_draft_kv_pool(self) -> tuple[KVCache | None, ModelConfig | None]:
        """The draft model's KV pool and configuration; (None, None) where there is none.

        Where its layers are models of their own: the pool of all of them.
        """
        if isinstance(self.draft_worker, EAGLEWorkerV2):
            return draft_kv(self.draft_worker.draft_worker.draft_runner_list)
        if isinstance(self.draft_worker, DraftModelWorker):
            return draft_kv(self.draft_worker.draft_runner_list)
        return None, None

    def _maybe_register_hicache_draft(self) -> None:
        """Where there are tiers and a draft pool: let the draft's KV go wherever the target's goes.

        Before any transfer and before storage is attached.
        """
        pool, model_config = self._get_draft_kv_pool()
        controller = self.tree_cache.hicache_controller()
        worker = self.draft_worker
        if controller is None or not isinstance(worker, DraftModelWorker):
            return
        if pool is not None and model_config is not None:
            self.hicache_draft_synced = register_draft(
                controller, pool, model_config, worker.draft_fingerprint
            )

    # ---------------------------------------------------------------------------------------
    # Event loops
    # ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until a ShutdownReq arrives."""
        if self.config.enable_overlap:
            self.event_loop_overlap()
        else:
            self.event_loop_normal()

    def event_loop_normal(self) -> None:
        """One step at a time: launch, read the result, next."""
        while not self.stopping:
            batch = self._begin_iteration()
            if batch is not None:
                result = self.run_batch(batch)
                self.process_batch_result(batch.snapshot(), result)
            self._end_iteration(batch)

    def event_loop_overlap(self) -> None:
        """Launch step n+1, then read the result of step n while n+1 is on the device."""
        while not self.stopping:
            if self.result_queue:
                self._listen_while_step_runs()
            batch = self._begin_iteration()
            launched = None
            if batch is not None:
                launched = (batch.snapshot(), self.run_batch(batch))
                host_s = time.perf_counter() - self._awake_since
                self.pacer.on_launch(batch.kind, launched[1].launched_at, host_s)
            self._drain_results()
            if launched is not None:
                self.result_queue.append(launched)
            self._end_iteration(batch)

    def _listen_while_step_runs(self) -> None:
        """Leave the next step open for what arrives, while the device has enough to do."""
        spare_s = self.pacer.spare_s(time.perf_counter())
        if spare_s > 0:
            self.receiver.wait(spare_s)

    def _begin_iteration(self) -> ScheduleBatch | None:
        """Take in what has arrived, settle transfers, choose the step."""
        self.beat()
        step = self.receiver.recv(
            idle=self._is_resting(),
            poll_grammars=self.grammar_manager.poll_ready,
            transfers=self._must_poll_transfers(),
        )
        self._awake_since = time.perf_counter()
        if not self._may_step:
            self._paused_s += step.now - self._now
        self._now = step.now
        self.process_input_requests(step)
        if self._weight_updater is not None:
            self._weight_updater.poll_groups()
        if self.hicache_control is not None:
            self.hicache_control.poll(step.now)
        self.tree_cache.check_hicache_events()
        self._expire_requests()
        batch = self.get_next_batch_to_run()
        self.cur_batch = batch
        return batch

    def _end_iteration(self, batch: ScheduleBatch | None) -> None:
        if batch is not None:
            self._idle_checked = False
            if batch.forward_mode is ForwardMode.EXTEND:
                self.last_batch = batch
        else:
            self.reports.on_rest(self._requests_now)
        self.streamer.flush()
        self.deferred_flush.poll(self._now)
        if self.kv_events is not None:
            self.kv_events.publish(self.tree_cache.take_events())
        if batch is None and not self._idle_checked and self._is_no_request():
            # A copy in flight holds locks; its end brings us here again.
            if not self.tree_cache.has_pending_copies():
                self._on_idle()

    def _on_idle(self) -> None:
        """Once each time the last request has gone: check every pool equation."""
        self.checker.check_idle()
        self.new_token_ratio.reset()
        self.reports.on_standstill(self._requests_now)
        self._idle_checked = True

    @property
    def _may_step(self) -> bool:
        return not self.is_paused and self.memory_saver.may_step

    @property
    def _serving_time(self) -> float:
        """The clock of waiting and running times: Unix time that stands while no step may run."""
        return self._now - self._paused_s

    def _has_nothing_to_run(self) -> bool:
        if not self._may_step:
            return not self.result_queue
        return (
            not self.waiting_queue
            and self.running_batch.is_empty()
            and self.last_batch is None
            and self.chunked_req is None
            and not self.result_queue
        )

    def _is_resting(self) -> bool:
        """Nothing to run, or only requests that wait for storage: sleeping costs nobody time."""
        if self._has_nothing_to_run():
            return True
        waits = bool(self.waiting_queue) and self.cur_batch is None and not self.result_queue
        return waits and self.tree_cache.has_pending_transfers()

    def _must_poll_transfers(self) -> bool:
        """Something may end without a wake-up: a copy, or storage work of another rank."""
        if self.tree_cache.has_pending_copies():
            return True
        return tp_cpu_group() is not None and self.tree_cache.has_pending_transfers()

    def _is_no_request(self) -> bool:
        """Nothing running, waiting (ignored while paused), chunked, in flight or compiling."""
        if self._held_requests() or len(self.grammar_manager):
            return False
        if self.waiting_queue and not self.is_paused:
            return False
        # What is left in flight belongs to requests that have ended.
        self._drain_results()
        self._drop_finished()
        return True

    # ---------------------------------------------------------------------------------------
    # Choosing and running a step
    # ---------------------------------------------------------------------------------------

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """The next step: a prefill if any waiting request fits, else a decode; None to rest."""
        self._absorb_last_prefill()
        if not self._may_step:
            return None
        self._drop_ended()
        batch = self.get_new_batch_prefill()
        if batch is not None:
            return batch
        return self._next_decode_batch()

    def _absorb_last_prefill(self) -> None:
        """Move the requests of the last prefill into the running batch.

        Their first token may still be in flight; those that cannot get another one stay out.
        """
        batch, self.last_batch = self.last_batch, None
        if batch is None:
            return
        keep = [i for i, req in enumerate(batch.reqs) if self._goes_on(req)]
        batch.filter(keep)
        if batch.is_empty():
            return
        for req in batch.reqs:
            req.set_status(ReqStatus.DECODE)
        if self.running_batch.is_empty():
            self.running_batch = batch
        else:
            self.running_batch.merge(batch)

    def _goes_on(self, req: Req) -> bool:
        return not req.finished and req is not self.chunked_req and req.remaining_new_tokens > 0

    def get_new_batch_prefill(self) -> ScheduleBatch | None:
        """Admit waiting requests into one prefill step; None when none can be."""
        if not self.waiting_queue and self.chunked_req is None:
            return None
        adder = PrefillAdder(
            self.config.limits,
            tree_cache=self.tree_cache,
            allocator=self.token_to_kv_pool_allocator,
            running=self.running_batch.reqs,
            new_token_ratio=self.new_token_ratio.value,
        )
        if self.chunked_req is not None and not self._continue_chunked(adder):
            return None
        self.waiting_queue.admit(adder, self._room_to_run(adder))
        if not adder.can_run:
            return None
        self.chunked_req = adder.new_chunked_req
        batch = self._new_batch(adder.can_run)
        for req in batch.reqs:
            req.count_cached_tokens(self.tree_cache.storage_backend_name())
        batch.hicache_consumer_index = self.tree_cache.ready_to_load_host_cache()
        batch.prepare_for_extend()
        for req in batch.reqs:
            if req.status is ReqStatus.WAITING:
                req.set_status(ReqStatus.PREFILL)
                req.forward_entry_time = self._now
                req.waited_s += max(self._serving_time - req.waiting_since, 0.0)
                if not req.num_retractions:
                    self.reports.on_admission(req.waited_s)
        return batch

    def _continue_chunked(self, adder: PrefillAdder) -> bool:
        """Put the next chunk of the cut request first; False when it must wait for memory."""
        req = self.chunked_req
        if req is None:
            return True
        self.tree_cache.cache_unfinished_req(req, chunked=True)
        if adder.add_chunked_req(req) is AddResult.ADDED:
            return True
        is_waited_for = bool(self.result_queue) or self.tree_cache.has_pending_copies()
        if self.running_batch.is_empty() and not is_waited_for:
            raise RuntimeError(f"{req}: its next chunk does not fit into an otherwise idle pool")
        return False

    def _room_to_run(self, adder: PrefillAdder) -> int:
        """How many requests more than those of `adder` may run."""
        running = len(self.running_batch) + len(adder.can_run)
        # Rows of requests that ended but whose last result is in flight are still taken.
        free_rows = self.req_to_token_pool.available_size()
        return min(free_rows, self.config.max_running_requests - running)

    def _next_decode_batch(self) -> ScheduleBatch | None:
        batch = self.running_batch
        if batch.is_empty():
            return None
        if self.result_queue and batch.traits.needs_host_tokens:
            self._drain_results()
            self._keep_running(self._goes_on)
        self.tree_cache.release_out_of_window(batch.reqs)
        if not batch.is_empty() and not batch.has_decode_memory():
            self._make_decode_memory()
            batch = self.running_batch
        if batch.is_empty():
            return None
        batch.prepare_for_decode()
        self.new_token_ratio.decay()
        self.forward_ct_decode += 1
        return batch

    def _drop_ended(self) -> None:
        """Take out of the running batch who ended or used up the budget, if there is anybody."""
        released, batch = self.result_processor.num_released, self.running_batch
        # Steps of several tokens use a budget up sooner than their number says.
        may_be_used_up = batch.step_shape.max_tokens > 1 or batch.traits.steps_to_limit <= 0
        if released != self._released_seen or may_be_used_up:
            self._keep_running(self._goes_on)
            self._released_seen = released

    def _keep_running(self, keep: Callable[[Req], bool]) -> None:
        batch = self.running_batch
        batch.filter([i for i, req in enumerate(batch.reqs) if keep(req)])

    def _make_decode_memory(self) -> None:
        """Retract requests, longest remaining output first, until a decode step fits."""
        self._drain_results()
        self._keep_running(self._goes_on)
        batch = self.running_batch
        retracted: list[Req] = []
        while len(batch) > 1 and not self._fits_after_copies(batch):
            victim = max(range(len(batch)), key=lambda i: (batch.reqs[i].remaining_new_tokens, i))
            req = batch.reqs[victim]
            batch.filter([i for i in range(len(batch)) if i != victim])
            self._retract(req, place=len(retracted))
            retracted.append(req)
        if retracted:
            self.new_token_ratio.after_retraction(batch.reqs)
            self.reports.on_retract(retracted, self.new_token_ratio.value)
        if not batch.is_empty() and not self._fits_after_copies(batch):
            # Alone and still too long: only another holder of slots (a chunked prompt) can be why.
            # From now on the full output of each is set aside, so they do not meet again.
            self.new_token_ratio.value = 1.0
            self.reports.on_retract(self._retract_running(), self.new_token_ratio.value)

    def _fits_after_copies(self, batch: ScheduleBatch) -> bool:
        """Whether a decode step fits, if need be once the copies to the host have ended.

        What a retracted request leaves cannot be evicted while it is being copied.
        """
        if batch.has_decode_memory():
            return True
        if not self.tree_cache.has_pending_copies():
            return False
        self.tree_cache.flush_write_through_acks()
        return batch.has_decode_memory()

    def run_batch(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Launch one step on the device. Collective over the TP ranks."""
        self.profiler.on_step()
        self.brake.before_step()
        launched_at = self.reports.on_launch()
        result = self.worker.forward_batch_generation(batch)
        result.launched_at = launched_at
        if batch.forward_mode is ForwardMode.EXTEND:
            self.reports.on_prefill(batch, self._requests_now)  # the device need not wait for it
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> None:
        """Read a step's result into its requests; release those that finished."""
        self.result_processor.process(batch, result)
        self.reports.on_result(result.launched_at, result.ended_at)
        if batch.forward_mode is ForwardMode.DECODE:
            self.reports.on_decode(self._requests_now)

    def _drain_results(self) -> None:
        """Bring the host up to date with everything that was launched."""
        while self.result_queue:
            batch, result = self.result_queue.popleft()
            self.process_batch_result(batch, result)
            self.pacer.on_result(
                batch.kind, result.launched_at, result.ended_at, was_done=result.was_done
            )

    def _new_batch(self, reqs: list[Req]) -> ScheduleBatch:
        return ScheduleBatch(
            reqs,
            req_to_token_pool=self.req_to_token_pool,
            token_to_kv_pool_allocator=self.token_to_kv_pool_allocator,
            tree_cache=self.tree_cache,
            vocab_size=self.config.vocab_size,
            device=str(self.worker.device),
            step_shape=self.worker.step_shape,
        )

    def _requests_now(self) -> RequestsNow:
        return RequestsNow(
            decoding=self.running_batch.reqs,
            holding=self._held_requests(),
            waiting=list(self.waiting_queue),
            num_grammar=len(self.grammar_manager),
            is_paused=self.is_paused,
        )

    # ---------------------------------------------------------------------------------------
    # Requests in
    # ---------------------------------------------------------------------------------------

    def process_input_requests(self, step: ReceivedStep) -> None:
        """Handle every message that arrived, in order, then admit compiled grammars."""
        for message in step.messages:
            self._handlers[type(message)](message)
        ready, failed = self.grammar_manager.take(step.ready_grammars)
        for req in ready:
            req.set_status(ReqStatus.WAITING)
            self.waiting_queue.add(req, self._serving_time)
        for req, error in failed:
            self._finish_without_slots(req, FinishAbort(error, 400, "BadRequestError"))

    def handle_generate_request(self, recv: TokenizedGenerateReqInput) -> None:
        """Build the `Req` and put it in the queue (or in the grammar queue)."""
        req = Req(
            recv,
            eos_token_ids=self.config.eos_token_ids,
            weight_version=self.weight_version,
            stream_interval=self.config.stream_interval,
        )
        req.needs_host_tokens |= self.worker.step_shape.needs_host_tokens
        if recv.is_health_check and not self._has_nothing_to_run():
            # Busy is healthy: the probe must not wait behind real work.
            self._finish_without_slots(req, FinishAbort("The server is busy.", None, None))
            return
        if req.sampling_params.grammar is not None:
            req.status = ReqStatus.GRAMMAR
            self.grammar_manager.add(req)
            return
        self.waiting_queue.add(req, self._serving_time)

    # ---------------------------------------------------------------------------------------
    # Requests out: abort, retract, time-outs
    # ---------------------------------------------------------------------------------------

    def _finish_without_slots(self, req: Req, reason: Any) -> None:
        """End a request that holds neither row nor slots."""
        req.finish_reason = reason
        req.set_status(ReqStatus.FINISHED)
        self.streamer.add(req)

    def _abort_held(self, req: Req, reason: Any) -> None:
        """End a request that holds slots; its results must have been drained."""
        if req is self.chunked_req:
            self.chunked_req = None
        req.finish_reason = reason
        self.result_processor.release_finished(req)

    def abort_request(self, recv: AbortReq | AbandonReq) -> None:
        """End every request that `recv` names, at once, wherever it is."""
        message = recv.abort_message if isinstance(recv, AbortReq) else None
        self._abort_matching(lambda req: recv.means(req.rid), message)

    def _abort_matching(self, matches: Callable[[Req], bool], message: str | None) -> None:
        for req in [*self.waiting_queue.remove(matches), *self.grammar_manager.remove(matches)]:
            text = message or "Abort in waiting queue"
            self._finish_without_slots(req, FinishAbort(text, None, None))
        held = self._held_requests()
        if not any(matches(req) for req in held):
            return
        self._drain_results()
        for req in held:
            if not req.finished and matches(req):
                self._abort_held(req, FinishAbort(message or "Aborted", None, None))
        self._drop_finished()

    def _held_requests(self) -> list[Req]:
        """Requests that hold slots, in admission order."""
        last = self.last_batch.reqs if self.last_batch is not None else []
        held = [*self.running_batch.reqs, *last]
        for batch, _ in self.result_queue:
            held.extend(batch.reqs)
        if self.chunked_req is not None:
            held.append(self.chunked_req)
        return [req for req in dict.fromkeys(held) if not req.finished]

    def _drop_finished(self) -> None:
        self._absorb_last_prefill()
        self._keep_running(lambda req: not req.finished)

    def _retract(self, req: Req, place: int) -> None:
        """Take a request's memory away; it will start over as a prefill, `place`th in the queue."""
        self.result_processor.release_memory(req, insert=True)
        req.reset_for_retract()
        req.set_status(ReqStatus.WAITING)
        self.waiting_queue.put_back(req, place, self._serving_time)

    def _retract_running(self) -> list[Req]:
        """Retract every request that holds slots, in front of the waiting queue; returns them."""
        self._drain_results()
        held = self._held_requests()
        self.chunked_req = None
        self.last_batch = None
        self.running_batch = self._new_batch([])
        for place, req in enumerate(held):
            self._retract(req, place)
        return held

    def _expire_requests(self) -> None:
        """Abort what has waited or run longer than the configured limits."""
        if self._now < self._next_timeout_scan:
            return
        self._next_timeout_scan = self._now + TIMEOUT_SCAN_INTERVAL_S
        self.waiting_queue.expire(self._serving_time)
        running_s = envs.SGLANG_REQ_RUNNING_TIMEOUT.get()
        if running_s > 0:
            self._expire_running(running_s)

    def _expire_running(self, running_s: float) -> None:
        now = self._serving_time
        # What was no waiting since the request entered the queue was running.
        late = [
            req
            for req in self._held_requests()
            if now - req.queue_entry_time - req.waited_s > running_s
        ]
        if not late:
            return
        self._drain_results()
        text = f"Request running timeout reached ({running_s} s)."
        for req in late:
            if not req.finished:
                self._abort_held(req, FinishAbort(text, 503, "ServiceUnavailable"))
        self._drop_finished()

    # ---------------------------------------------------------------------------------------
    # Control requests
    # ---------------------------------------------------------------------------------------

    def _make_handlers(self) -> dict[type, Callable[[Any], None]]:
        """Message type -> what to do. Control handlers return their reply."""
        control: dict[type, Callable[[Any], ControlReqOutput | None]] = {
            FlushCacheReqInput: lambda recv: self.deferred_flush.handle(recv, self._now),
            PauseGenerationReqInput: self.pause_generation,
            ContinueGenerationReqInput: self.continue_generation,
            SlowDownReqInput: self.brake.handle,
            **make_report_handlers(
                self.reports, self.profiler, look=self._requests_now, tiers=self._tier_state
            ),
            UpdateWeightVersionReqInput: self.update_weight_version,
        }
        if self.hicache_control is not None:
            control |= self.hicache_control.start(self._why_busy, self.reply)
        if self._weight_updater is not None:
            control |= self.weight_handlers()
        handlers: dict[type, Callable[[Any], None]] = {
            TokenizedGenerateReqInput: self.handle_generate_request,
            BatchTokenizedGenerateReqInput: self._handle_batch,
            AbortReq: self.abort_request,
            AbandonReq: self.abort_request,
            ShutdownReq: self._handle_shutdown,
        }
        for kind, handler in control.items():
            handlers[kind] = self._replying(handler)
        return handlers

    def _replying(
        self, handler: Callable[[Any], ControlReqOutput | None]
    ) -> Callable[[ControlReqInput], None]:
        def handle(recv: ControlReqInput) -> None:
            reply = handler(recv)
            if reply is not None:
                self.reply(recv, reply)

        return handle

    def reply(self, recv: ControlReqInput, reply: ControlReqOutput) -> None:
        """Answer the front; nothing on ranks other than 0."""
        if not self.config.is_rank_zero:
            return
        reply.control_id = recv.control_id
        reply.dp_rank = self.config.dp_rank
        # News that was collected before the reply must arrive before it.
        self.streamer.flush()
        self._send_to_front(reply)

    def _handle_batch(self, recv: BatchTokenizedGenerateReqInput) -> None:
        for request in recv.requests:
            self.handle_generate_request(request)

    def _handle_shutdown(self, recv: ShutdownReq) -> None:
        self.stopping = True

    def flush_cache(self, empty_cache: bool = True) -> bool:
        """Clear every piece of state that depends on cached KV, or nothing.

        Returns False, with a warning, while any request is active. Transfers of a hierarchical
        cache in flight do not refuse it; L3 storage is not touched. `empty_cache`: give memory that
        the device's allocator keeps for later back as well.
        """
        if not self._is_no_request():
            logger.warning(
                "Cache not flushed because there are pending requests. %s", self._pending_counts()
            )
            return False
        self.cur_batch = None
        self.last_batch = None
        self.tree_cache.reset()
        self.grammar_manager.reset()
        self.req_to_token_pool.clear()
        self.token_to_kv_pool_allocator.clear()
        if self.draft_worker is not None:
            self.draft_worker.clear_cache_pool()
        if self._weight_updater is not None:
            # An update without a flush or isolation has left the old one in place.
            self._kv_is_mixed = False
            self.tree_cache.finish_weights_update(self._weight_updater.kv_fingerprint())
        self.forward_ct_decode = 0
        self.reports.reset_counters()
        if empty_cache:
            current_platform().empty_cache()
        self.reports.on_standstill(self._requests_now)
        logger.info("Cache flushed successfully!")
        return True

    def _why_busy(self) -> str | None:
        """None when no request is there in any state, else how many are."""
        if self._is_no_request() and not self.waiting_queue:
            return None
        return self._pending_counts()

    def _pending_counts(self) -> str:
        waiting = len(self.waiting_queue) + len(self.grammar_manager)
        counts = f"#queue-req: {waiting}, #running-req: {len(self._held_requests())}"
        notes = {
            "a prompt is being computed": bool(self.chunked_req or self.last_batch),
            f"{len(self.grammar_manager)} wait for a grammar": bool(len(self.grammar_manager)),
            "generation is paused": self.is_paused,
        }
        told = "; ".join(note for note, holds in notes.items() if holds)
        return f"{counts} ({told})" if told else counts

    def pause_generation(self, recv: PauseGenerationReqInput) -> PauseGenerationReqOutput:
        """`retract` and `in_place` stop stepping; `abort` is carried out by the front."""
        if recv.mode not in ("retract", "in_place"):
            return PauseGenerationReqOutput()
        self._drain_results()
        self._drop_finished()
        self.is_paused = True
        if recv.mode == "retract":
            self._retract_running()
        self.reports.on_standstill(self._requests_now)
        return PauseGenerationReqOutput()

    def continue_generation(self, recv: ContinueGenerationReqInput) -> ContinueGenerationReqOutput:
        """Step again. Harmless when not paused."""
        if recv.torch_empty_cache:
            current_platform().empty_cache()
        self.is_paused = False
        return ContinueGenerationReqOutput()

    # ---------------------------------------------------------------------------------------
    # What weight updates need (see `WeightUpdateHost`)
    # ---------------------------------------------------------------------------------------

    @property
    def weight_updater(self) -> WeightUpdater:
        if self._weight_updater is None:
            raise RuntimeError("this scheduler's worker has no weights")
        return self._weight_updater

    def settle_requests(self, abort_all: bool) -> str | None:
        """Read all results, abort all if asked; None when a flush is possible, else counts."""
        if abort_all:
            self._abort_matching(lambda req: True, None)
        self._drain_results()
        return None if self._is_no_request() else self._pending_counts()

    def isolate_cached_kv(self) -> None:
        """Let the cache go on under the weights' present fingerprint: old KV only misses.

        Without isolation old KV stays in use, and new KV is kept beside it under the old name: then
        nothing goes to storage until the next flush, also if the old weights come back.
        """
        fingerprint = self.weight_updater.kv_fingerprint()
        is_other = fingerprint != self.tree_cache.weights_fingerprint
        if is_other and self.config.isolate_weights:
            # They go on, and the old weights may be back before they end.
            for req in self._held_requests():
                req.kv_fingerprint = MIXED_WEIGHTS
        self._kv_is_mixed |= is_other and not self.config.isolate_weights
        if self._kv_is_mixed:
            self.tree_cache.prepare_weights_update()
        else:
            self.tree_cache.finish_weights_update(fingerprint)

    def stamp_weight_version(self, version: str) -> None:
        """Label what is generated from now on; requests note at which token it changed."""
        self._drain_results()
        self.weight_version = version
        for req in [*self._held_requests(), *self.waiting_queue, *self.grammar_manager.pending()]:
            req.weight_versions.change(version, len(req.output_ids))

    def _tier_state(self) -> dict[str, Any]:
        """What of the cache's tiers can differ from the settings, for `/server_info`."""
        if self.hicache_control is None:
            return {}
        return {**self.hicache_control.status(), "hicache_draft_synced": self.hicache_draft_synced}
