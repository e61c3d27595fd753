"""CUDA graphs without CUDA: a capture keeps the function, a replay computes it anew.

Outputs stay at one place and are overwritten by each replay, as those of real graphs are; a replay
leaves rubbish in the outputs of the others that share its memory. No replay waits for loads of the
host cache. For tests of what surrounds the graphs: static inputs, padding, state that passes from
one to the next. What may not happen inside a capture is not noticed here. Or, for measurements of
the host, graphs of decode steps that do nothing at all.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch

from sglang.srt.layers.attention.torch_native import TorchNativeBackend
from sglang.srt.layers.dispatch import TorchOps
from sglang.srt.layers.logits_processor import HostReport
from sglang.srt.mem_cache.hicache_transfer import LayerDoneCounter
from sglang.srt.model_executor import cuda_graph_runner, graph_capture, prefill_graph_runner
from sglang.srt.model_executor.graph_capture import Cut, GraphMemory
from sglang.srt.model_executor.host_exchange import NUM_PLACES, HostExchange
from sglang.srt.speculative import spec_graph_runner

if TYPE_CHECKING:  # a benchmark uses this too, which does not need the test tools
    import pytest

T = TypeVar("T")

# No token, row or slot: whoever uses it as one notices.
_RUBBISH = 1 << 40


class EagerGraph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(
        self, function: Callable[[], Any], outputs: Any, neighbours: WeakSet[EagerGraph]
    ) -> None:
        """`neighbours`: all graphs of its memory, to which it is added."""
        self._function = function
        self._outputs = outputs
        self._neighbours = neighbours
        self.num_replays = 0
        neighbours.add(self)

    def replay(self) -> None:
        self.num_replays += 1
        no_wait = mock.patch.object(LayerDoneCounter, "wait_until", lambda self, layer_idx: None)
        with no_wait, torch.inference_mode():
            if self._outputs is not None:  # else it goes on with what another has left
                for other in self._neighbours:
                    if other is not self:
                        _spoil(other._outputs)
            _overwrite(self._outputs, self._function())


_graphs: WeakKeyDictionary[GraphMemory, WeakSet[EagerGraph]] = WeakKeyDictionary()


def capture(function: Callable[[], T], memory: GraphMemory) -> tuple[EagerGraph, T]:
    """As `graph_capture.capture`."""
    outputs = _clone(function())
    return EagerGraph(function, outputs, _graphs.setdefault(memory, WeakSet())), outputs


def capture_in_pieces(
    function: Callable[[Cut], T], memory: GraphMemory
) -> tuple[list[EagerGraph], T]:
    """As `graph_capture.capture_in_pieces`, in one piece."""
    graph, outputs = capture(lambda: function(lambda: False), memory)
    return [graph], outputs


@contextlib.contextmanager
def _nothing(num_rows: int = 0) -> Iterator[None]:
    with torch.inference_mode():
        yield


def use_eager_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all kinds of steps be captured on the CPU; copies to the host become copies."""
    for user in (cuda_graph_runner, spec_graph_runner):
        monkeypatch.setattr(user, "capture", capture)
    monkeypatch.setattr(prefill_graph_runner, "capture_in_pieces", capture_in_pieces)
    monkeypatch.setattr(graph_capture, "capturing", _nothing)
    monkeypatch.setattr(graph_capture, "products_of", _nothing)
    monkeypatch.setattr(TorchNativeBackend, "captures_prefill", True)
    monkeypatch.setattr(TorchOps, "send_to_host", lambda self, x: x.clone())


class _EmptyGraph:
    def replay(self) -> None:
        return


class _ExchangeAlone(HostExchange):
    """Of steps that do nothing: says itself that they were there."""

    def end(self, num_reported: int) -> HostReport:
        report = super().end(num_reported)
        self._reports_on_host[report.number % NUM_PLACES, 0] = report.number
        return report

    @cached_property
    def _reports_on_host(self) -> np.ndarray:
        return self.rings.reports.numpy()


@contextlib.contextmanager
def empty_graphs() -> Iterator[None]:
    """What is captured meanwhile becomes decode graphs that cost nothing and compute nothing."""
    with (
        mock.patch.object(
            cuda_graph_runner, "capture", lambda step, memory: (_EmptyGraph(), step())
        ),
        mock.patch.object(cuda_graph_runner, "HostExchange", _ExchangeAlone),
        mock.patch.object(graph_capture, "capturing", _nothing),
        mock.patch.object(graph_capture, "products_of", _nothing),
    ):
        yield


def _clone(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _clone(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return type(value)(**parts)
    return value


def _overwrite(target: Any, source: Any) -> None:
    if isinstance(target, torch.Tensor):
        target.copy_(source)
    elif dataclasses.is_dataclass(target) and not isinstance(target, type):
        for f in dataclasses.fields(target):
            _overwrite(getattr(target, f.name), getattr(source, f.name))


def _spoil(target: Any) -> None:
    if isinstance(target, torch.Tensor):
        if target.is_floating_point():
            target.fill_(torch.nan)
        else:
            target.fill_(_RUBBISH if target.dtype == torch.int64 else 1)
    elif dataclasses.is_dataclass(target) and not isinstance(target, type):
        for f in dataclasses.fields(target):
            _spoil(getattr(target, f.name))
