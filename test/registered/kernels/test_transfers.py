"""Small transfers between host and device, beside large ones."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt import platforms
from sglang.srt.platforms import cuda_transfers
from sglang.srt.platforms.cuda_transfers import HostReader, write_to_host

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_CUDA else "cpu")


def synchronize() -> None:
    if HAS_CUDA:
        torch.cuda.synchronize()


VALUES = {
    "several blocks": torch.arange(5000).view(2, 2500),
    "strided": torch.arange(24).view(4, 6)[:, 1:3],
    "flags": torch.tensor([True, False, True]),
    "odd words": torch.arange(7, dtype=torch.int32),
    "half precision": torch.arange(6).half(),
    "one": torch.tensor(3.5),
    "nothing": torch.empty(0, dtype=torch.int64),
}


@pytest.mark.parametrize("name", VALUES)
def test_results_come_to_the_host(name: str) -> None:
    values = VALUES[name]
    got = write_to_host(values.to(DEVICE))
    synchronize()
    assert got.device.type == "cpu" and torch.equal(got, values)
    assert not HAS_CUDA or got.is_pinned() or not values.numel()


@pytest.mark.parametrize("name", VALUES)
def test_values_come_to_the_device(name: str) -> None:
    values = VALUES[name]
    target = torch.zeros_like(values, device=DEVICE, memory_format=torch.contiguous_format)
    HostReader(DEVICE).read(values, target)
    assert torch.equal(target.cpu(), values)


def test_a_reader_that_was_first_used_in_inference_mode_goes_on_outside() -> None:
    source, target = torch.arange(3, dtype=torch.uint8), torch.zeros(3, dtype=torch.uint8)
    reader, target = HostReader(DEVICE), target.to(DEVICE)
    with torch.inference_mode():
        reader.read(source, target)
    reader.read(source + 5, target)
    assert target.tolist() == [5, 6, 7]


@pytest.mark.parametrize("start", range(4))
def test_a_part_of_a_row_is_written_and_nothing_beside_it(start: int) -> None:
    """Wherever it begins: words of the largest size that fits its place."""
    table = torch.zeros(3, 50, dtype=torch.int32, device=DEVICE)
    HostReader(DEVICE).read(torch.arange(1, 9, dtype=torch.int32), table[1, start : start + 8])
    expected = torch.zeros(3, 50, dtype=torch.int32)
    expected[1, start : start + 8] = torch.arange(1, 9)
    assert torch.equal(table.cpu(), expected)


def test_what_does_not_fit_is_refused() -> None:
    reader, source = HostReader(DEVICE), torch.arange(6)
    for target in (torch.zeros(5).long(), torch.zeros(6), torch.zeros(2, 3).long()):
        with pytest.raises(ValueError, match="does not fit into"):
            reader.read(source, target.to(DEVICE))
    with pytest.raises(ValueError, match="contiguous"):
        reader.read(source, torch.zeros(6, 2, device=DEVICE).long()[:, 0])


def test_values_may_change_once_they_were_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through as much memory as is there, several times."""
    monkeypatch.setattr(cuda_transfers, "_HALF_BYTES", 1000)
    reader, source = HostReader(DEVICE), torch.empty(30, dtype=torch.int64)
    targets = torch.zeros(40, 30, dtype=torch.int64, device=DEVICE)
    if HAS_CUDA:
        torch.cuda._sleep(50_000_000)  # all are handed over before the first has been read
    for number, target in enumerate(targets):
        source.fill_(number)
        reader.read(source, target)
    large = torch.arange(500)  # more than half of the memory
    got = torch.zeros(500, dtype=torch.int64, device=DEVICE)
    if HAS_CUDA:
        reader.read(large, got)
        assert torch.equal(got.cpu(), large)
    assert torch.equal(targets.cpu(), torch.arange(40)[:, None].expand(40, 30))


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("to_host", [False, True])
def test_small_transfers_do_not_queue_behind_large_ones(to_host: bool) -> None:
    """Of the same direction, as those of a prompt's KV."""
    platform = platforms.init_platform("cuda")
    large = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    host = torch.empty_like(large, device="cpu", pin_memory=True)
    tokens = torch.arange(64)
    on_device = tokens.cuda()

    def transfer() -> torch.Tensor:
        return write_to_host(on_device) if to_host else platform.to_device_async(tokens)

    transfer()  # compiled
    side, copied, arrived = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        if to_host:
            host.copy_(large, non_blocking=True)
        else:
            large.copy_(host, non_blocking=True)
        copied.record()
    got = transfer()
    arrived.record()
    arrived.synchronize()
    is_large_done = copied.query()
    torch.cuda.synchronize()
    assert not is_large_done
    assert torch.equal(got.cpu(), tokens)
