"""The copy engine's plan, carried out byte by byte on the CPU, against indexed copies."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache import dma_plan
from sglang.srt.mem_cache.dma_plan import (
    DmaPlan,
    LayerPlan,
    LeastBytes,
    can_plan_layers,
    plan_layers,
)
from sglang.srt.mem_cache.host_copy import PageMap
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import LAYOUTS, MHATokenToKVPoolHost

PAGE_SIZE, LAYERS = 2, 3


@pytest.fixture(params=LAYOUTS)
def pools(
    request: pytest.FixtureRequest,
) -> Iterator[tuple[MHATokenToKVPool, MHATokenToKVPoolHost]]:
    device = MHATokenToKVPool(24, PAGE_SIZE, torch.int16, 2, 4, LAYERS, "cpu", v_head_dim=2)
    host = MHATokenToKVPoolHost(device, 32, request.param)
    for data in (device.k_data, device.v_data, host.memory.tensor):
        data.random_()
    yield device, host
    host.destroy()


def carry_out(plan: DmaPlan, to_host: bool) -> int:
    """Do the copies; returns how many bytes were written."""
    lines = [tuple(line) for line in plan.lines.tolist()]
    for host, device, width, height, host_pitch, device_pitch in plan.rectangles.tolist():
        for row in range(height):
            lines.append((host + row * host_pitch, device + row * device_pitch, width))
    for host, device, size in lines:
        ctypes.memmove(host if to_host else device, device if to_host else host, size)
    return sum(size for _, _, size in lines)


def slots_of(pages: np.ndarray) -> torch.Tensor:
    return torch.from_numpy((pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1))


PAGES = {
    "one": ([3], [5]),
    "scattered": ([9, 2, 4, 15, 0], [1, 8, 3, 12, 6]),
    "long run": ([4, 5, 6, 7, 8, 1], [2, 3, 4, 5, 6, 9]),
    "runs only on one side": ([1, 2, 3, 4], [9, 7, 5, 3]),
}


@pytest.mark.parametrize("max_pitch", [dma_plan.MAX_PITCH, 0], ids=["", "no rectangles"])
@pytest.mark.parametrize("which", PAGES)
@pytest.mark.parametrize("layers", [range(LAYERS), range(1, 2), range(1, 3)], ids=str)
@pytest.mark.parametrize("to_host", [True, False], ids=["backup", "load"])
def test_plan_moves_what_an_indexed_copy_moves(
    pools: tuple[MHATokenToKVPool, MHATokenToKVPoolHost],
    which: str,
    layers: range,
    to_host: bool,
    max_pitch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dma_plan, "MAX_PITCH", max_pitch)
    device_pool, host_pool = pools
    host_pages, device_pages = map(np.array, PAGES[which])
    page_map = PageMap(slots_of(host_pages), slots_of(device_pages), PAGE_SIZE)
    sides = host_pool.sides(device_pool)
    expected = [(side.host.clone(), side.device.clone()) for side in sides]
    for host, device in expected:
        for layer in layers:
            if to_host:
                host[layer, host_pages] = device[layer, device_pages]
            else:
                device[layer, device_pages] = host[layer, host_pages]
    addresses = [side.addresses() for side in sides]
    if len(layers) == LAYERS and can_plan_layers(addresses):
        plans = [plan_layers(addresses, page_map.runs, LAYERS)]
    else:
        by_layer = LayerPlan(addresses, page_map.runs)
        plans = [by_layer.at(layer) for layer in layers]
    num_bytes = sum(carry_out(plan, to_host) for plan in plans)
    assert num_bytes == len(host_pages) * len(layers) * sum(side.piece_bytes for side in sides)
    for side, (host, device) in zip(sides, expected):
        assert torch.equal(side.host, host) and torch.equal(side.device, device)
    if max_pitch == 0:
        assert not any(len(plan.rectangles) for plan in plans)


def test_runs_are_merged(pools: tuple[MHATokenToKVPool, MHATokenToKVPoolHost]) -> None:
    device_pool, host_pool = pools
    slots = torch.arange(10)
    page_map = PageMap(slots, slots + PAGE_SIZE, PAGE_SIZE)
    sides = [side.addresses() for side in host_pool.sides(device_pool)]
    load = LayerPlan(sides, page_map.runs)
    one_block = host_pool.layout == "layer_first"
    assert len(load.first.lines if one_block else load.first.rectangles) == len(sides)
    row = sum(side.piece for side in sides) // len(sides) * (len(page_map) if one_block else 1)
    assert load.first.is_worthwhile(LeastBytes(row=row, submission=1))
    assert not load.first.is_worthwhile(LeastBytes(row=row + 1, submission=1))
    submission = row if one_block else row * len(page_map) // dma_plan.RECTANGLE_COST
    assert load.first.is_worthwhile(LeastBytes(row=1, submission=submission))
    assert not load.first.is_worthwhile(LeastBytes(row=1, submission=submission + 1))
    backup = plan_layers(sides, page_map.runs, LAYERS)
    assert len(backup.rectangles) == (1 if one_block else len(page_map)) * len(sides)
    assert len(backup.lines) == 0
