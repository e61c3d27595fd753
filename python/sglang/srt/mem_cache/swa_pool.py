"""KV of models that mix layers with a sliding window and layers that see everything.

Owns two pools and the map between their slots: tokens have a slot in the *full* pool for as long as
their request or the tree keeps them, and beside it a row in the *window* pool only while something
may still look at them there. Does not own who has which row (``swa_allocator.py``, which writes the
map). Buffers are written by the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.mem_cache.memory_pool import (
    AttentionLayer,
    KVCache,
    KVSizeBytes,
    LayerTransferCounter,
)


class SWAKVPool(KVCache):
    """Layers with a window in ``swa_kv_pool``, the others in ``full_kv_pool``.

    As a ``KVCache`` it has the model's own layer numbers and the full pool's slots; ``slot_map``
    says where a layer with a window keeps a slot. ``full_to_swa``: that map, int32
    [size + page_size] on the device, one tensor for the pool's life (captured steps hold it); slots
    without a window row are mapped to the dummy row 0.
    """

    def __init__(
        self,
        full_kv_pool: KVCache,
        swa_kv_pool: KVCache,
        full_layer_ids: Sequence[int],
        swa_layer_ids: Sequence[int],
        window: int,
    ) -> None:
        """``full_layer_ids``, ``swa_layer_ids``: the model's layers in each pool, in its order.

        ``window``: tokens that a query looks back on at most, itself included.
        """
        for layer_ids, pool in ((full_layer_ids, full_kv_pool), (swa_layer_ids, swa_kv_pool)):
            if len(layer_ids) != pool.layer_num:
                raise ValueError(f"{len(layer_ids)} layers for {pool.layer_num} buffers")
        if full_kv_pool.page_size != swa_kv_pool.page_size:
            raise ValueError("both pools must have one page size")
        super().__init__(
            full_kv_pool.size,
            full_kv_pool.page_size,
            full_kv_pool.dtype,
            full_kv_pool.layer_num + swa_kv_pool.layer_num,
            full_kv_pool.device,
        )
        self.full_kv_pool = full_kv_pool
        self.swa_kv_pool = swa_kv_pool
        self.full_layer_ids = tuple(full_layer_ids)
        self.swa_layer_ids = tuple(swa_layer_ids)
        self.window = window
        rows = self.size + self.page_size
        self.full_to_swa = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self._place: dict[int, tuple[KVCache, int]] = {
            **{layer: (full_kv_pool, i) for i, layer in enumerate(full_layer_ids)},
            **{layer: (swa_kv_pool, i) for i, layer in enumerate(swa_layer_ids)},
        }

    def slot_map(self, layer_id: int) -> torch.Tensor | None:
        """See ``KVCache``."""
        return self.full_to_swa if self._place[layer_id][0] is self.swa_kv_pool else None

    def register_layer_transfer_counter(self, counter: LayerTransferCounter | None) -> None:
        """See ``KVCache``; copies from the host are counted by each pool's own layer numbers."""
        self.full_kv_pool.register_layer_transfer_counter(counter)
        self.swa_kv_pool.register_layer_transfer_counter(counter)

    def wait_until(self, layer_idx: int) -> None:
        """See ``KVCache``; both pools have the same counter."""
        self.full_kv_pool.wait_until(layer_idx)

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """See ``KVCache``; of the full pool, which is what slots number."""
        return self.full_kv_pool.buffers()

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """See ``KVCache``; rows of a window layer are numbered by ``slot_map``."""
        pool, layer_idx = self._place[layer_id]
        return pool.get_key_buffer(layer_idx)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """See ``KVCache``; rows as in ``get_key_buffer``."""
        pool, layer_idx = self._place[layer_id]
        return pool.get_value_buffer(layer_idx)

    def set_kv_buffer(
        self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """See ``KVCache``."""
        pool, layer_idx = self._place[layer.layer_id]
        rows = self.rows_of(layer.layer_id, loc)
        pool.get_key_buffer(layer_idx)[rows] = k.to(self.dtype)
        pool.get_value_buffer(layer_idx)[rows] = v.to(self.dtype)

    def move(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """See ``KVCache``; the slots must all have window rows."""
        self.full_kv_pool.move(from_slots, to_slots)
        self.swa_kv_pool.move(
            self.full_to_swa[from_slots].long(), self.full_to_swa[to_slots].long()
        )

    def get_kv_size_bytes(self) -> KVSizeBytes:
        """See ``KVCache``; of both pools."""
        full, window = self.full_kv_pool.get_kv_size_bytes(), self.swa_kv_pool.get_kv_size_bytes()
        return KVSizeBytes(full.key + window.key, full.value + window.value)
