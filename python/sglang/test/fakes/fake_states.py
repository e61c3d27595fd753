"""Recurrent states whose content tells which prefix they are the state after."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from sglang.srt.mem_cache.allocator import create_token_to_kv_pool_allocator
from sglang.srt.mem_cache.mamba_pool import MambaPool, StateShape
from sglang.srt.mem_cache.memory_pool_host import MambaPoolHost, PoolEntry
from sglang.srt.mem_cache.pool_transfer import PageRule, PoolName
from sglang.test.fakes.fake_kv import FakeKV, prefix_checksums

# Two buffers of unequal rows and dtypes, as real models have them.
_SHAPE = StateShape(
    conv_dim=1,
    conv_len=3,
    num_heads=2,
    key_dim=1,
    value_dim=1,
    conv_dtype=torch.int32,
    temporal_dtype=torch.int64,
)


@functools.lru_cache(maxsize=50_000)
def _checksum(
    tokens: tuple[int, ...], namespace: str | None, fingerprint: str | None, layer: int
) -> int:
    return int(prefix_checksums(tokens, namespace, fingerprint, layer)[-1])


class FakeStates(MambaPool):
    """Snapshot slots ``1 .. size``; a state after tokens holds their checksum, layer by layer."""

    def __init__(self, size: int, layer_num: int = 3) -> None:
        super().__init__(size, 0, _SHAPE, layer_num, "cpu")

    def expected(
        self, token_ids: Sequence[int], namespace: str | None, fingerprint: str | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state after ``token_ids``: conv [layers, 3, 1], temporal [layers, 2, 1, 1]."""
        tokens = tuple(token_ids)
        sums = torch.tensor(
            [_checksum(tokens, namespace, fingerprint, layer) for layer in range(self.layer_num)]
        )
        conv = (sums & 0x7FFFFFFF).to(torch.int32).reshape(-1, 1, 1) - torch.arange(3).reshape(3, 1)
        temporal = torch.stack([sums, ~sums], dim=1).reshape(-1, 2, 1, 1)
        return conv.to(torch.int32), temporal

    def write_state(
        self,
        slot: torch.Tensor,
        token_ids: Sequence[int],
        namespace: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Put the state after ``token_ids`` into a slot, int64 [1]."""
        conv, temporal = self.expected(token_ids, namespace, fingerprint)
        self.conv_data[:, int(slot)] = conv
        self.temporal_data[:, int(slot)] = temporal

    def verify_state(
        self,
        slot: torch.Tensor,
        token_ids: Sequence[int],
        namespace: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Raise AssertionError unless a slot holds the state after ``token_ids``.

        Looks as a forward pass does: each layer when it has been loaded.
        """
        conv, temporal = self.expected(token_ids, namespace, fingerprint)
        for layer in range(self.layer_num):
            is_right = torch.equal(self.conv_state(layer)[int(slot)], conv[layer])
            is_right &= torch.equal(self.temporal_state(layer)[int(slot)], temporal[layer])
            assert is_right, f"layer {layer} of slot {int(slot)}: not after {len(token_ids)} tokens"

    def page_bytes(
        self, token_ids: Sequence[int], namespace: str | None, fingerprint: str | None
    ) -> bytes:
        """Return the state after ``token_ids`` as a host page: layer by layer, conv | temporal."""
        conv, temporal = self.expected(token_ids, namespace, fingerprint)
        return b"".join(
            conv[layer].numpy().tobytes() + temporal[layer].numpy().tobytes()
            for layer in range(self.layer_num)
        )


class TieredStates:
    """Snapshot slots on the device (``pool``, ``allocator``) and on the host, beside a ``FakeKV``.

    What ``HiCacheEngine`` needs of a model with recurrent states.
    """

    def __init__(self, kv: FakeKV, num_states: int, num_host_states: int) -> None:
        self.pool = FakeStates(num_states)
        self.allocator = create_token_to_kv_pool_allocator(num_states, 1)
        self.host = MambaPoolHost(self.pool, num_host_states)

    def entry(self) -> PoolEntry:
        """For the group of host pools."""
        return PoolEntry(
            name=PoolName.MAMBA,
            host_pool=self.host,
            device_pool=self.pool,
            share_indices_with_anchor=False,
            rule=PageRule(trailing=1),
        )
