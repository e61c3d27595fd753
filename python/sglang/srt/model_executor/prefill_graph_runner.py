"""CUDA graphs of small prefill steps: capture at a ladder of token counts, replay padded.

After a cache hit only the last page or chunk of a prompt is left to compute, whose launches cost
the host more than the device needs for them. A captured step has some number of tokens and
`MAX_REQUESTS` requests; tokens that it has too many belong to a further, last request, which lives
in the padding row of the request table: it reads and writes the dummy slot, and has no logits.

    requests  [real ... | none (no token) ... | padding]
    tokens    [those of the real ones, in order ...... | padding]

Owns the static inputs and the graphs. Lengths and prefixes are read on the device, so one graph
serves every division of its tokens. Inside a graph nobody can wait for KV that is on its way from
the host: a step is a few graphs, each of a few layers, and waits for those in front of each. Absent
on CPU. Scheduler thread only; with several ranks capture and `run` are collective.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.step_frame import receive
from sglang.srt.mem_cache.hybrid_kv_pool import HybridLinearKVPool
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.graph_capture import (
    CapturedStep,
    Cut,
    GraphableRunner,
    GraphMemory,
    ReplayableGraph,
    StepOutputs,
    capture_in_pieces,
    capture_sizes,
    forward_and_choose,
    lens_on_host,
    size_table,
)
from sglang.srt.model_executor.host_exchange import HostExchange

logger = logging.getLogger(__name__)

# Real requests of a captured step. With the padding one they are eight, as far as the attention
# kernel is compiled for small batches.
MAX_REQUESTS = 7
_ALL_REQUESTS = MAX_REQUESTS + 1
# Values of a request: row, length, prefix, new tokens, place of its last token.
_REQUEST_VALUES = 5
# Values of a token: id, position, slot.
_TOKEN_VALUES = 3
_PADDING_SLOT = 0
# Layers of a graph: what is left to compute when the last layer's KV has come from the host. Of
# a large model they take half a millisecond, and a launch 10 us.
_LAYERS_PER_GRAPH = 4


def capture_token_counts(max_tokens: int, requested: list[int] | None = None) -> list[int]:
    """The ladder, rising up to `max_tokens`; nothing where that is 0.

    `requested` (a user's list) wins; its counts above are dropped, and where none is left, the
    limit is the only one.
    """
    if max_tokens <= 0:
        return []
    if requested is not None:
        counts = sorted({count for count in requested if 0 < count <= max_tokens})
        return counts or [max_tokens]
    ladder = [32, 64, 96, 128, *range(192, 513, 64), *range(640, max_tokens, 128)]
    return [*(count for count in ladder if count < max_tokens), max_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStep:
    """The inputs of a prefill step on the host, int64: [b] of requests, [n] of new tokens."""

    req_pool_indices: np.ndarray
    seq_lens: np.ndarray
    prefix_lens: np.ndarray
    extend_lens: np.ndarray
    input_ids: np.ndarray
    positions: np.ndarray
    out_cache_loc: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPrefill:
    """The same where a captured step reads them: views of its static tensors."""

    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    extend_prefix_lens: torch.Tensor
    extend_seq_lens: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor


class _Inputs(NamedTuple):
    """What a captured step reads: views of the packed tensor, padding included."""

    requests: torch.Tensor  # int64 [_REQUEST_VALUES, _ALL_REQUESTS]
    tokens: torch.Tensor  # int64 [_TOKEN_VALUES, size]


class PrefillGraphRunner:
    """Captures at construction. See the module docstring."""

    def __init__(
        self,
        runner: GraphableRunner,
        token_counts: list[int],
        *,
        hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL,
        pad: bool = True,
        show_progress: bool = False,
        memory: GraphMemory | None = None,
    ) -> None:
        """`token_counts`: rising. Without `pad` only steps of exactly these are replayed.

        `hidden_mode`: which hidden states the steps keep, NULL or FULL; steps that want others are
        not replayed. `memory`: that of other graphs, to be used again; None: one of their own.
        """
        self._runner = runner
        self.token_counts = token_counts
        self.hidden_mode = hidden_mode
        self._exact_counts = None if pad else frozenset(token_counts)
        self._size_of = size_table(token_counts)
        self._exchange = HostExchange(_num_values(token_counts[-1]), MAX_REQUESTS, runner.device)
        self._memory = memory or GraphMemory(runner.device)
        self._graphs: dict[int, CapturedStep] = {}
        self.num_steps = 0  # replays, for tests and reports
        self._capture_all(show_progress)

    def stage(self, step: PrefillStep, hidden_mode: CaptureHiddenMode) -> StagedPrefill | None:
        """Put the inputs of the coming step where a captured one fetches them.

        None where no such step is captured; else a batch of these inputs must run next.
        """
        num_tokens, num_reqs = len(step.input_ids), len(step.seq_lens)
        if num_tokens > self.token_counts[-1] or num_reqs > MAX_REQUESTS:
            return None
        if self._exact_counts is not None and num_tokens not in self._exact_counts:
            return None
        if hidden_mode is not self.hidden_mode:
            return None
        size = self._size_of[num_tokens]
        self._fill(step, size)
        requests, tokens = self._inputs_of(size)
        rows, seq_lens, prefix_lens, extend_lens, _ = requests[:, :num_reqs].unbind(0)
        input_ids, positions, slots = tokens[:, :num_tokens].unbind(0)
        return StagedPrefill(
            req_pool_indices=rows,
            seq_lens=seq_lens,
            extend_prefix_lens=prefix_lens,
            extend_seq_lens=extend_lens,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=slots,
        )

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether the batch was staged here."""
        return batch.is_staged and batch.forward_mode is ForwardMode.EXTEND

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """Replay a staged step: forward, argmax, `last_token_ids` of the requests.

        The output is valid until the next replay, in stream order.
        """
        step = self._graphs[self._size_of[batch.num_tokens]]
        output = step.replay(batch.batch_size)
        output.greedy_report = self._exchange.end(MAX_REQUESTS)
        self.num_steps += 1
        if step.outputs.hidden_states is not None:
            output.hidden_states = step.outputs.hidden_states[: batch.num_tokens]
        return output

    # -- inputs ---------------------------------------------------------------------------------

    def _fill(self, step: PrefillStep, size: int) -> None:
        """Leave the step and its padding for the next replay."""
        self._pack(step, self._exchange.begin(_num_values(size)), size)

    def _pack(self, step: PrefillStep, values: np.ndarray, size: int) -> None:
        num_tokens, num_reqs = len(step.input_ids), len(step.seq_lens)
        num_padding = size - num_tokens
        requests, tokens = _divide(values, size)
        requests[0] = self._runner.req_to_token_pool.padding_row
        requests[1:] = 0
        requests[:, :num_reqs] = (
            step.req_pool_indices,
            step.seq_lens,
            step.prefix_lens,
            step.extend_lens,
            np.cumsum(step.extend_lens) - 1,
        )
        requests[1, -1] = requests[3, -1] = num_padding
        tokens[:, :num_tokens] = (step.input_ids, step.positions, step.out_cache_loc)
        tokens[0, num_tokens:] = 0
        tokens[1, num_tokens:] = np.arange(num_padding)
        tokens[2, num_tokens:] = _PADDING_SLOT

    def _inputs_of(self, size: int) -> _Inputs:
        return _Inputs(*_divide(self._exchange.on_device[: _num_values(size)], size))

    # -- capture --------------------------------------------------------------------------------

    def _capture_all(self, show_progress: bool) -> None:
        counts = self.token_counts
        seconds = capture_sizes(
            counts, self._capture, what=" of prefill", show_progress=show_progress
        )
        logger.info(
            "captured %d prefill graphs (%d to %d tokens) in %.1f s",
            len(counts),
            counts[0],
            counts[-1],
            seconds,
        )

    def _capture(self, size: int) -> None:
        nobody = np.empty(_num_values(size), dtype=np.int64)
        self._pack(_no_requests(), nobody, size)
        with self._exchange.uncounted(nobody):
            graph, outputs = self._capture_in_pieces(size)
        self._graphs[size] = CapturedStep(graph, outputs)

    def _capture_in_pieces(self, size: int) -> tuple[_GraphsOfLayers, StepOutputs]:
        pool = self._runner.token_to_kv_pool
        watch = _LoadWatch()

        def step(cut: Cut) -> StepOutputs:
            watch.begin(cut)
            return self._step(size)

        pool.register_layer_transfer_counter(watch)  # the real one comes later
        try:
            graphs, outputs = capture_in_pieces(step, self._memory)
        finally:
            pool.register_layer_transfer_counter(None)
        return _GraphsOfLayers(pool, graphs, watch.last_layers), outputs

    def _step(self, size: int) -> StepOutputs:
        rings = self._exchange.rings
        receive(rings, _num_values(size))
        batch = self._static_batch(size)
        rows = batch.req_pool_indices[:MAX_REQUESTS]
        return forward_and_choose(self._runner, batch, rows, rings)

    def _static_batch(self, size: int) -> ForwardBatch:
        requests, tokens = self._inputs_of(size)
        rows, seq_lens, prefix_lens, extend_lens, ends = requests.unbind(0)
        input_ids, positions, slots = tokens.unbind(0)
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=_ALL_REQUESTS,
            input_ids=input_ids,
            positions=positions,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=lens_on_host(seq_lens) or [],
            out_cache_loc=slots,
            req_to_token_pool=self._runner.req_to_token_pool,
            token_to_kv_pool=self._runner.token_to_kv_pool,
            extend_seq_lens=extend_lens,
            extend_prefix_lens=prefix_lens,
            extend_seq_lens_cpu=lens_on_host(extend_lens),
            extend_prefix_lens_cpu=lens_on_host(prefix_lens),
            capture_hidden_mode=self.hidden_mode,
            logits_rows=ends[:MAX_REQUESTS],
        )


class _LoadWatch:
    """Stands for the counter of loads in a capture, and cuts it in front of every few layers."""

    def __init__(self) -> None:
        self.last_layers: list[int] = []  # of each graph, as the counter of loads counts
        self._layers: set[int] = set()  # of the graph that is being captured
        self._cut: Cut = lambda: False

    def begin(self, cut: Cut) -> None:
        """A run of the step begins."""
        self._cut = cut
        self._layers = set()
        self.last_layers = [0]

    def wait_until(self, layer_idx: int) -> None:
        """See `LayerTransferCounter`."""
        if layer_idx in self._layers:
            return
        if len(self._layers) >= _LAYERS_PER_GRAPH and self._cut():
            self._layers.clear()
            self.last_layers.append(0)
        self._layers.add(layer_idx)
        self.last_layers[-1] = max(self.last_layers[-1], layer_idx)


class _GraphsOfLayers:
    """The graphs of a step. A `ReplayableGraph`."""

    def __init__(
        self, pool: KVCache, graphs: Sequence[ReplayableGraph], last_layers: list[int]
    ) -> None:
        self._pool = pool
        self.graphs = graphs
        self.last_layers = last_layers

    def replay(self) -> None:
        for graph, last_layer in zip(self.graphs, self.last_layers, strict=True):
            self._pool.wait_until(last_layer)
            graph.replay()


def why_not_captured(runner: GraphableRunner) -> str | None:
    """A reason why prefill steps of this model cannot be captured; None where they can."""
    if not runner.attn_backend.captures_prefill:
        return "its attention plans prefill steps on the host"
    if isinstance(runner.token_to_kv_pool, HybridLinearKVPool):
        return "its recurrent states are kept at places that the host chooses"
    return None


def _num_values(size: int) -> int:
    return _REQUEST_VALUES * _ALL_REQUESTS + _TOKEN_VALUES * size


def _divide(values: Any, size: int) -> tuple[Any, Any]:
    """Packed values, an array or a tensor, as those of requests and those of tokens."""
    num_of_requests = _REQUEST_VALUES * _ALL_REQUESTS
    requests = values[:num_of_requests].reshape(_REQUEST_VALUES, _ALL_REQUESTS)
    return requests, values[num_of_requests:].reshape(_TOKEN_VALUES, size)


def _no_requests() -> PrefillStep:
    none = np.empty(0, dtype=np.int64)
    return PrefillStep(
        req_pool_indices=none,
        seq_lens=none,
        prefix_lens=none,
        extend_lens=none,
        input_ids=none,
        positions=none,
        out_cache_loc=none,
    )
