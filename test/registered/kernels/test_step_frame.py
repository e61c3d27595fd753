"""The frame of a captured step: its kernels against the reference, and replays with the host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt.layers import step_frame as reference
from sglang.srt.layers.step_frame import HEAD, DecodeTables, HostRings
from sglang.srt.layers.triton_ops import step_frame as kernels

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
PLACES = 3


def host_memory(*shape: int) -> torch.Tensor:
    values = torch.arange(1, 1 + shape[0] * shape[1]).view(shape)
    return values.pin_memory() if HAS_CUDA else values


def make_rings(num_values: int, num_reqs: int, count: int) -> HostRings:
    inputs = host_memory(PLACES, HEAD + num_values)
    inputs[:, 1:HEAD] = 0  # not used
    return HostRings(
        inputs=inputs,
        reports=host_memory(PLACES, 1 + 2 * num_reqs),
        count=torch.tensor([count], device=DEVICE),
        received=torch.zeros(HEAD + num_values, dtype=torch.int64, device=DEVICE),
    )


def on_cpu(rings: HostRings) -> HostRings:
    """A copy, for the reference."""
    return HostRings(
        **{name: getattr(rings, name).cpu().clone() for name in HostRings.__dataclass_fields__}
    )


def assert_equal(rings: HostRings, expected: HostRings) -> None:
    if HAS_CUDA:
        torch.cuda.synchronize()
    for name in HostRings.__dataclass_fields__:
        assert torch.equal(getattr(rings, name).cpu(), getattr(expected, name)), name


# Several blocks, then fewer values than there is room for.
@pytest.mark.parametrize(("count", "num_values"), [(2, 2500), (3, 14), (1 << 40, 1)])
def test_inputs_are_of_the_place_that_the_device_counts(count: int, num_values: int) -> None:
    rings = make_rings(2600, 1, count)
    expected = on_cpu(rings)
    kernels.receive(rings, num_values)
    reference.receive(expected, num_values)
    assert_equal(rings, expected)
    assert int(rings.count) == count + 1
    received = expected.received.tolist()
    assert (
        received[: HEAD + num_values] == rings.inputs[count % PLACES, : HEAD + num_values].tolist()
    )
    assert not any(received[HEAD + num_values :])


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 5), (300, 700)])
def test_a_decode_step_finds_its_tokens_positions_and_slots(count: int, size: int) -> None:
    rings = make_rings(3 * 701, 1, count)
    rows = torch.randperm(701)[:size]
    lens, slots = torch.randint(1, 9, (size,)), torch.randint(1, 1 << 30, (size,))
    values = torch.cat((rows, lens, slots))
    rings.inputs[count % PLACES, HEAD : HEAD + 3 * size] = values
    tables = DecodeTables(
        last_token_ids=torch.randint(0, 1000, (702,)).to(DEVICE),
        req_to_token=torch.zeros(702, 9, dtype=torch.int32, device=DEVICE),
        input_ids=torch.full((701,), -1, device=DEVICE),
        positions=torch.full((701,), -1, device=DEVICE),
    )
    expected = on_cpu(rings)
    names = DecodeTables.__dataclass_fields__
    wanted = DecodeTables(**{name: getattr(tables, name).cpu().clone() for name in names})
    kernels.receive_decode(rings, size, tables)
    reference.receive_decode(expected, size, wanted)
    assert_equal(rings, expected)
    for name in names:
        assert torch.equal(getattr(tables, name).cpu(), getattr(wanted, name)), name
    assert wanted.positions[:size].tolist() == (lens - 1).tolist()
    assert wanted.req_to_token[rows, lens - 1].tolist() == slots.tolist()
    assert wanted.input_ids.tolist()[size:] == [-1] * (701 - size)


@pytest.mark.parametrize("width", [5, 9001])
def test_the_largest_logits_are_noted_and_reported(width: int) -> None:
    """Fewer than there is room for; rows with NaN and +inf are told."""
    logits = torch.randn(6, width)
    logits[1, width - 1], logits[2, 0], logits[3, 1:] = torch.nan, torch.inf, -torch.inf
    logits[5, 3] = logits[5].max() + 1
    rings = replace(make_rings(4, 8, 1), received=torch.tensor([100, 0], device=DEVICE))
    expected = on_cpu(rings)
    rows = torch.tensor([7, 2, 0, 5, 9, 4])
    noted, wanted = torch.zeros(10, dtype=torch.int64, device=DEVICE), torch.zeros(10).long()
    report = kernels.choose_and_report(rings, logits.to(DEVICE), rows.to(DEVICE), noted).cpu()
    plain = reference.choose_and_report(expected, logits, rows, wanted)
    assert report[1].tolist() == plain[1].tolist() == [0, 1, 1, 0, 0, 0]
    usable = [0, 3, 4, 5]
    assert report[0, usable].tolist() == plain[0, usable].tolist()
    assert plain[0].tolist()[3] == 0 and plain[0].tolist()[5] == 3
    assert int(report[0].max()) < width
    assert noted[rows.to(DEVICE)].tolist() == report[0].tolist()
    assert wanted[rows].tolist() == plain[0].tolist()
    for one, values in ((rings, report), (expected, plain)):
        assert one.reports[100 % PLACES].tolist()[:13] == [100, *values.view(-1).tolist()]
    assert torch.equal(rings.reports[[0, 2]], host_memory(PLACES, 17)[[0, 2]])


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_replays_take_their_inputs_from_the_host_and_leave_reports_there() -> None:
    """All are launched before the first one has begun, as late as a device may be."""
    places = 4
    rings = HostRings(
        inputs=torch.zeros(places, HEAD + 6, dtype=torch.int64).pin_memory(),
        reports=torch.zeros(places, 5, dtype=torch.int64).pin_memory(),
        count=torch.ones(1, dtype=torch.int64, device=DEVICE),
        received=torch.zeros(HEAD + 6, dtype=torch.int64, device=DEVICE),
    )
    logits = torch.zeros(2, 5000, device=DEVICE)
    last = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    ones = torch.ones(2, device=DEVICE)

    def step() -> None:
        """Two requests, whose next tokens are among their inputs."""
        kernels.receive(rings, 6)
        values = rings.received[HEAD:]
        logits.zero_()
        logits[values[:2], values[2:4]] = ones
        kernels.choose_and_report(rings, logits, values[:2], last)

    for _ in range(2):
        step()  # compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rings.count.fill_(1)
    big = torch.randn(8192, 8192, device=DEVICE)
    for first in (1, 5, 9):  # each place is taken again, by other values
        busy, done = torch.cuda.Event(), torch.cuda.Event()
        for _ in range(8):
            torch.mm(big, big)
        busy.record()
        for number in range(first, first + places):
            values = [number, 0, 0, 1, 10 * number, 4000 + number, 0, 0]
            rings.inputs[number % places] = torch.tensor(values)
            graph.replay()
        done.record()
        was_busy = not busy.query()
        done.synchronize()
        assert was_busy
        for number in range(first, first + places):
            expected = [number, 10 * number, 4000 + number, 0, 0]
            assert rings.reports[number % places].tolist() == expected
