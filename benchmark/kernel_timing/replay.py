"""Time of a launch, by replaying a captured sequence of launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Action = Callable[[], object]
HAS_CUDA = torch.cuda.is_available()


def seconds_per_call(actions: list[Action], repeats: int, captured: bool = True) -> float:
    """Median time of one of `actions`, which run one after another, replayed if `captured`."""
    if not HAS_CUDA:
        start = time.perf_counter()
        for action in actions:
            action()
        return (time.perf_counter() - start) / len(actions)
    for action in actions:
        action()

    def run() -> None:
        for action in actions:
            action()

    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        run = graph.replay
    for _ in range(2):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(events, events[1:])]
    return statistics.median(times) / 1e3 / len(actions)
