"""The cache controller's copies on a GPU: streams, fences and per-layer events under load.

A busy stream stands for a slow forward; what a test expects must hold whatever the timing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import create_token_to_kv_pool_allocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import (
    LAYOUTS,
    HostPoolGroup,
    MHATokenToKVPoolHost,
    PoolEntry,
)
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=20, suite="kernels")

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PAGE, PAGES, LAYERS, DRAFT_LAYERS = 16, 64, 6, 8
BUSY_CYCLES = 200_000_000  # about a tenth of a second


class Rig:
    """A controller over small pools; the forward runs on a stream of its own."""

    def __init__(self, layout: str, io_backend: str) -> None:
        from sglang.srt.platforms.cuda import CudaPlatform

        self.forward_stream = torch.cuda.Stream()
        self.kv, self.draft = (self._device_pool(layers) for layers in (LAYERS, DRAFT_LAYERS))
        self.allocator = create_token_to_kv_pool_allocator(self.kv.size, PAGE)
        hosts = [MHATokenToKVPoolHost(pool, PAGES * PAGE, layout) for pool in (self.kv, self.draft)]
        self.group = HostPoolGroup(
            PoolEntry(name=PoolName.KV, host_pool=hosts[0], device_pool=self.kv), io_backend
        )
        self.controller = HiCacheController(
            self.allocator,
            self.group,
            page_size=PAGE,
            platform=CudaPlatform(0),
            forward_fence=self.forward_stream.record_event,
        )
        self.controller.set_draft_kv_pool(self.draft, hosts[1])

    @staticmethod
    def _device_pool(layers: int) -> MHATokenToKVPool:
        return MHATokenToKVPool(
            size=PAGES * PAGE,
            page_size=PAGE,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=64,
            layer_num=layers,
            device="cuda",
        )

    def slow_forward(self, slots: torch.Tensor, value: float) -> None:
        """Write ``value + layer`` to the slots, on the forward stream, some time from now."""
        on_device = slots.cuda()
        on_device.record_stream(self.forward_stream)
        with torch.cuda.stream(self.forward_stream):
            self.forward_stream.wait_stream(torch.cuda.default_stream())
            torch.cuda._sleep(BUSY_CYCLES)
            for pool in (self.kv, self.draft):
                for layer in range(pool.layer_num):
                    # Not by indexing, which would wait for the stream.
                    pool.k_buffer[layer].index_fill_(0, on_device, value + layer)
                    pool.v_buffer[layer].index_fill_(0, on_device, -value - layer)

    def read(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """What a forward sees that starts now: K of each layer of both pools, on the device."""
        on_device = slots.cuda()
        on_device.record_stream(self.forward_stream)
        with torch.cuda.stream(self.forward_stream):
            self.forward_stream.wait_stream(torch.cuda.default_stream())
            return [
                pool.get_key_buffer(layer)[on_device]
                for pool in (self.kv, self.draft)
                for layer in range(pool.layer_num)
            ]


def expect(seen: list[torch.Tensor], value: float) -> None:
    torch.cuda.synchronize()
    layers = [*range(LAYERS), *range(DRAFT_LAYERS)]
    assert [tensor.unique().tolist() for tensor in seen] == [[value + layer] for layer in layers]


@pytest.fixture(params=[(layout, io) for layout in LAYOUTS for io in ("kernel", "direct")])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(*request.param)
    rig.group.warm_up()
    # PyTorch's own kernels wait for the device when they are loaded, at their first launch.
    rig.slow_forward(torch.arange(PAGE), 0)
    rig.read(torch.arange(PAGE))
    torch.cuda.synchronize()
    yield rig
    torch.cuda.synchronize()
    rig.controller.shutdown()
    rig.group.destroy()


def test_copies_fall_in_line_behind_slow_forwards(rig: Rig) -> None:
    controller = rig.controller
    alloc: Callable[[int], torch.Tensor | None] = rig.allocator.alloc
    slots = alloc(8 * PAGE)
    assert slots is not None
    rig.slow_forward(slots, 10)
    host = controller.write(slots, node_id=1)
    assert host is not None
    controller.start_writing()
    assert controller.num_done_writes() == 0  # the forward has hardly begun
    controller.take_write_acks(1)
    rig.allocator.free(slots)

    # A forward that was queued before the slots were freed still writes all of them.
    everything = torch.arange(PAGE, (PAGES + 1) * PAGE)
    rig.slow_forward(everything, 50)
    loaded = controller.load(host, node_id=2)
    assert loaded is not None
    index = controller.start_loading()
    assert controller.num_done_loads() == 0
    controller.set_consumer(index)
    seen = rig.read(loaded)
    controller.set_consumer(-1)
    expect(seen, 10)
    assert controller.num_done_loads() == 1
    (ack,) = controller.take_load_acks(1)
    assert ack.node_ids == [2] and ack.num_tokens == 8 * PAGE


def test_many_loads_in_a_row_keep_their_order(rig: Rig) -> None:
    controller = rig.controller
    hosts = []
    for value in range(5):
        slots = rig.allocator.alloc(4 * PAGE)
        assert slots is not None
        rig.slow_forward(slots, 10 * value)
        hosts.append(controller.write(slots, node_id=value))
        rig.allocator.free(slots)  # under the lock of the tree in reality; nothing takes them here
    controller.start_writing()
    (ack,) = controller.take_write_acks(5)
    assert ack.node_ids == list(range(5))
    seen = []
    for value, host in enumerate(hosts):
        assert host is not None
        loaded = controller.load(host, node_id=value)
        assert loaded is not None
        controller.set_consumer(controller.start_loading())
        seen.append(rig.read(loaded))
    for value, layers in enumerate(seen):
        expect(layers, 10 * value)
    assert len(controller.take_load_acks(5)) == 5
