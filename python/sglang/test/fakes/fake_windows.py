"""Window rows whose content tells what they belong to, beside a `FakeKV`, with a host pool.

What `HiCacheEngine` needs of a model that mixes sliding windows and full attention.
"""

from __future__ import annotations

import torch

from sglang.srt.mem_cache.memory_pool_host import MHATokenToKVPoolHost, PoolEntry
from sglang.srt.mem_cache.pool_transfer import PageRule, PoolName
from sglang.srt.mem_cache.swa_allocator import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_pool import SWAKVPool
from sglang.test.fakes.fake_kv import FakeKV, FakeReq


class FakeWindows:
    """Two full-attention layers (`kv`) and three with a window; one allocator for both."""

    def __init__(self, kv: FakeKV, num_rows: int, num_host_rows: int, window: int) -> None:
        self.window = window
        self.rows = FakeKV(num_rows, kv.page_size, layer_num=3)
        self.pool = SWAKVPool(kv, self.rows, (0, 2), (1, 3, 4), window)
        self.allocator = SWATokenToKVPoolAllocator(
            kv.size, num_rows, kv.page_size, self.pool, window
        )
        self.host = MHATokenToKVPoolHost(self.rows, num_host_rows, "page_first")

    def entry(self) -> PoolEntry:
        """For the group of host pools."""
        num_pages = -(-(self.window - 1) // self.rows.page_size)
        return PoolEntry(
            name=PoolName.SWA,
            host_pool=self.host,
            device_pool=self.rows,
            share_indices_with_anchor=False,
            rule=PageRule(trailing=max(1, num_pages)),
        )

    def compute(self, req: FakeReq, slots: torch.Tensor, start: int) -> None:
        """Write positions [start, start + len(slots)) of a request; all have rows."""
        rows = self.pool.full_to_swa[slots].long()
        assert (rows > 0).all(), f"{req.rid} computes tokens without window rows"
        self.rows.write_prefix(rows, req.all_ids, start, req.extra_key, req.kv_fingerprint)

    def verify(self, req: FakeReq, slots: torch.Tensor) -> None:
        """Raise unless all that the next token looks back on is there; `slots`: all committed."""
        start = max(0, len(slots) - (self.window - 1))
        rows = self.pool.full_to_swa[slots[start:]].long()
        assert (rows > 0).all(), f"{req.rid} lacks window rows from {start} on: {rows.tolist()}"
        assert torch.equal(rows, self.allocator.swa_rows(slots[start:]))
        for layer in range(self.rows.layer_num):
            want = self.rows._expected(req.all_ids, req.extra_key, req.kv_fingerprint, layer)
            got = self.rows.get_key_buffer(layer)[rows].flatten()
            assert torch.equal(got, want[start : len(slots)]), f"{req.rid}: windows mixed up"
