"""CUDA graphs of decode steps: capture at a ladder of batch sizes, replay padded (or only exact).

A decode step of a small batch is launch overhead for the most part; a graph replays all its
kernels with one call. Owns the static input tensors and the graphs. Weights are read where they
are, so in-place weight updates stay visible; anything that rebinds a parameter breaks the graphs.
Absent on CPU. Scheduler thread only; with several ranks capture and `run` are collective.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from tqdm import tqdm

from sglang.srt.layers.attention.base import AttentionBackend
from sglang.srt.layers.dispatch import checked_argmax
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.model_executor.decode_runner import StagedStep
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import use_attention_backend
from sglang.srt.platforms import current_platform

logger = logging.getLogger(__name__)

T = TypeVar("T")

# cuBLASLt picks the faster kernels for a few dozen rows. It takes longer to pick, which a graph
# pays once; steps that are not captured keep the default.
_MAX_LT_SIZE = 128
# Padding requests read one token and write to the dummy page: harmless and cheap.
_PADDING_SEQ_LEN = 1
_PADDING_SLOT = 0
# Host buffers that inputs are copied from: this step's, the one's on the device, and spare ones.
_NUM_HOST_BUFFERS = 4


class GraphableRunner(Protocol):
    """What a graph is captured over."""

    @property
    def model(self) -> torch.nn.Module: ...

    @property
    def attn_backend(self) -> AttentionBackend: ...

    @property
    def req_to_token_pool(self) -> ReqToTokenPool: ...

    @property
    def token_to_kv_pool(self) -> KVCache: ...

    @property
    def last_token_ids(self) -> torch.Tensor: ...

    @property
    def device(self) -> torch.device: ...


def capture_batch_sizes(max_batch_size: int, requested: list[int] | None = None) -> list[int]:
    """The ladder: fine steps where batches are small and padding would weigh, coarse above.

    It ends with `max_batch_size`. `requested` (a user's list) wins; its sizes above are dropped.
    """
    if requested is not None:
        sizes = sorted({size for size in requested if 0 < size <= max_batch_size})
        return sizes or [max_batch_size]
    ladder = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_batch_size, 32)]
    return [*(size for size in ladder if size < max_batch_size), max_batch_size]


@dataclass(slots=True)
class _Graph:
    graph: ReplayableGraph
    # Overwritten by each replay.
    logits: torch.Tensor  # float32 [size, V]
    report: torch.Tensor  # int64 [2, size]: places of the largest; 1 where a row has NaN or +inf


class _StaticInputs:
    """What captured steps read: one packed tensor a size, filled by one copy from the host."""

    def __init__(self, max_size: int, padding_row: int, device: torch.device) -> None:
        platform = current_platform()
        self._padding = np.array([[padding_row], [_PADDING_SEQ_LEN], [_PADDING_SLOT]])
        host = torch.from_numpy(np.repeat(self._padding, max_size, axis=1).reshape(-1))
        self._hosts = [platform.pin(host.clone()) for _ in range(_NUM_HOST_BUFFERS)]
        self._copied = [platform.event() for _ in range(_NUM_HOST_BUFFERS)]
        self._next = 0
        # A step of size b uses the first 3 * b as [3, b].
        self._packed = host.to(device)
        self._input_ids = torch.zeros(max_size, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_size, dtype=torch.int64, device=device)

    def fill(self, step: np.ndarray, size: int) -> None:
        """Copy a step, int64 [3, b], and neutral requests up to `size`, in stream order."""
        num_reqs = step.shape[1]
        host, copied = self._hosts[self._next], self._copied[self._next]
        self._next = (self._next + 1) % _NUM_HOST_BUFFERS
        copied.synchronize()
        values = host.numpy()[: 3 * size].reshape(3, size)
        values[:, :num_reqs] = step
        values[:, num_reqs:] = self._padding
        self._packed[: 3 * size].copy_(host[: 3 * size], non_blocking=True)
        copied.record()

    def neutral(self, size: int) -> None:
        """Make all requests of a size neutral ones."""
        self.fill(np.empty((3, 0), dtype=np.int64), size)

    def of_size(self, size: int, num_reqs: int) -> StagedStep:
        """The first requests of a size."""
        rows, seq_lens, slots = self._packed[: 3 * size].view(3, size)[:, :num_reqs].unbind(0)
        return StagedStep(
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            input_ids=self._input_ids[:num_reqs],
            positions=self._positions[:num_reqs],
        )


class CudaGraphRunner:
    """A `DecodeRunner` that captures at construction."""

    def __init__(
        self,
        runner: GraphableRunner,
        batch_sizes: list[int],
        show_progress: bool,
        pad: bool = True,
    ) -> None:
        """`batch_sizes`: rising. Without `pad` only batches of exactly these sizes are replayed."""
        self._runner = runner
        self.batch_sizes = batch_sizes
        self._exact_sizes = None if pad else frozenset(batch_sizes)
        self._inputs = _StaticInputs(
            batch_sizes[-1], runner.req_to_token_pool.padding_row, runner.device
        )
        self._graphs: dict[int, _Graph] = {}
        self._size_of = size_table(batch_sizes)
        self.num_steps = 0
        self._capture_all(show_progress)

    def stage(self, step: np.ndarray) -> StagedStep | None:
        """See `DecodeRunner`."""
        num_reqs = step.shape[1]
        if num_reqs > self.batch_sizes[-1]:
            return None
        if self._exact_sizes is not None and num_reqs not in self._exact_sizes:
            return None
        size = self._size_of[num_reqs]
        self._inputs.fill(step, size)
        return self._inputs.of_size(size, num_reqs)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether the batch was staged."""
        return batch.is_staged

    def weights_changed(self) -> None:
        """Nothing to do: graphs read the parameters where they are."""

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Replay a staged step: request table, forward, argmax, `last_token_ids` for the next.

        The output is valid until the next replay, in stream order.
        """
        num_reqs = batch.batch_size
        entry = self._graphs[self._size_of[num_reqs]]
        entry.graph.replay()
        self.num_steps += 1
        return LogitsProcessorOutput(
            next_token_logits=entry.logits[:num_reqs],
            greedy_token_ids=entry.report[0, :num_reqs],
            unusable_rows=entry.report[1, :num_reqs],
            greedy_report=entry.report,
        )

    # -- capture --------------------------------------------------------------------------------

    def _capture_all(self, show_progress: bool) -> None:
        """Capture every size, the largest first, so that smaller ones reuse its memory."""
        start = time.perf_counter()
        pool = None
        sizes = tqdm(
            reversed(self.batch_sizes),
            total=len(self.batch_sizes),
            desc="capturing CUDA graphs",
            unit="size",
            disable=not show_progress,
        )
        with capturing():
            for size in sizes:
                with products_of(size):
                    entry = self._capture(size, pool)
                pool = entry.graph.pool()
                self._graphs[size] = entry
        logger.info(
            "captured %d decode graphs (batch %d to %d) in %.1f s",
            len(self.batch_sizes),
            self.batch_sizes[0],
            self.batch_sizes[-1],
            time.perf_counter() - start,
        )

    def _capture(self, size: int, pool: Any) -> _Graph:
        self._inputs.neutral(size)
        batch = self._static_batch(size)
        graph, (logits, report) = capture(lambda: self._step(batch), self._runner.device, pool)
        return _Graph(graph=graph, logits=logits, report=report)

    def _step(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits, report) of a step from its static inputs: all that happens on the device."""
        runner = self._runner
        torch.sub(batch.seq_lens, 1, out=batch.positions)
        torch.index_select(runner.last_token_ids, 0, batch.req_pool_indices, out=batch.input_ids)
        runner.req_to_token_pool.write_device(
            batch.req_pool_indices, batch.positions, batch.out_cache_loc
        )
        runner.attn_backend.init_forward_metadata(batch)
        with use_attention_backend(runner.attn_backend):
            output = runner.model(batch.input_ids, batch.positions, batch)
        logits: torch.Tensor = output.next_token_logits
        token_ids, unusable_rows = checked_argmax(logits)
        # Right for greedy requests; the sampler's choice is written over it.
        runner.last_token_ids.index_copy_(0, batch.req_pool_indices, token_ids)
        return logits, torch.stack((token_ids, unusable_rows.to(torch.int64)))

    def _static_batch(self, size: int) -> ForwardBatch:
        inputs = self._inputs.of_size(size, size)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            req_pool_indices=inputs.req_pool_indices,
            seq_lens=inputs.seq_lens,
            seq_lens_cpu=[_PADDING_SEQ_LEN] * size,
            out_cache_loc=inputs.out_cache_loc,
            req_to_token_pool=self._runner.req_to_token_pool,
            token_to_kv_pool=self._runner.token_to_kv_pool,
        )


class ReplayableGraph(Protocol):
    """The part of `torch.cuda.CUDAGraph` that its users call."""

    def replay(self) -> None: ...

    def pool(self) -> Any: ...


def capture(
    function: Callable[[], T], device: torch.device, pool: Any
) -> tuple[ReplayableGraph, T]:
    """Capture a call whose inputs are static tensors. Its outputs are overwritten by each replay.

    The function runs twice before. `pool`: of an earlier graph, whose memory is used again where
    nobody holds it; None: a new one.
    """
    stream = torch.cuda.Stream(device=device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compiles kernels and allocates workspaces, which must not happen in a capture.
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        outputs = function()
    return graph, outputs


@contextmanager
def capturing() -> Iterator[None]:
    """Around all captures of one owner."""
    with _no_garbage_collection(), torch.inference_mode():
        yield


@contextmanager
def products_of(num_rows: int) -> Iterator[None]:
    """Around a capture: let the faster library do matrix products of so many rows."""
    with _product_library("cublaslt" if num_rows <= _MAX_LT_SIZE else "cublas"):
        yield


def size_table(batch_sizes: list[int]) -> list[int]:
    """Number of requests, up to the largest size -> the captured size (rising) that holds them."""
    table, index = [], 0
    for num_reqs in range(batch_sizes[-1] + 1):
        if num_reqs > batch_sizes[index]:
            index += 1
        table.append(batch_sizes[index])
    return table


@contextmanager
def _product_library(name: str) -> Iterator[None]:
    """Let matrix products be done by "cublas" or "cublaslt"."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(name)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection in the middle of a capture could free tensors of another graph."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
