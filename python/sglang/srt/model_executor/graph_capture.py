"""What captured steps of all kinds share: capturing, replaying, and a step's common end.

Owns nothing; each kind of step (`cuda_graph_runner`, `prefill_graph_runner`, the speculative ones)
owns its graphs and inputs. Weights are read where they are, so in-place weight updates stay
visible; anything that rebinds a parameter breaks the graphs. Absent on CPU. Scheduler thread only.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from tqdm import tqdm

from sglang.srt.layers.attention.base import AttentionBackend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.step_frame import HostRings, choose_and_report
from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import use_attention_backend

T = TypeVar("T")
# Called by a function that is captured, between two parts of its work: whether a new graph begins.
Cut = Callable[[], bool]

# cuBLASLt picks the faster kernels for a few dozen rows. It takes longer to pick, which a graph
# pays once; steps that are not captured keep the default.
_MAX_LT_SIZE = 128


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


class ReplayableGraph(Protocol):
    """The part of `torch.cuda.CUDAGraph` that its users call."""

    def replay(self) -> None: ...


# -- a step of the model ----------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class StepOutputs:
    """What a captured forward pass leaves behind; overwritten by each replay. b = its requests."""

    logits: torch.Tensor  # float32 [b, V]
    report: torch.Tensor  # int64 [2, b]: places of the largest; 1 where a row has NaN or +inf
    hidden_states: torch.Tensor | None = None  # [tokens, width], where they are wanted


class _RequestViews(NamedTuple):
    """The part of a step's outputs that belongs to its first, real requests."""

    logits: torch.Tensor
    greedy_token_ids: torch.Tensor
    unusable_rows: torch.Tensor


class CapturedStep:
    """A forward pass of one size. Its outputs stay where they are, and so do views of them."""

    def __init__(self, graph: ReplayableGraph, outputs: StepOutputs) -> None:
        self.graph = graph
        self.outputs = outputs
        self._views: dict[int, _RequestViews] = {}  # by number of requests

    def replay(self, num_reqs: int) -> LogitsProcessorOutput:
        """Run it for so many requests; hidden states are left out.

        The output is valid until the next replay of any graph, in stream order.
        """
        self.graph.replay()
        views = self._views.get(num_reqs)
        if views is None:
            views = self._views[num_reqs] = self._views_of(num_reqs)
        return LogitsProcessorOutput(
            next_token_logits=views.logits,
            greedy_token_ids=views.greedy_token_ids,
            unusable_rows=views.unusable_rows,
        )

    def _views_of(self, num_reqs: int) -> _RequestViews:
        report = self.outputs.report[:, :num_reqs]
        return _RequestViews(self.outputs.logits[:num_reqs], report[0], report[1])


def forward_and_choose(
    runner: GraphableRunner, batch: ForwardBatch, rows: torch.Tensor, rings: HostRings
) -> StepOutputs:
    """A forward pass and the largest logits: noted as the requests' last tokens, and reported.

    `rows` int64 [b]: of the request table, one for each row of logits. The tokens are right for
    greedy requests; the sampler's choice is written over them.
    """
    runner.attn_backend.init_forward_metadata(batch)
    with use_attention_backend(runner.attn_backend):
        output = runner.model(batch.input_ids, batch.positions, batch)
    logits = output.next_token_logits
    return StepOutputs(
        logits=logits,
        report=choose_and_report(rings, logits, rows, runner.last_token_ids),
        hidden_states=output.hidden_states,
    )


def lens_on_host(lens: torch.Tensor) -> list[int] | None:
    """The values of a static tensor, where reading the device is free; they change at replays."""
    values: list[int] | None = lens.tolist() if lens.device.type == "cpu" else None
    return values


# -- capturing --------------------------------------------------------------------------------


class GraphMemory:
    """What captured steps work in: each uses again what nobody holds of the others.

    So a replay overwrites outputs of all others, and one runs at a time. All captures into a memory
    are on one stream, since the allocator gives freed memory to the stream alone that it was first
    used on, and the libraries keep a workspace for each stream. They give that workspace up with
    the first graph of the stream that goes: graphs of one memory go together.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @functools.cached_property
    def stream(self) -> torch.cuda.Stream:
        """Of all captures."""
        return torch.cuda.Stream(device=self._device)

    @functools.cached_property
    def pool(self) -> Any:
        """The allocator's name for it."""
        return torch.cuda.graph_pool_handle()


def capture(function: Callable[[], T], memory: GraphMemory) -> tuple[ReplayableGraph, T]:
    """Capture a call whose inputs are static tensors. Its outputs are overwritten by each replay.

    The function runs twice before.
    """
    graphs, outputs = capture_in_pieces(lambda cut: function(), memory)
    return graphs[0], outputs


def capture_in_pieces(
    function: Callable[[Cut], T], memory: GraphMemory
) -> tuple[Sequence[ReplayableGraph], T]:
    """`capture` as several graphs, to be replayed in order: one ends where the function cuts.

    What the function has made so far lives on from one to the next.
    """
    graphs = [torch.cuda.CUDAGraph()]

    def cut() -> bool:
        graphs[-1].capture_end()
        graphs.append(torch.cuda.CUDAGraph())
        graphs[-1].capture_begin(pool=memory.pool)
        return True

    stream = memory.stream
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        # Compiles kernels and allocates workspaces, which must not happen in a capture.
        for _ in range(2):
            function(lambda: False)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graphs[-1].capture_begin(pool=memory.pool)
        try:
            outputs = function(cut)
        finally:
            graphs[-1].capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graphs, outputs


def capture_sizes(
    sizes: Sequence[int],
    capture_size: Callable[[int], None],
    *,
    what: str,
    rows_each: int = 1,
    show_progress: bool,
) -> float:
    """Call `capture_size` for all sizes; returns the seconds that it took.

    The largest size comes first, so that smaller ones use its memory again. `sizes`: rising.
    `rows_each`: rows of a product, for each unit of a size.
    """
    start = time.perf_counter()
    bar = tqdm(
        reversed(sizes),
        total=len(sizes),
        desc=f"capturing CUDA graphs{what}",
        unit="size",
        disable=not show_progress,
    )
    with capturing():
        for size in bar:
            with products_of(size * rows_each):
                capture_size(size)
    return time.perf_counter() - start


@contextmanager
def capturing() -> Iterator[None]:
    """Around all captures of one owner."""
    with _no_garbage_collection(), torch.inference_mode():
        yield


@contextmanager
def products_of(num_rows: int) -> Iterator[None]:
    """Around a capture: let the faster library do matrix products of so many rows."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt" if num_rows <= _MAX_LT_SIZE else "cublas")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def size_table(sizes: Sequence[int]) -> list[int]:
    """Any number up to the largest size -> the captured size (rising) that holds so many."""
    table, index = [], 0
    for number in range(sizes[-1] + 1):
        if number > sizes[index]:
            index += 1
        table.append(sizes[index])
    return table


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
