"""Device memory of the KV cache and the table from requests to slots.

Owns the K/V buffers and the request-to-token table with its CPU mirror. Does not own slot indices
(``allocator.py``) nor prefix reuse (the trees). Rows and buffers are written from the scheduler
thread (table) and by the forward pass (buffers).

Row 0 .. page_size-1 of each buffer is the dummy page: padding tokens write there and nobody reads.
"""

from __future__ import annotations

import copy
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from sglang.srt.platforms import current_platform


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on the CPU from pages that the system zeroes when they are first used.

    `torch.zeros` would write all of a pool of many gigabytes at start-up.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(tuple(shape))


# (shape, dtype) -> zeros on the pool's device.
Allocate = Callable[[Sequence[int], torch.dtype], torch.Tensor]


class KVBuffers(NamedTuple):
    """K and V of one layer, [size + page_size, num_heads, head_dim] each."""

    key: torch.Tensor
    value: torch.Tensor


class KVSizeBytes(NamedTuple):
    """Bytes of all layers."""

    key: int
    value: int


class LayerTransferCounter(Protocol):
    """Says when a layer's rows have arrived from the host."""

    def wait_until(self, layer_idx: int) -> None:
        """Block (or make the device stream wait) until local layer ``layer_idx`` is loaded."""


class AttentionLayer(Protocol):
    """The part of an attention layer that a pool reads."""

    layer_id: int


class ReqToTokenPool:
    """Table of slots: row = request, column = token position.

    ``req_to_token`` is int32 [num_rows, max_context_len] on the device, ``req_to_token_cpu`` its
    CPU mirror (the same tensor on CPU). Rows are handed out lowest first; the last one, the
    ``padding_row``, never: all its cells are the dummy slot. Scheduler thread only.
    """

    def __init__(self, size: int, max_context_len: int, device: torch.device | str) -> None:
        self.size = size
        self.max_context_len = max_context_len
        self.device = torch.device(device)
        shape = (self.num_rows, max_context_len)
        self.req_to_token = torch.zeros(shape, dtype=torch.int32, device=self.device)
        self.req_to_token_cpu = (
            self.req_to_token
            if self.device.type == "cpu"
            else torch.zeros(shape, dtype=torch.int32)
        )
        self._free_rows: list[int] = []
        self._is_free: list[bool] = []
        self.clear()

    @functools.cached_property
    def mirror(self) -> np.ndarray:
        """``req_to_token_cpu`` as an array, in the same memory."""
        table: np.ndarray = self.req_to_token_cpu.numpy()
        return table

    @property
    def num_rows(self) -> int:
        """Rows of the table, and of every tensor that is indexed by them."""
        return self.size + 1

    @property
    def padding_row(self) -> int:
        """The row of requests that only fill up a captured batch."""
        return self.size

    def clear(self) -> None:
        """Take back every row."""
        self._free_rows = list(range(self.size - 1, -1, -1))
        self._is_free = [True] * self.size

    def available_size(self) -> int:
        """Return the number of free rows."""
        return len(self._free_rows)

    def alloc(self, num_reqs: int) -> list[int] | None:
        """Take ``num_reqs`` rows, or None when fewer are free."""
        if num_reqs > len(self._free_rows):
            return None
        rows = [self._free_rows.pop() for _ in range(num_reqs)]
        for row in rows:
            self._is_free[row] = False
        return rows

    def free(self, req_pool_idx: int | list[int]) -> None:
        """Give rows back. Raises RuntimeError when one is free already."""
        rows = [req_pool_idx] if isinstance(req_pool_idx, int) else req_pool_idx
        for row in rows:
            if not 0 <= row < self.size or self._is_free[row]:
                raise RuntimeError(f"request row {row} of {self.size} is not taken")
            self._is_free[row] = True
            self._free_rows.append(row)

    def write(self, req_pool_idx: int, start: int, values: torch.Tensor) -> None:
        """Set columns [start, start + n) of one row from slots int64 [n] on the CPU.

        The mirror changes now, the device table in stream order.
        """
        end = start + values.numel()
        if end > self.max_context_len:
            raise ValueError(f"columns [{start}, {end}) exceed {self.max_context_len}")
        self.req_to_token_cpu[req_pool_idx, start:end] = values
        if self.req_to_token is not self.req_to_token_cpu:
            cells = self.req_to_token[req_pool_idx, start:end]
            current_platform().write_to_device(values.to(torch.int32), cells)

    def write_at(self, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor) -> None:
        """Set one cell per entry, for a whole batch; int64 [n] CPU tensors."""
        self.write_mirror(rows.numpy(), columns.numpy(), slots.numpy())
        if self.req_to_token is not self.req_to_token_cpu:
            packed = current_platform().to_device_async(torch.stack((rows, columns, slots)))
            self.write_device(*packed.unbind(0))

    def write_mirror(self, rows: np.ndarray, columns: np.ndarray, slots: np.ndarray) -> None:
        """Set one cell per entry of the mirror, int64 [n] each; `write_device` must follow."""
        self.mirror[rows, columns] = slots

    def write_device(self, rows: torch.Tensor, columns: torch.Tensor, slots: torch.Tensor) -> None:
        """Set one cell per entry of the device's table, int64 [n] there. Can be captured."""
        if self.req_to_token is not self.req_to_token_cpu:
            self.req_to_token[rows, columns] = slots.to(torch.int32)

    def read(self, req_pool_idx: int, start: int, end: int) -> torch.Tensor:
        """Return the slots of columns [start, end) as a new int64 CPU tensor."""
        return self.req_to_token_cpu[req_pool_idx, start:end].to(torch.int64)


class KVCache(ABC):
    """Buffers of one model's KV on one device.

    ``get_*_buffer`` waits for the layer's host copy when a transfer counter is registered, so that
    layer i computes while layer i+1 is still on its way.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        layer_num: int,
        device: torch.device | str,
        start_layer: int = 0,
    ) -> None:
        self.size = size
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        self.layer_num = layer_num
        self.start_layer = start_layer
        self.layer_transfer_counter: LayerTransferCounter | None = None
        # Set for a `layer_view`: the pool that it is a layer of, and which one.
        self.stack: KVCache | None = None
        self.layer_in_stack = 0

    def register_layer_transfer_counter(self, counter: LayerTransferCounter | None) -> None:
        """Set whom ``get_*_buffer`` waits for; None to wait for nobody."""
        self.layer_transfer_counter = counter

    def _local_layer(self, layer_id: int) -> int:
        """Map a model layer to this pool's."""
        layer_idx = layer_id - self.start_layer
        if not 0 <= layer_idx < self.layer_num:
            raise IndexError(f"layer {layer_id} is not in [{self.start_layer}, +{self.layer_num})")
        return layer_idx

    def _loaded_layer(self, layer_id: int) -> int:
        """Map a model layer to this pool's, after its rows have arrived."""
        layer_idx = self._local_layer(layer_id)
        self.wait_until(layer_idx + self.layer_in_stack)
        return layer_idx

    def wait_until(self, layer_idx: int) -> None:
        """Wait for a load as its counter counts layers; ``get_*_buffer`` do so for their own."""
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_idx)

    def layer_view(self, layer_idx: int) -> KVCache:
        """One local layer as a pool of its own, in the same memory; its only layer is number 0.

        For models that are loaded layer by layer, while their KV travels together. Raises
        TypeError for kinds of pools that are never divided.
        """
        view = copy.copy(self)
        view.layer_num, view.start_layer = 1, 0
        view.stack, view.layer_in_stack = self, layer_idx
        view._keep_layer(self._local_layer(layer_idx + self.start_layer))
        return view

    def _keep_layer(self, layer_idx: int) -> None:
        """Narrow all buffers to one layer."""
        raise TypeError(f"{type(self).__name__} is not divided into layers")

    def slot_map(self, layer_id: int) -> torch.Tensor | None:
        """Return where a layer keeps each slot, int32 [size + page_size] row numbers on the device.

        A fixed buffer, whose content changes in stream order. None: a slot is its own row.
        """
        return None

    def rows_of(self, layer_id: int, slots: torch.Tensor) -> torch.Tensor:
        """Return the rows of a layer's buffers that ``slots`` (on the device) are kept in."""
        slot_map = self.slot_map(layer_id)
        return slots if slot_map is None else slot_map[slots].to(slots.dtype)

    @abstractmethod
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return all that is kept of a token, [layer_num, size + page_size, ...] each.

        Waits for nobody, unlike ``get_*_buffer``.
        """

    @abstractmethod
    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return K of a layer, [size + page_size, num_heads, head_dim]."""

    @abstractmethod
    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return V of a layer, [size + page_size, num_heads, v_head_dim]."""

    def get_kv_buffer(self, layer_id: int) -> KVBuffers:
        """Return K and V of a layer."""
        return KVBuffers(self.get_key_buffer(layer_id), self.get_value_buffer(layer_id))

    @abstractmethod
    def set_kv_buffer(
        self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write K and V of n tokens to slots ``loc`` [n] (on the device)."""

    @abstractmethod
    def move(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """Copy KV of all layers between slots, int64 of one shape; read all, then write."""

    @abstractmethod
    def get_kv_size_bytes(self) -> KVSizeBytes:
        """Return the bytes that K and V take over all layers."""


class MHATokenToKVPool(KVCache):
    """Multi-head (or grouped-query) KV.

    One allocation each for K and V, [layer_num, size + page_size, head_num, head_dim]; a layer is
    a view of it.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: torch.device | str,
        v_head_dim: int | None = None,
        start_layer: int = 0,
        allocate: Allocate | None = None,
    ) -> None:
        """`allocate` makes the buffers, zeroed; None: as tensors are made."""
        super().__init__(size, page_size, dtype, layer_num, device, start_layer)
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim is None else v_head_dim
        rows = size + page_size
        # Zeros, not empty: what padding reads from the dummy page must be finite.
        zeros = allocate or functools.partial(lazy_zeros, device=self.device)
        self.k_data = zeros((layer_num, rows, head_num, head_dim), dtype)
        self.v_data = zeros((layer_num, rows, head_num, self.v_head_dim), dtype)
        # Views made once: indexing a tensor by layer on every call costs more than a list.
        self.k_buffer = list(self.k_data.unbind(0))
        self.v_buffer = list(self.v_data.unbind(0))

    def _keep_layer(self, layer_idx: int) -> None:
        layer = slice(layer_idx, layer_idx + 1)
        self.k_data, self.v_data = self.k_data[layer], self.v_data[layer]
        self.k_buffer, self.v_buffer = self.k_buffer[layer], self.v_buffer[layer]

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """See ``KVCache``: keys, values."""
        return self.k_data, self.v_data

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """See ``KVCache``."""
        return self.k_buffer[self._loaded_layer(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """See ``KVCache``."""
        return self.v_buffer[self._loaded_layer(layer_id)]

    def set_kv_buffer(
        self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """See ``KVCache``; ``k`` [n, head_num, head_dim] is cast to the pool's dtype."""
        # The rows written are this forward's own: no need to wait for loads of other rows.
        layer_idx = self._local_layer(layer.layer_id)
        self.k_buffer[layer_idx][loc] = k.to(self.dtype)
        self.v_buffer[layer_idx][loc] = v.to(self.dtype)

    def move(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """See ``KVCache``."""
        source, target = from_slots.flatten(), to_slots.flatten()
        for data in (self.k_data, self.v_data):
            data[:, target] = data[:, source]

    def get_kv_size_bytes(self) -> KVSizeBytes:
        """See ``KVCache``."""
        return KVSizeBytes(self.k_data.nbytes, self.v_data.nbytes)


class MLATokenToKVPool(KVCache):
    """Latent KV (multi-head latent attention): one row a token for all heads.

    One allocation, [layer_num, size + page_size, 1, kv_lora_rank + qk_rope_head_dim]: the
    compressed vector, then the rotated key. Keys are whole rows, values their first
    ``kv_lora_rank`` columns, as a view. Every tensor-parallel rank holds the same.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: torch.dtype,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        layer_num: int,
        device: torch.device | str,
        start_layer: int = 0,
        allocate: Allocate | None = None,
    ) -> None:
        """`allocate` makes the buffer, zeroed; None: as tensors are made."""
        super().__init__(size, page_size, dtype, layer_num, device, start_layer)
        self.kv_lora_rank = kv_lora_rank
        self.qk_rope_head_dim = qk_rope_head_dim
        self.kv_cache_dim = kv_lora_rank + qk_rope_head_dim
        # Zeros, not empty: what padding reads from the dummy page must be finite.
        zeros = allocate or functools.partial(lazy_zeros, device=self.device)
        self.kv_data = zeros((layer_num, size + page_size, 1, self.kv_cache_dim), dtype)
        self.kv_buffer = list(self.kv_data.unbind(0))
        self._value_views = [buffer[..., :kv_lora_rank] for buffer in self.kv_buffer]

    def _keep_layer(self, layer_idx: int) -> None:
        layer = slice(layer_idx, layer_idx + 1)
        self.kv_data, self.kv_buffer = self.kv_data[layer], self.kv_buffer[layer]
        self._value_views = self._value_views[layer]

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """See ``KVCache``: the latent rows."""
        return (self.kv_data,)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """See ``KVCache``; [size + page_size, 1, kv_cache_dim]."""
        return self.kv_buffer[self._loaded_layer(layer_id)]

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """See ``KVCache``; [size + page_size, 1, kv_lora_rank], a view of the keys."""
        return self._value_views[self._loaded_layer(layer_id)]

    def set_kv_buffer(
        self, layer: AttentionLayer, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """See ``KVCache``; ``k`` [n, 1, kv_cache_dim] holds ``v``, which is not looked at."""
        self.kv_buffer[self._local_layer(layer.layer_id)][loc] = k.to(self.dtype)

    def set_mla_kv_buffer(
        self,
        layer: AttentionLayer,
        loc: torch.Tensor,
        compressed: torch.Tensor,
        rotated_key: torch.Tensor,
    ) -> None:
        """Write the two parts of n rows, [n, kv_lora_rank] and [n, qk_rope_head_dim]."""
        rows = torch.cat((compressed, rotated_key), dim=-1).to(self.dtype)
        self.kv_buffer[self._local_layer(layer.layer_id)][loc] = rows.unsqueeze(1)

    def move(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """See ``KVCache``."""
        self.kv_data[:, to_slots.flatten()] = self.kv_data[:, from_slots.flatten()]

    def get_kv_size_bytes(self) -> KVSizeBytes:
        """See ``KVCache``; values take no room of their own."""
        return KVSizeBytes(self.kv_data.nbytes, 0)
