"""`TpModelWorker`: one model on one tensor-parallel rank, as the scheduler sees it.

Turns a `ScheduleBatch` into a `ForwardBatch`, runs the model and the sampler, and returns a
`GenerationBatchResult` whose host values may be read later (`resolve`), so that the overlap loop
can prepare the next step meanwhile. Scheduler thread only; every rank calls it in lockstep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.platforms import current_platform

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


@dataclass(slots=True)
class ResolvedTokens:
    """Host values of one step. `next_token_ids` is flat, request after request."""

    next_token_ids: list[int]
    accept_lens: list[int] | None  # tokens per request; None: one each
    nan_rows: list[bool] | None  # requests whose logits held NaN; None: none did


@dataclass(slots=True)
class GenerationBatchResult:
    """What a step yields: accepted tokens of each request, on the device until `resolve`."""

    next_token_ids: torch.Tensor  # int64, flat [sum of accept_lens], on the device
    logits_output: LogitsProcessorOutput
    accept_lens: torch.Tensor | None = None  # int64 [b] on the device; None: one token each
    nan_rows: torch.Tensor | None = None  # bool [b]
    copy_done: Any = None  # platform event after the asynchronous copies to the host

    def start_copy(self) -> None:
        """Begin the copies to the host; they end before `resolve` returns."""
        platform = current_platform()
        self.next_token_ids = platform.to_host_async(self.next_token_ids)
        if self.accept_lens is not None:
            self.accept_lens = platform.to_host_async(self.accept_lens)
        if self.nan_rows is not None:
            self.nan_rows = platform.to_host_async(self.nan_rows)
        self.copy_done = platform.event()
        self.copy_done.record()

    def resolve(self) -> ResolvedTokens:
        """Wait for the step and return its host values."""
        if self.copy_done is not None:
            self.copy_done.synchronize()
        nan_rows = self.nan_rows.tolist() if self.nan_rows is not None else None
        return ResolvedTokens(
            next_token_ids=self.next_token_ids.tolist(),
            accept_lens=None if self.accept_lens is None else self.accept_lens.tolist(),
            nan_rows=nan_rows if nan_rows is not None and any(nan_rows) else None,
        )


class TpModelWorker:
    """Runs the target model of one rank. Implements the `BatchWorker` interface.

    `last_token_ids` int64 [rows of the request table] holds on the device the token that each
    request sampled last: written after sampling, read as the input of its next decode step, so
    decode never waits for the host.
    """

    # The most tokens one step can add to a request; speculative workers have more.
    max_tokens_per_step = 1

    def __init__(self, model_runner: ModelRunner) -> None:
        self.model_runner = model_runner
        self.device = model_runner.device
        self.last_token_ids = torch.zeros(
            model_runner.req_to_token_pool.size, dtype=torch.int64, device=self.device
        )

    @property
    def model_config(self) -> ModelConfig:
        return self.model_runner.model_config

    def get_memory_pool(self) -> tuple[ReqToTokenPool, BaseTokenToKVPoolAllocator]:
        """The request table and the slot allocator; a draft worker shares both."""
        return self.model_runner.req_to_token_pool, self.model_runner.token_to_kv_pool_allocator

    def extra_pools(self) -> list[Any]:
        """KV pools beside the target's that a hierarchical cache must carry along: none."""
        return []

    def clear_cache_pool(self) -> None:
        """Nothing of its own to clear: the shared allocator is cleared by the scheduler."""

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """Run one step of `batch` and sample. Collective over the tensor-parallel ranks."""
        forward_batch = self.build_forward_batch(batch)
        logits_output = self.model_runner.forward(forward_batch)
        next_token_ids = self.model_runner.sample(logits_output, forward_batch)
        self.last_token_ids[forward_batch.req_pool_indices] = next_token_ids
        result = GenerationBatchResult(
            next_token_ids=next_token_ids,
            logits_output=logits_output,
            nan_rows=self.model_runner.nan_rows(logits_output),
        )
        result.start_copy()
        return result

    def build_forward_batch(self, batch: ScheduleBatch) -> ForwardBatch:
        """Tensors of the step on the device, by asynchronous copies from the host arrays."""
        runner = self.model_runner
        req_pool_indices = self._to_device(batch.req_pool_indices)
        seq_lens = self._to_device(batch.seq_lens)
        common: dict[str, Any] = {
            "forward_mode": batch.forward_mode,
            "batch_size": len(batch),
            "req_pool_indices": req_pool_indices,
            "seq_lens": seq_lens,
            "seq_lens_cpu": batch.seq_lens.tolist(),
            "out_cache_loc": current_platform().to_device_async(batch.out_cache_loc),
            "req_to_token_pool": runner.req_to_token_pool,
            "token_to_kv_pool": runner.token_to_kv_pool,
            "sampling_info": batch.sampling_info,
            "logprobs": batch.logprob_request(),
            "hicache_consumer_index": batch.hicache_consumer_index,
            "capture_hidden_mode": self._capture_mode(batch),
        }
        if batch.forward_mode is ForwardMode.DECODE:
            return ForwardBatch(
                input_ids=self.last_token_ids[req_pool_indices], positions=seq_lens - 1, **common
            )
        prefix, extend = np.array(batch.prefix_lens), np.array(batch.extend_lens)
        starts = np.repeat(prefix - (np.cumsum(extend) - extend), extend)
        positions = np.arange(int(extend.sum()), dtype=np.int64) + starts
        input_ids = np.frombuffer(batch.extend_input_ids(), dtype=np.int64)
        return ForwardBatch(
            input_ids=self._to_device(input_ids),
            positions=self._to_device(positions),
            extend_seq_lens=self._to_device(extend),
            extend_prefix_lens=self._to_device(prefix),
            extend_seq_lens_cpu=batch.extend_lens,
            extend_prefix_lens_cpu=batch.prefix_lens,
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
