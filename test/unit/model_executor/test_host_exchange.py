"""What steps are given and what they leave on the host, where several are under way at once."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.logits_processor import HostReport
from sglang.srt.model_executor.host_exchange import NUM_PLACES, HostExchange

CPU = torch.device("cpu")


def run_step(exchange: HostExchange, inputs: list[int], size: int) -> HostReport:
    """A step whose report are its first inputs, and their negatives, of `size` requests."""
    exchange.begin(len(inputs))[:] = inputs
    exchange.send(len(inputs))
    first = exchange.on_device[:size]
    exchange.write_report(torch.stack((first, -first)), len(inputs))
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
        assert report.values.tolist() == [tokens, [-token for token in tokens]]
        assert report.done.query()
    again = run_step(exchange, [77, 78], 1)
    assert again.values.tolist() == [[77], [-77]]
    assert again.values.data_ptr() == reports[0].values.data_ptr()


def test_inputs_are_not_overwritten_while_they_are_copied() -> None:
    exchange = HostExchange(4, 2, CPU)
    memory = set()
    for step in range(NUM_PLACES):
        values = exchange.begin(4)
        memory.add(values.ctypes.data)
        values[:] = range(step, step + 4)
        exchange.send(4)
        assert exchange.on_device[:4].tolist() == [*range(step, step + 4)]
        exchange.end(2)
    assert len(memory) == NUM_PLACES


@pytest.mark.parametrize("num_values", [0, 2, 4])
def test_the_place_lies_behind_the_inputs_of_any_size(num_values: int) -> None:
    exchange = HostExchange(4, 2, CPU)
    for place in (*range(NUM_PLACES), 0):
        exchange.begin(num_values)[:] = 9
        exchange.send(num_values)
        assert exchange.on_device[: num_values + 1].tolist() == [9] * num_values + [place]
        exchange.end(2)
