"""CUDA graphs of decode steps: capture at a ladder of batch sizes, replay padded (or only exact).

A decode step of a small batch is launch overhead for the most part; a graph replays all its
kernels with one call. Owns the static input tensors and the graphs. Absent on CPU. Scheduler
thread only; with several ranks capture and `run` are collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.step_frame import DecodeTables, receive_decode
from sglang.srt.model_executor.decode_runner import StagedStep
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.graph_capture import (
    CapturedStep,
    GraphableRunner,
    GraphMemory,
    StepOutputs,
    capture,
    capture_sizes,
    forward_and_choose,
    lens_on_host,
    size_table,
)
from sglang.srt.model_executor.host_exchange import HostExchange

logger = logging.getLogger(__name__)

# Padding requests read one token and write to the dummy page: harmless and cheap.
_PADDING_SEQ_LEN = 1
_PADDING_SLOT = 0


def capture_batch_sizes(max_batch_size: int, requested: list[int] | None = None) -> list[int]:
    """The ladder: fine steps where batches are small and padding would weigh, coarse above.

    It ends with `max_batch_size`. `requested` (a user's list) wins; its sizes above are dropped,
    and where none is left, the limit is the only one.
    """
    if requested is not None:
        sizes = sorted({size for size in requested if 0 < size <= max_batch_size})
        return sizes or [max_batch_size]
    ladder = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, max_batch_size, 32)]
    return [*(size for size in ladder if size < max_batch_size), max_batch_size]


class _StaticInputs:
    """What captured steps work on. A step of size b has 3 * b packed values, as [3, b].

    All tensors stay where they are, and so do views of them.
    """

    def __init__(self, max_size: int, padding_row: int, device: torch.device) -> None:
        self._padding = np.array([[padding_row], [_PADDING_SEQ_LEN], [_PADDING_SLOT]])
        self.exchange = HostExchange(3 * max_size, max_size, device)
        self.input_ids = torch.zeros(max_size, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_size, dtype=torch.int64, device=device)
        self.filled_size = 0  # of the last step
        self._steps: dict[tuple[int, int], StagedStep] = {}  # by size and number of requests

    def fill(self, step: np.ndarray, size: int) -> None:
        """Leave a step, int64 [3, b], and neutral requests up to `size`, for the next replay."""
        num_reqs = step.shape[1]
        self.filled_size = size
        values = self.exchange.begin(3 * size).reshape(3, size)
        values[:, :num_reqs] = step
        if num_reqs < size:
            values[:, num_reqs:] = self._padding

    def neutral(self, size: int) -> np.ndarray:
        """The packed values of neutral requests only."""
        return np.repeat(self._padding, size, axis=1).reshape(-1)

    def of_size(self, size: int, num_reqs: int) -> StagedStep:
        """The first requests of a size."""
        step = self._steps.get((size, num_reqs))
        if step is None:
            step = self._steps[size, num_reqs] = self._views_of(size, num_reqs)
        return step

    def _views_of(self, size: int, num_reqs: int) -> StagedStep:
        packed = self.exchange.on_device[: 3 * size].view(3, size)
        rows, seq_lens, slots = packed[:, :num_reqs].unbind(0)
        return StagedStep(
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=slots,
            input_ids=self.input_ids[:num_reqs],
            positions=self.positions[:num_reqs],
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
        self._graphs: dict[int, CapturedStep] = {}
        self._size_of = size_table(batch_sizes)
        self.num_steps = 0
        self.memory = GraphMemory(runner.device)  # for graphs that are captured later, too
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
        """Whether the batch was staged here."""
        return batch.is_staged and batch.forward_mode.is_decode()

    def weights_changed(self) -> None:
        """Nothing to do: graphs read the parameters where they are."""

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Replay a staged step: request table, forward, argmax, `last_token_ids` for the next.

        The output is valid until the next replay, in stream order.
        """
        num_reqs = batch.batch_size
        size = self._size_of[num_reqs]
        output = self._graphs[size].replay(num_reqs)
        output.greedy_report = self._inputs.exchange.end(size)
        self.num_steps += 1
        return output

    @contextmanager
    def bare_replays(self, size: int) -> Iterator[Callable[[], None]]:
        """The last step again, as often as wanted, to time it alone.

        `size`: the one that it had. Raises ValueError for another.
        """
        if size != self._inputs.filled_size:
            raise ValueError(f"the last step had size {self._inputs.filled_size}, not {size}")
        values = self._inputs.exchange.on_device[: 3 * size].cpu().numpy()
        with self._inputs.exchange.uncounted(values):
            yield self._graphs[size].graph.replay

    # -- capture --------------------------------------------------------------------------------

    def _capture_all(self, show_progress: bool) -> None:
        sizes = self.batch_sizes
        seconds = capture_sizes(sizes, self._capture, what="", show_progress=show_progress)
        logger.info(
            "captured %d decode graphs (batch %d to %d) in %.1f s",
            len(sizes),
            sizes[0],
            sizes[-1],
            seconds,
        )

    def _capture(self, size: int) -> None:
        with self._inputs.exchange.uncounted(self._inputs.neutral(size)):
            graph, outputs = capture(lambda: self._step(size), self.memory)
        self._graphs[size] = CapturedStep(graph, outputs)

    def _step(self, size: int) -> StepOutputs:
        """A step from its static inputs: all that happens on the device."""
        runner, inputs = self._runner, self._inputs
        tables = DecodeTables(
            last_token_ids=runner.last_token_ids,
            req_to_token=runner.req_to_token_pool.req_to_token,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
        )
        receive_decode(inputs.exchange.rings, size, tables)
        batch = self._static_batch(size)
        return forward_and_choose(runner, batch, batch.req_pool_indices, inputs.exchange.rings)

    def _static_batch(self, size: int) -> ForwardBatch:
        inputs = self._inputs.of_size(size, size)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            req_pool_indices=inputs.req_pool_indices,
            seq_lens=inputs.seq_lens,
            seq_lens_cpu=lens_on_host(inputs.seq_lens) or [_PADDING_SEQ_LEN] * size,
            out_cache_loc=inputs.out_cache_loc,
            req_to_token_pool=self._runner.req_to_token_pool,
            token_to_kv_pool=self._runner.token_to_kv_pool,
        )
