"""Device memory of recurrent states (linear attention): one slot holds all layers' state.

Owns the buffers. Does not own slot numbers: snapshots are handed out by an allocator of single
slots (``state_snapshots.py``); a request's own slot follows from its row of the request table, so
that it is taken and given back with the row. Buffers are written by the forward pass and by copies
from the host.

    slot  0                    the state before the first token: zeros, never written
          1 .. size            snapshots, each the state after exactly so many tokens
          size + 1 + row       the state of the request in that row (the padding row has one, too)
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.memory_pool import Allocate, LayerTransferCounter, lazy_zeros


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """One layer's state on one rank.

    ``conv_dim`` channels remember their last ``conv_len`` inputs; ``num_heads`` heads keep a
    matrix [key_dim, value_dim] each.
    """

    conv_dim: int
    conv_len: int
    num_heads: int
    key_dim: int
    value_dim: int
    conv_dtype: torch.dtype
    temporal_dtype: torch.dtype = torch.float32

    @property
    def bytes_per_layer(self) -> int:
        """Bytes that one slot takes in one layer."""
        conv = self.conv_dim * self.conv_len * self.conv_dtype.itemsize
        heads = self.num_heads * self.key_dim * self.value_dim
        return conv + heads * self.temporal_dtype.itemsize


class MambaPool:
    """Convolution and recurrent states of all linear-attention layers.

    ``conv_data``: [layer_num, num_slots, conv_len, conv_dim], inputs in order of time;
    ``temporal_data``: [layer_num, num_slots, num_heads, key_dim, value_dim]. Layers are numbered
    from 0 among the linear-attention layers. ``size``: snapshot slots, numbered from 1.
    """

    def __init__(
        self,
        size: int,
        num_rows: int,
        shape: StateShape,
        layer_num: int,
        device: torch.device | str,
        allocate: Allocate | None = None,
    ) -> None:
        """`num_rows`: of the request table, its padding row included.

        `allocate` makes the buffers, zeroed; None: as tensors are made.
        """
        self.size = size
        self.num_rows = num_rows
        self.shape = shape
        self.layer_num = layer_num
        self.device = torch.device(device)
        self.num_slots = 1 + size + num_rows
        self.layer_transfer_counter: LayerTransferCounter | None = None
        zeros = allocate or functools.partial(lazy_zeros, device=self.device)
        self.conv_data = zeros(
            (layer_num, self.num_slots, shape.conv_len, shape.conv_dim), shape.conv_dtype
        )
        self.temporal_data = zeros(
            (layer_num, self.num_slots, shape.num_heads, shape.key_dim, shape.value_dim),
            shape.temporal_dtype,
        )
        self._conv = list(self.conv_data.unbind(0))
        self._temporal = list(self.temporal_data.unbind(0))

    @property
    def first_working_slot(self) -> int:
        """Slot of row 0 of the request table; row r has this plus r, on whatever device."""
        return 1 + self.size

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers."""
        return self.layer_num * self.shape.bytes_per_layer

    def register_layer_transfer_counter(self, counter: LayerTransferCounter | None) -> None:
        """Set whom ``conv_state`` and ``temporal_state`` wait for; None to wait for nobody."""
        self.layer_transfer_counter = counter

    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Return all that is kept in a slot, [layer_num, num_slots, ...] each; waits for nobody."""
        return self.conv_data, self.temporal_data

    def conv_state(self, layer_idx: int) -> torch.Tensor:
        """Return a layer's last inputs, [num_slots, conv_len, conv_dim]."""
        self._wait(layer_idx)
        return self._conv[layer_idx]

    def temporal_state(self, layer_idx: int) -> torch.Tensor:
        """Return a layer's matrices, [num_slots, num_heads, key_dim, value_dim]."""
        self._wait(layer_idx)
        return self._temporal[layer_idx]

    def _wait(self, layer_idx: int) -> None:
        if self.layer_transfer_counter is not None:
            self.layer_transfer_counter.wait_until(layer_idx)

    def copy(self, from_slots: torch.Tensor, to_slots: torch.Tensor) -> None:
        """Copy states of all layers between slots, int64 [n] each; read all, then write."""
        source, target = from_slots.to(self.device), to_slots.to(self.device)
        for data in self.buffers():
            data[:, target] = data[:, source]

    def clear(self) -> None:
        """Zero every slot."""
        for data in self.buffers():
            data.zero_()

    def get_state_size_bytes(self) -> int:
        """Return the bytes that all slots take."""
        return sum(data.nbytes for data in self.buffers())
