"""The reference attention backend: PyTorch's scaled dot product attention, on any device.

Slots and masks are looked up once per batch, in `init_forward_metadata`; a layer then gathers the
keys and values that its queries need. A request without cached prefix attends to its own fresh
keys and gathers nothing. Tree masks (speculative verification) and sliding windows are masks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from sglang.srt.layers.attention.base import AttentionBackend, RunnerFacts, TreeMaskInput
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch


@dataclass(slots=True)
class _RequestRange:
    """One request of an extend batch: tokens [start, start + query_len) of the batch."""

    start: int
    query_len: int
    seq_len: int
    slots: torch.Tensor | None  # int64 [seq_len]; None where there is no prefix
    tree_mask: torch.Tensor | None  # bool [query_len, seq_len]
    positions: torch.Tensor | None  # int64 [query_len], where `tree_mask` is
    # Made at the first layer that needs it, reused by the others: window -> mask.
    masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    mapped: torch.Tensor | None = None  # `slots` by the pool's slot map, made likewise


@dataclass(slots=True)
class _ExtendMetadata:
    requests: list[_RequestRange]


@dataclass(slots=True)
class _DecodeMetadata:
    slots: torch.Tensor  # int64 [batch, longest]; padding points at slot 0
    seq_lens: torch.Tensor  # int64 [batch]
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # [batch, 1, 1, longest]
    mapped: torch.Tensor | None = None  # as in `_RequestRange`


class TorchNativeBackend(AttentionBackend):
    """See the module docstring."""

    def __init__(self, facts: RunnerFacts) -> None:
        self._device = torch.device(facts.device)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_idle():
            forward_batch.attn_metadata = _ExtendMetadata(requests=[])
        elif forward_batch.forward_mode.is_decode():
            forward_batch.attn_metadata = _decode_metadata(forward_batch)
        else:
            forward_batch.attn_metadata = _extend_metadata(forward_batch)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        queries = q.reshape(-1, layer.num_heads, layer.head_dim)
        key_buffer, value_buffer = pool.get_kv_buffer(layer.layer_id)
        metadata = forward_batch.attn_metadata
        slot_map = pool.slot_map(layer.layer_id)
        if isinstance(metadata, _DecodeMetadata):
            rows = _rows(metadata, slot_map)
            assert rows is not None
            out = _decode(queries, key_buffer[rows], value_buffer[rows], layer, metadata)
        else:
            out = _extend(queries, k, v, key_buffer, value_buffer, layer, metadata, slot_map)
        return out.reshape(q.shape[0], layer.num_heads * layer.v_head_dim)


def _rows(
    metadata: _DecodeMetadata | _RequestRange, slot_map: torch.Tensor | None
) -> torch.Tensor | None:
    """Rows of a layer's buffers that hold the keys of `metadata.slots`."""
    if slot_map is None or metadata.slots is None:
        return metadata.slots
    if metadata.mapped is None:
        metadata.mapped = slot_map[metadata.slots].long()
    return metadata.mapped


def _decode_metadata(forward_batch: ForwardBatch) -> _DecodeMetadata:
    longest = max(forward_batch.seq_lens_cpu)
    table = forward_batch.req_to_token_pool.req_to_token
    slots = table[forward_batch.req_pool_indices, :longest].long()
    positions = torch.arange(longest, device=slots.device)
    # Entries behind a request's end are left over from earlier users of the row: point them at
    # the dummy slot, whose content the mask hides.
    slots.masked_fill_(positions >= forward_batch.seq_lens.unsqueeze(1), 0)
    return _DecodeMetadata(slots=slots, seq_lens=forward_batch.seq_lens)


def _extend_metadata(forward_batch: ForwardBatch) -> _ExtendMetadata:
    query_lens, prefix_lens = (
        forward_batch.extend_seq_lens_cpu,
        forward_batch.extend_prefix_lens_cpu,
    )
    if query_lens is None or prefix_lens is None:
        raise ValueError("an extend batch needs extend_seq_lens_cpu and extend_prefix_lens_cpu")
    tree_mask = tree_mask_of(forward_batch)
    requests = []
    start = 0
    for index, (query_len, prefix_len) in enumerate(zip(query_lens, prefix_lens, strict=True)):
        seq_len = prefix_len + query_len
        slots = own_mask = positions = None
        if prefix_len > 0:
            row = forward_batch.req_pool_indices[index]
            slots = forward_batch.req_to_token_pool.req_to_token[row, :seq_len].long()
        if tree_mask is not None:
            own_mask = tree_mask.new_ones((query_len, seq_len))
            own_mask[:, seq_len - tree_mask.shape[2] :] = tree_mask[index]
            positions = forward_batch.positions[start : start + query_len]
        requests.append(_RequestRange(start, query_len, seq_len, slots, own_mask, positions))
        start += query_len
    return _ExtendMetadata(requests=requests)


def tree_mask_of(forward_batch: ForwardBatch) -> torch.Tensor | None:
    """The draft tree's mask of a verify batch; None where attention is causal."""
    if not forward_batch.forward_mode.is_target_verify():
        return None
    spec_info = forward_batch.spec_info
    return spec_info.custom_mask if isinstance(spec_info, TreeMaskInput) else None


def _extend(
    queries: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    layer: RadixAttention,
    metadata: _ExtendMetadata,
    slot_map: torch.Tensor | None,
) -> torch.Tensor:
    out = queries.new_empty(queries.shape[0], layer.num_heads, layer.v_head_dim)
    for request in metadata.requests:
        rows = slice(request.start, request.start + request.query_len)
        if request.slots is None and k is not None and v is not None:
            keys, values = k[rows], v[rows]
        elif (key_rows := _rows(request, slot_map)) is not None:
            keys, values = key_buffer[key_rows], value_buffer[key_rows]
        else:
            raise ValueError("a request without slots needs its keys and values")
        mask = _extend_mask(request, layer.sliding_window, queries.device)
        out[rows] = _attend(queries[rows], keys, values, layer.scaling, mask)
    return out


def _extend_mask(
    request: _RequestRange, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """bool [query_len, seq_len], True = visible; None = plain causal over equal lengths."""
    if window in request.masks:
        return request.masks[window]
    prefix_len = request.seq_len - request.query_len
    mask: torch.Tensor | None = None
    if prefix_len > 0 or window is not None or request.tree_mask is not None:
        query_pos = torch.arange(prefix_len, request.seq_len, device=device).unsqueeze(1)
        key_pos = torch.arange(request.seq_len, device=device)
        mask = request.tree_mask if request.tree_mask is not None else key_pos <= query_pos
        if window is not None:
            # A tree's tokens lie behind each other in memory, not in the sequence.
            if request.positions is not None:
                query_pos = request.positions.unsqueeze(1)
            mask = mask & (query_pos - key_pos < window)
    request.masks[window] = mask
    return mask


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """queries [query_len, H, D], keys and values [seq_len, H_kv, D] -> [query_len, H, D].

    Values may be narrower than keys; the result is as wide as they.
    """
    if keys.shape[1] == 1 and values.shape[2] < keys.shape[2]:
        return _attend_latent(queries, keys, values, scaling, mask)
    out = scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys.to(queries.dtype).transpose(0, 1).unsqueeze(0),
        values.to(queries.dtype).transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)


def _attend_latent(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """`_attend` for one key of all heads, which are rows of one product: no copy a head."""
    num_queries, num_heads, _ = queries.shape
    if mask is None:
        mask = queries.new_ones((num_queries, keys.shape[0]), dtype=torch.bool).tril()
    out = scaled_dot_product_attention(
        queries.reshape(1, num_queries * num_heads, -1),
        keys.to(queries.dtype).transpose(0, 1),
        values.to(queries.dtype).transpose(0, 1),
        attn_mask=mask.repeat_interleave(num_heads, dim=0),
        scale=scaling,
    )
    return out.view(num_queries, num_heads, -1)


def _decode(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    layer: RadixAttention,
    metadata: _DecodeMetadata,
) -> torch.Tensor:
    """queries [batch, H, D], keys and values [batch, longest, H_kv, ...] -> like queries.

    As wide as a value.
    """
    window = layer.sliding_window
    if window not in metadata.masks:
        positions = torch.arange(metadata.slots.shape[1], device=queries.device)
        lengths = metadata.seq_lens.unsqueeze(1)
        visible = positions < lengths
        if window is not None:
            visible &= positions >= lengths - window
        metadata.masks[window] = visible[:, None, None, :]
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    if layer.v_head_dim < layer.head_dim and layer.num_kv_heads == 1:
        # Heads are the rows of one product, as in `_attend_latent`.
        shared = scaled_dot_product_attention(
            queries.unsqueeze(1),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=metadata.masks[window],
            scale=layer.scaling,
        )
        return shared.squeeze(1)
    out = scaled_dot_product_attention(
        queries.unsqueeze(2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        attn_mask=metadata.masks[window],
        scale=layer.scaling,
        enable_gqa=layer.num_heads != layer.num_kv_heads,
    )
    return out.squeeze(2)
