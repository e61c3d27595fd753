"""`TpModelWorker`: one model on one tensor-parallel rank, as the scheduler sees it.

Turns a `ScheduleBatch` into a `ForwardBatch`, runs the model and the sampler, and returns a
`GenerationBatchResult` whose host values may be read later (`resolve`), so that the overlap loop
can prepare the next step meanwhile. Scheduler thread only; every rank calls it in lockstep.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from sglang.srt.layers.dispatch import send_to_host
from sglang.srt.layers.logits_processor import HostReport, LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch, StepShape
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.prefill_graph_runner import PrefillStep
from sglang.srt.platforms import current_platform

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


class LayerLoadCounter(Protocol):
    """The cache's view of a load in progress; see ``cache_controller``."""

    def set_consumer(self, index: int) -> None:
        """Choose the load that ``wait_until`` refers to; -1: none."""

    def wait_until(self, layer_idx: int) -> None:
        """Wait (on the current stream) for one layer of it."""


@dataclass(slots=True)
class ResolvedTokens:
    """Host values of one step. `next_token_ids` is flat, request after request."""

    next_token_ids: list[int]
    accept_lens: list[int] | None  # tokens per request; None: one each
    nan_rows: list[bool] | None  # requests whose logits held NaN; None: none did

    @property
    def is_plain(self) -> bool:
        """One token a request, and all of them good."""
        return self.accept_lens is None and self.nan_rows is None


@dataclass(slots=True)
class GenerationBatchResult:
    """What a step yields: accepted tokens of each request, on the device until `resolve`."""

    # int64 [b]; [b, d] with `accept_lens`: of each row the first so many count.
    next_token_ids: torch.Tensor
    logits_output: LogitsProcessorOutput
    accept_lens: torch.Tensor | None = None  # int64 [b] on the device; None: one token each
    nan_rows: torch.Tensor | None = None  # [b], not 0 or false: it has NaN
    # Of a captured step whose choice stands: `next_token_ids` and `nan_rows`, on their way already.
    report: HostReport | None = None
    copy_done: Any = None  # platform event after the asynchronous copies to the host
    launched_at: float = 0.0  # by `time.perf_counter`; set by the scheduler
    # Set by `resolve`: when (by `time.perf_counter`), and whether that was so before it was called.
    ended_at: float = 0.0
    was_done: bool = False

    @property
    def tokens_per_req(self) -> int:
        """Most tokens of a request in this step, and its rows in `logits_output`."""
        return self.next_token_ids.shape[1] if self.next_token_ids.dim() > 1 else 1

    @property
    def ended_time(self) -> float:
        """`ended_at` as Unix time."""
        return time.time() - (time.perf_counter() - self.ended_at)

    def start_copy(self) -> None:
        """Begin the copies to the host; they end before `resolve` returns."""
        if self.report is not None:
            self.copy_done = self.report.done
            return
        self.next_token_ids = send_to_host(self.next_token_ids)
        if self.accept_lens is not None:
            self.accept_lens = send_to_host(self.accept_lens)
        if self.nan_rows is not None:
            self.nan_rows = send_to_host(self.nan_rows)
        self.copy_done = current_platform().event()
        self.copy_done.record()

    def resolve(self) -> ResolvedTokens:
        """Wait for the step and return its host values."""
        if self.copy_done is not None:
            self.was_done = self.copy_done.query()
            if not self.was_done:
                self.copy_done.synchronize()
        self.ended_at = time.perf_counter()
        accept_lens = None if self.accept_lens is None else self.accept_lens.tolist()
        if self.report is not None:
            tokens, nan_rows = self.report.read(self.next_token_ids.shape[0])
        else:
            rows: list[Any] = self.next_token_ids.tolist()
            tokens = rows
            if accept_lens is not None:
                tokens = [token for row, count in zip(rows, accept_lens) for token in row[:count]]
            nan_rows = self.nan_rows.tolist() if self.nan_rows is not None else []
        return ResolvedTokens(
            next_token_ids=tokens,
            accept_lens=accept_lens,
            nan_rows=list(map(bool, nan_rows)) if any(nan_rows) else None,
        )


class BatchWorker(Protocol):
    """What the scheduler steps: a model, or a target with a draft."""

    @property
    def device(self) -> torch.device: ...

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def step_shape(self) -> StepShape:
        """Tokens and slots of a decode step, per request."""
        ...

    def get_memory_pool(self) -> tuple[ReqToTokenPool, BaseTokenToKVPoolAllocator]:
        """The request table and the slot allocator; a draft shares both."""
        ...

    def register_hicache_layer_transfer_counter(self, counter: LayerLoadCounter) -> None:
        """Make forward passes wait, layer by layer, for loads from the host."""
        ...

    def clear_cache_pool(self) -> None:
        """Clear what a cache flush must clear beside the shared pools."""
        ...

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one step of `batch` and sample. Collective over the tensor-parallel ranks."""
        ...


class TpModelWorker:
    """Runs the target model of one rank. Implements the `BatchWorker` interface."""

    # One token a step; speculative workers have more.
    step_shape = StepShape()

    def __init__(self, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner
        self.device = model_runner.device
        self._layer_counter: LayerLoadCounter | None = None

    @property
    def last_token_ids(self) -> torch.Tensor:
        """int64 [rows of the request table], on the device: what each request sampled last."""
        return self.model_runner.last_token_ids

    @property
    def target_runner(self) -> ModelRunner:
        """The runner of the model that decides about tokens."""
        return self.model_runner

    @property
    def model_config(self) -> ModelConfig:
        return self.model_runner.model_config

    def get_memory_pool(self) -> tuple[ReqToTokenPool, BaseTokenToKVPoolAllocator]:
        """The request table and the slot allocator; a draft worker shares both."""
        return self.model_runner.req_to_token_pool, self.model_runner.token_to_kv_pool_allocator

    def register_hicache_layer_transfer_counter(self, counter: LayerLoadCounter) -> None:
        """Make forward passes wait, layer by layer, for what ``counter`` says is on its way."""
        self._layer_counter = counter
        self.model_runner.token_to_kv_pool.register_layer_transfer_counter(counter)

    def set_hicache_consumer(self, consumer_index: int) -> None:
        """Say which load the coming forward pass waits for; -1: none."""
        if self._layer_counter is not None:
            self._layer_counter.set_consumer(consumer_index)

    def clear_cache_pool(self) -> None:
        """Nothing of its own to clear: the shared allocator is cleared by the scheduler."""

    @torch.inference_mode()  # once for all of a step: to enter it takes as long as a small operator
    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one step of `batch` and sample. Collective over the tensor-parallel ranks."""
        forward_batch = self.build_forward_batch(batch)
        self.set_hicache_consumer(batch.hicache_consumer_index)
        logits_output = self.model_runner.forward(forward_batch)
        next_token_ids = self.model_runner.sample(logits_output, forward_batch)
        is_noted = next_token_ids is logits_output.greedy_token_ids
        if not is_noted:
            self.last_token_ids.index_copy_(0, forward_batch.req_pool_indices, next_token_ids)
        result = GenerationBatchResult(
            next_token_ids=next_token_ids,
            logits_output=logits_output,
            nan_rows=self.model_runner.nan_rows(logits_output),
            report=logits_output.greedy_report if is_noted else None,
        )
        result.start_copy()
        return result

    def build_forward_batch(
        self, batch: ScheduleBatch, hidden_mode: CaptureHiddenMode | None = None
    ) -> ForwardBatch:
        """Tensors of the step on the device, by asynchronous copies from the host arrays.

        `hidden_mode`: which hidden states are kept, for a draft model; None: as the requests wish.
        """
        runner = self.model_runner
        common: dict[str, Any] = {
            "forward_mode": batch.forward_mode,
            "batch_size": len(batch),
            "req_to_token_pool": runner.req_to_token_pool,
            "token_to_kv_pool": runner.token_to_kv_pool,
            "sampling_info": batch.sampling_info,
            "logprobs": batch.logprob_request(),
            "hicache_consumer_index": batch.hicache_consumer_index,
            "capture_hidden_mode": self._capture_mode(batch)
            if hidden_mode is None
            else hidden_mode,
            "state_plan": batch.state_plan,
        }
        if batch.forward_mode is ForwardMode.DECODE:
            return self._build_decode_batch(batch, common)
        return self._build_extend_batch(batch, common)

    def _build_extend_batch(self, batch: ScheduleBatch, common: dict[str, Any]) -> ForwardBatch:
        step = _prefill_step(batch)
        common |= {
            "extend_seq_lens_cpu": batch.extend_lens,
            "extend_prefix_lens_cpu": batch.prefix_lens,
            "seq_lens_cpu": batch.seq_lens.tolist(),
        }
        logprobs = common["logprobs"]
        if logprobs is None or not logprobs.wants_inputs(batch.extend_lens):
            staged = self.model_runner.stage_prefill(step, common["capture_hidden_mode"])
            if staged is not None:
                return ForwardBatch(
                    input_ids=staged.input_ids,
                    positions=staged.positions,
                    req_pool_indices=staged.req_pool_indices,
                    seq_lens=staged.seq_lens,
                    out_cache_loc=staged.out_cache_loc,
                    extend_seq_lens=staged.extend_seq_lens,
                    extend_prefix_lens=staged.extend_prefix_lens,
                    is_staged=True,
                    **common,
                )
        return ForwardBatch(
            input_ids=self._to_device(step.input_ids),
            positions=self._to_device(step.positions),
            req_pool_indices=self._to_device(step.req_pool_indices),
            seq_lens=self._to_device(step.seq_lens),
            out_cache_loc=current_platform().to_device_async(batch.out_cache_loc),
            extend_seq_lens=self._to_device(step.extend_lens),
            extend_prefix_lens=self._to_device(step.prefix_lens),
            **common,
        )

    def _build_decode_batch(self, batch: ScheduleBatch, common: dict[str, Any]) -> ForwardBatch:
        # In one piece: every copy to the device costs the host as much as a small kernel.
        step = np.array((batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc.numpy()))
        if common["capture_hidden_mode"] is CaptureHiddenMode.NULL:
            staged = self.model_runner.stage_decode(step)
            if staged is not None:
                return ForwardBatch(
                    input_ids=staged.input_ids,
                    positions=staged.positions,
                    req_pool_indices=staged.req_pool_indices,
                    seq_lens=staged.seq_lens,
                    seq_lens_cpu=[],
                    out_cache_loc=staged.out_cache_loc,
                    is_staged=True,
                    **common,
                )
        packed = current_platform().to_device_async(torch.from_numpy(step))
        req_pool_indices, seq_lens, out_cache_loc = packed.unbind(0)
        positions = seq_lens - 1
        self.model_runner.req_to_token_pool.write_device(req_pool_indices, positions, out_cache_loc)
        return ForwardBatch(
            input_ids=self.last_token_ids.index_select(0, req_pool_indices),
            positions=positions,
            req_pool_indices=req_pool_indices,
            seq_lens=seq_lens,
            seq_lens_cpu=batch.seq_lens.tolist(),
            out_cache_loc=out_cache_loc,
            **common,
        )

    @staticmethod
    def _capture_mode(batch: ScheduleBatch) -> CaptureHiddenMode:
        if not batch.traits.wants_hidden_states:
            return CaptureHiddenMode.NULL
        return CaptureHiddenMode.FULL

    @staticmethod
    def _to_device(values: np.ndarray) -> torch.Tensor:
        # A copy, because the scheduler's arrays change while the step is on the device.
        return current_platform().to_device_async(torch.from_numpy(values.copy()))


def _prefill_step(batch: ScheduleBatch) -> PrefillStep:
    prefix, extend = np.array(batch.prefix_lens), np.array(batch.extend_lens)
    starts = np.repeat(prefix - (np.cumsum(extend) - extend), extend)
    return PrefillStep(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        prefix_lens=prefix,
        extend_lens=extend,
        input_ids=batch.extend_input_ids(),
        positions=np.arange(int(extend.sum()), dtype=np.int64) + starts,
        out_cache_loc=batch.out_cache_loc.numpy(),
    )
