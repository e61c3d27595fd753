"""KV of models in which only some layers attend to all tokens; the others keep a recurrent state.

Owns the mapping from a model's layers to those of the two pools. Written by the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.mem_cache.mamba_pool import MambaPool
from sglang.srt.mem_cache.memory_pool import (
    AttentionLayer,
    KVCache,
    KVSizeBytes,
    LayerTransferCounter,
)


class HybridLinearKVPool(KVCache):
    """KV of the attention layers (``full_kv_pool``), states of the others (``mamba_pool``).

    As a ``KVCache`` it is the first, under the model's own layer numbers; tokens have slots there
    only. What is copied between tiers are the two pools, each under its own numbers.
    """

    def __init__(
        self,
        full_kv_pool: KVCache,
        mamba_pool: MambaPool,
        full_layer_ids: Sequence[int],
        linear_layer_ids: Sequence[int],
    ) -> None:
        """`full_layer_ids`, `linear_layer_ids`: the model's layers in each pool, in its order."""
        if len(full_layer_ids) != full_kv_pool.layer_num:
            raise ValueError(f"{len(full_layer_ids)} layers for {full_kv_pool.layer_num} buffers")
        if len(linear_layer_ids) != mamba_pool.layer_num:
            raise ValueError(f"{len(linear_layer_ids)} layers for {mamba_pool.layer_num} states")
        super().__init__(
            full_kv_pool.size,
            full_kv_pool.page_size,
            full_kv_pool.dtype,
            full_kv_pool.layer_num,
            full_kv_pool.device,
        )
        self.full_kv_pool = full_kv_pool
        self.mamba_pool = mamba_pool
        self._full = {layer_id: i for i, layer_id in enumerate(full_layer_ids)}
        self.linear_layer_index = {layer_id: i for i, layer_id in enumerate(linear_layer_ids)}

    def register_layer_transfer_counter(self, counter: LayerTransferCounter | None) -> None:
        """See ``KVCache``. The states' copies are waited for by ``mamba_pool``'s own counter."""
        self.full_kv_pool.register_layer_transfer_counter(counter)

    def wait_until(self, layer_idx: int) -> None:
        """See ``KVCache``; of the attention layers."""
        self.full_kv_pool.wait_until(layer_idx)

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """See ``KVCache``."""
        return self.full_kv_pool.buffers()

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """See ``KVCache``. Raises KeyError for a layer without KV, as all that take a layer."""
        return self.full_kv_pool.get_key_buffer(self._full[layer_id])

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """See ``KVCache``."""
        return self.full_kv_pool.get_value_buffer(self._full[layer_id])

    def set_kv_buffer(
        self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """See ``KVCache``."""
        keys, values = self.get_kv_buffer(layer.layer_id)
        keys[loc] = k.to(self.dtype)
        values[loc] = v.to(self.dtype)

    def move(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """See ``KVCache``; of the attention layers."""
        self.full_kv_pool.move(from_slots, to_slots)

    def get_kv_size_bytes(self) -> KVSizeBytes:
        """See ``KVCache``; of the attention layers."""
        return self.full_kv_pool.get_kv_size_bytes()
