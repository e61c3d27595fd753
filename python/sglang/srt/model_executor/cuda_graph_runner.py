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

import torch
from tqdm import tqdm

from sglang.srt.layers.attention.base import AttentionBackend
from sglang.srt.layers.dispatch import checked_argmax
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.model_executor.decode_runner import is_plain_decode
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import use_attention_backend

logger = logging.getLogger(__name__)

T = TypeVar("T")

# cuBLASLt picks the faster kernels for a few dozen rows. It takes longer to pick, which a graph
# pays once; steps that are not captured keep the default.
_MAX_LT_SIZE = 128
# Padding requests read one token of some row and write to the dummy page: harmless and cheap.
_PADDING_SEQ_LEN = 1
_PADDING_SLOT = 0


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
    token_ids: torch.Tensor  # int64 [size]: places of the largest
    unusable_rows: torch.Tensor  # bool [size]: they hold NaN or +inf


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
        max_size = batch_sizes[-1]
        # int64 [max_size] each; a graph of size b uses the first b.
        self._input_ids, self._rows, self._seq_lens, self._slots = torch.zeros(
            (4, max_size), dtype=torch.int64, device=runner.device
        ).unbind(0)
        self._graphs: dict[int, _Graph] = {}
        self._size_of = size_table(batch_sizes)
        self.num_steps = 0
        self._capture_all(show_progress)

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether the batch is a plain decode step of a captured size."""
        if not is_plain_decode(batch) or batch.batch_size > self.batch_sizes[-1]:
            return False
        return self._exact_sizes is None or batch.batch_size in self._exact_sizes

    def weights_changed(self) -> None:
        """Nothing to do: graphs read the parameters where they are."""

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Replay a decode step. The logits are valid until the next replay, in stream order."""
        num_reqs = batch.batch_size
        size = self._size_of[num_reqs]
        self._fill_inputs(batch, num_reqs, size)
        entry = self._graphs[size]
        entry.graph.replay()
        self.num_steps += 1
        return LogitsProcessorOutput(
            next_token_logits=entry.logits[:num_reqs],
            greedy_token_ids=entry.token_ids[:num_reqs],
            unusable_rows=entry.unusable_rows[:num_reqs],
        )

    def _fill_inputs(self, batch: ForwardBatch, num_reqs: int, size: int) -> None:
        """Copy a step's tensors into the static ones; neutral values behind them."""
        # In one launch: at small batches it is launches that cost.
        torch._foreach_copy_(
            [
                self._input_ids[:num_reqs],
                self._rows[:num_reqs],
                self._seq_lens[:num_reqs],
                self._slots[:num_reqs],
            ],
            [batch.input_ids, batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc],
        )
        if num_reqs < size:
            # Tokens and rows left from an earlier step are valid ones; length and slot decide.
            self._seq_lens[num_reqs:size].fill_(_PADDING_SEQ_LEN)
            self._slots[num_reqs:size].fill_(_PADDING_SLOT)

    # -- capture --------------------------------------------------------------------------------

    def _capture_all(self, show_progress: bool) -> None:
        """Capture every size, the largest first, so that smaller ones reuse its memory."""
        start = time.perf_counter()
        self._seq_lens.fill_(_PADDING_SEQ_LEN)
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
        batch = self._static_batch(size)

        def step() -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
            logits = self._forward(batch)
            return logits, checked_argmax(logits)

        graph, (logits, (token_ids, unusable_rows)) = capture(step, self._runner.device, pool)
        return _Graph(graph=graph, logits=logits, token_ids=token_ids, unusable_rows=unusable_rows)

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        backend = self._runner.attn_backend
        backend.init_forward_metadata(batch)
        # Part of the graph: positions follow from the lengths.
        batch.positions = batch.seq_lens - 1
        with use_attention_backend(backend):
            output = self._runner.model(batch.input_ids, batch.positions, batch)
        logits: torch.Tensor = output.next_token_logits
        return logits

    def _static_batch(self, size: int) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=self._input_ids[:size],
            positions=self._seq_lens[:size] - 1,
            req_pool_indices=self._rows[:size],
            seq_lens=self._seq_lens[:size],
            seq_lens_cpu=[_PADDING_SEQ_LEN] * size,
            out_cache_loc=self._slots[:size],
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
