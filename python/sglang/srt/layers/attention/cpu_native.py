"""The `torch_native` backend on the CPU: own kernels where they apply, the reference elsewhere.

The kernels read the pool through the request table and gather nothing. What they cannot do (tree
masks, other dtypes) stays with the reference class, decided once per batch or at creation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang.srt.layers.attention.base import AttentionBackend, RunnerFacts
from sglang.srt.layers.attention.torch_native import TorchNativeBackend, tree_mask_of
from sglang.srt.layers.cpu import ops
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def create_torch_native(facts: RunnerFacts) -> AttentionBackend:
    """The fastest implementation with the reference's meaning for this device and dtype."""
    is_cpu = torch.device(facts.device).type == "cpu"
    # The kernels want values as wide as keys.
    is_plain = facts.v_head_dim is None
    if is_cpu and is_plain and facts.dtype == torch.float32 and ops.available():
        return CpuKernelBackend(facts)
    return TorchNativeBackend(facts)


class _Table(NamedTuple):
    """Where the kernels find the row of a position: int32 [lines, positions], int64 [batch]."""

    cells: torch.Tensor
    lines: torch.Tensor


@dataclass(slots=True)
class _KernelMetadata:
    is_decode: bool
    # Rows by the pool's slot map, made at the first layer that needs them.
    mapped: _Table | None = None

    def table(self, layer: RadixAttention, forward_batch: ForwardBatch) -> _Table:
        """The request table, or what it is by the layer's slot map."""
        requests = forward_batch.req_pool_indices
        cells = forward_batch.req_to_token_pool.req_to_token
        slot_map = forward_batch.token_to_kv_pool.slot_map(layer.layer_id)
        if slot_map is None:
            return _Table(cells, requests)
        if self.mapped is None:
            longest = max(forward_batch.seq_lens_cpu)
            mapped = slot_map[cells[requests, :longest].long()]
            self.mapped = _Table(mapped, torch.arange(len(requests)))
        return self.mapped


class CpuKernelBackend(TorchNativeBackend):
    """Float32 attention through `layers.cpu.ops`."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        mode = forward_batch.forward_mode
        if mode.is_idle() or tree_mask_of(forward_batch) is not None:
            super().init_forward_metadata(forward_batch)
        else:
            forward_batch.attn_metadata = _KernelMetadata(is_decode=mode.is_decode())

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        metadata = forward_batch.attn_metadata
        if not isinstance(metadata, _KernelMetadata):
            return super().forward(q, k, v, layer, forward_batch, save_kv_cache)
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        queries = q.view(-1, layer.num_heads, layer.head_dim)
        attend = _decode if metadata.is_decode else _extend
        table = metadata.table(layer, forward_batch)
        return attend(queries, layer, forward_batch, table).view(q.shape[0], -1)


def _decode(
    queries: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch, table: _Table
) -> torch.Tensor:
    key_buffer, value_buffer = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    return ops.decode_attention(
        queries,
        key_buffer,
        value_buffer,
        table.cells,
        table.lines,
        forward_batch.seq_lens,
        layer.scaling,
        window=layer.sliding_window or 0,
    )


def _extend(
    queries: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch, table: _Table
) -> torch.Tensor:
    if forward_batch.extend_prefix_lens is None or forward_batch.extend_seq_lens is None:
        raise ValueError("an extend batch needs extend_prefix_lens and extend_seq_lens")
    key_buffer, value_buffer = forward_batch.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    return ops.extend_attention(
        queries,
        key_buffer,
        value_buffer,
        table.cells,
        table.lines,
        forward_batch.extend_prefix_lens,
        forward_batch.extend_seq_lens,
        layer.scaling,
        window=layer.sliding_window or 0,
    )
