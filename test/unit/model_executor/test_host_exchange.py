"""What steps are given and what they leave on the host, where several are under way at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.srt.layers.logits_processor import HostReport
from sglang.srt.layers.step_frame import choose_and_report, receive
from sglang.srt.model_executor.host_exchange import NUM_PLACES, HostExchange

CPU = torch.device("cpu")


def run_captured(exchange: HostExchange, num_values: int, size: int) -> None:
    """A step whose tokens are its first inputs, of `size` requests; the first one has NaN."""
    receive(exchange.rings, num_values)
    logits = torch.zeros(size, 100)
    logits[torch.arange(size), exchange.on_device[:size]] = 1
    logits[0, exchange.on_device[0]] = torch.nan
    rows = torch.arange(size)
    choose_and_report(exchange.rings, logits, rows, torch.zeros(size, dtype=torch.int64))


def run_step(exchange: HostExchange, inputs: list[int], size: int) -> HostReport:
    exchange.begin(len(inputs))[:] = inputs
    run_captured(exchange, len(inputs), size)
    return exchange.end(size)


def test_reports_of_steps_under_way_stay_apart() -> None:
    """Of changing sizes; each is kept until its place is taken again."""
    exchange = HostExchange(6, 3, CPU)
    sizes = [3, 1, 2, 3][:NUM_PLACES]
    reports = [
        run_step(exchange, [10 * step + i for i in range(2 * size)], size)
        for step, size in enumerate(sizes)
    ]
    for step, (size, report) in enumerate(zip(sizes, reports, strict=True)):
        tokens = [10 * step + i for i in range(size)]
        assert report.read(size) == (tokens, [1, 0, 0][:size])
        assert report.read(1) == (tokens[:1], [1])
        assert report.done.query()
    again = run_step(exchange, [77, 78], 1)
    assert again.read(1) == ([77], [1])
    assert again.values.data_ptr() == reports[0].values.data_ptr()


def test_the_inputs_of_a_step_wait_for_it_while_others_are_prepared() -> None:
    """The device may be as late as there are places."""
    exchange = HostExchange(4, 2, CPU)
    memory, reports = set(), []
    for step in range(NUM_PLACES):
        values = exchange.begin(4)
        memory.add(values.ctypes.data)
        values[:] = range(step, step + 4)
        reports.append(exchange.end(2))
    assert len(memory) == NUM_PLACES
    for step in range(NUM_PLACES):
        run_captured(exchange, 4, 2)
        assert exchange.on_device.tolist() == [*range(step, step + 4)]
    assert [report.read(1)[0] for report in reports] == [[step] for step in range(NUM_PLACES)]


@pytest.mark.parametrize("replays", [0, 1, 2 * NUM_PLACES + 1])
def test_replays_that_nobody_counts_leave_no_trace(replays: int) -> None:
    exchange = HostExchange(4, 2, CPU)
    run_step(exchange, [1, 2], 1)
    with exchange.uncounted(np.array([5, 6])):
        for _ in range(replays):
            run_captured(exchange, 2, 1)
            assert exchange.on_device[:2].tolist() == [5, 6]
    assert run_step(exchange, [3, 4], 1).read(1)[0] == [3]


@pytest.mark.parametrize("replays", range(1, NUM_PLACES))
def test_replays_that_nobody_counts_are_noticed(replays: int) -> None:
    exchange = HostExchange(4, 2, CPU)
    for step in range(NUM_PLACES + 1):
        run_step(exchange, [step, 1], 1).read(1)
    for _ in range(replays):
        run_captured(exchange, 2, 1)
    with pytest.raises(RuntimeError, match=f"report of step {NUM_PLACES + 2} is that of step "):
        run_step(exchange, [3, 4], 1).read(1)


def test_a_step_that_left_no_report_is_noticed() -> None:
    exchange = HostExchange(4, 2, CPU)
    exchange.begin(2)
    report = exchange.end(1)
    with pytest.raises(RuntimeError, match="report of step 1 is that of step 0"):
        report.read(1)
