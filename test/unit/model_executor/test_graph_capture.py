"""Where captures work: torch's part is stood in for, since only a GPU has it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sglang.srt.model_executor.graph_capture import (
    Cut,
    GraphMemory,
    capture,
    capture_in_pieces,
    capture_sizes,
)


class RecordedStream:
    """A stream that knows what waits; nothing runs on it."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device

    def wait_stream(self, stream: RecordedStream) -> None:
        assert stream is not self


class RecordedGraph:
    """What was captured into it: labels that the function left in `RecordedCuda.work`."""

    def __init__(self, cuda: RecordedCuda) -> None:
        self._cuda = cuda
        self.work: list[str] = []

    def capture_begin(self, pool: Any) -> None:
        self._cuda.captures.append((pool, self._cuda.current))
        self._cuda.work = self.work

    def capture_end(self) -> None:
        assert self._cuda.work is self.work
        self._cuda.work = []


class RecordedCuda:
    """`torch.cuda` as far as a capture goes: where calls ran, and what was captured where."""

    def __init__(self) -> None:
        self.main = self.current = RecordedStream()
        self.captures: list[tuple[Any, RecordedStream]] = []  # memory pool, stream
        self.num_pools = 0
        self.work: list[str] = []

    def new_pool(self) -> tuple[int, int]:
        self.num_pools += 1
        return (0, self.num_pools)

    @contextlib.contextmanager
    def stream(self, stream: RecordedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def new_graph(self) -> RecordedGraph:
        return RecordedGraph(self)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> RecordedCuda:
    recorded = RecordedCuda()
    monkeypatch.setattr(torch.cuda, "Stream", RecordedStream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", recorded.new_graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: recorded.current)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", recorded.new_pool)
    monkeypatch.setattr(torch.cuda, "stream", recorded.stream)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda name=None: name)
    return recorded


def test_captures_into_one_memory_are_on_one_stream(cuda: RecordedCuda) -> None:
    """Else the allocator would give none of them what the others have freed."""
    memory, other = (GraphMemory(torch.device("cuda", 0)) for _ in range(2))
    ran_on: list[RecordedStream] = []

    def capture_size(size: int) -> None:
        _, outputs = capture(lambda: ran_on.append(cuda.current), memory)
        assert outputs is None and cuda.current is cuda.main

    capture_sizes([1, 2, 4], capture_size, what="", show_progress=False)
    assert len(ran_on) == 9, "twice beforehand"
    pools, streams = zip(*cuda.captures)
    assert len(set(pools)) == 1 and len(set(streams)) == 1
    # What is run beforehand brings the libraries' workspaces of this stream.
    assert set(ran_on) == set(streams) and streams[0] is not cuda.main
    capture(lambda: None, other)
    pool, stream = cuda.captures[-1]
    assert pool not in pools and stream not in streams


def test_a_function_is_captured_in_the_pieces_that_it_cuts(cuda: RecordedCuda) -> None:
    def function(cut: Cut) -> str:
        answers = []
        for label in "abc":
            cuda.work.append(label)
            answers.append(cut() if label != "c" else None)
        cuda.work.append("d")
        assert answers in ([False, False, None], [True, True, None])
        return "outputs"

    memory = GraphMemory(torch.device("cuda", 0))
    graphs, outputs = capture_in_pieces(function, memory)
    assert outputs == "outputs" and cuda.current is cuda.main
    assert [graph.work for graph in graphs] == [["a"], ["b"], ["c", "d"]]  # type: ignore[attr-defined]
    assert len(cuda.captures) == 3 and len(set(cuda.captures)) == 1


def test_a_capture_that_fails_is_ended(cuda: RecordedCuda) -> None:
    def function(cut: Cut) -> None:
        if cut():
            raise ValueError("in the second piece")

    with pytest.raises(ValueError, match="second piece"):
        capture_in_pieces(function, GraphMemory(torch.device("cuda", 0)))
    assert len(cuda.captures) == 2 and cuda.current is cuda.main
