"""The page copy kernel against indexed copies: in the interpreter, or on a GPU if there is one."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt.mem_cache.host_copy import KernelCopier, PageMap
from sglang.srt.mem_cache.host_memory import HostMemory
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import LAYOUTS, MHATokenToKVPoolHost
from sglang.srt.mem_cache.triton_ops.page_copy import PageCopy
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS, HOST_PAGES, DEVICE_PAGES = 3, 11, 9


@pytest.mark.parametrize("to_host", [True, False], ids=["backup", "load"])
@pytest.mark.parametrize("pieces", [(24, 24), (24, 40), (7,), (1, 1)], ids=str)
@pytest.mark.parametrize("tile_bytes", [64, 1024])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int16])
def test_kernel_moves_what_an_indexed_copy_moves(
    dtype: torch.dtype, tile_bytes: int, pieces: tuple[int, ...], to_host: bool
) -> None:
    host_pages = torch.tensor([4, 10, 0, 1, 7])
    device_pages = torch.tensor([8, 1, 2, 0, 5])
    row = LAYERS * sum(pieces)
    memory = HostMemory(HOST_PAGES * row * dtype.itemsize, pinned=DEVICE == "cuda")
    memory.tensor.random_(0, 256)
    by_page = memory.tensor.view(dtype).view(HOST_PAGES, LAYERS, sum(pieces))
    hosts = [part.transpose(0, 1) for part in by_page.split(pieces, dim=2)]
    devices = [
        torch.randint(-99, 99, (LAYERS, DEVICE_PAGES, piece), dtype=dtype, device=DEVICE)
        for piece in pieces
    ]
    expected = [(host.clone(), device.cpu()) for host, device in zip(hosts, devices)]
    for host, device in expected:
        if to_host:
            host[1:, host_pages] = device[1:, device_pages]
        else:
            device[1:, device_pages] = host[1:, host_pages]
    copy = PageCopy(
        hosts,
        devices,
        torch.stack((host_pages, device_pages)).to(DEVICE),
        to_host=to_host,
        tile_bytes=tile_bytes,
    )
    copy.launch(range(1, LAYERS))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    for host, device, wanted in zip(hosts, devices, expected):
        assert torch.equal(host, wanted[0]) and torch.equal(device.cpu(), wanted[1])
    memory.close()


@pytest.mark.parametrize("v_head_dim", [8, 4])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_are_copied_by_the_kernel(layout: str, page_size: int, v_head_dim: int) -> None:
    device = MHATokenToKVPool(
        24, page_size, torch.int16, 2, 8, LAYERS, DEVICE, v_head_dim=v_head_dim
    )
    host = MHATokenToKVPoolHost(device, 32, layout)
    for data in (device.k_data, device.v_data):
        data.random_()
    slots = torch.arange(20).view(-1, page_size)
    page_map = PageMap(
        slots.flip(0).reshape(-1), torch.roll(slots, 2, 0).reshape(-1) + page_size, page_size
    )
    sides = host.sides(device)
    wanted = [side.device.clone() for side in sides]
    KernelCopier(sides, page_map, True).copy(range(LAYERS))
    for side in sides:
        side.device.zero_()
    load = KernelCopier(sides, page_map, False)
    for layer in range(LAYERS):
        load.copy(range(layer, layer + 1))
    pages = torch.from_numpy(page_map.device_pages).to(DEVICE)
    for side, before in zip(sides, wanted):
        assert torch.equal(side.device[:, pages], before[:, pages])
        assert int(side.device.ne(0).sum()) == int(before[:, pages].ne(0).sum())
