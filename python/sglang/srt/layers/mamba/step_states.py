"""Which state slots one forward pass reads and writes, as the layers' operations need them.

Made once per forward pass, before the first layer, from the batch and its `StatePlan`; read by all
layers. The host part is numpy; the device gets it in one copy.

A convolution of a prefill step runs over *rows*: of each request first the inputs that it remembers
(`conv_len` of them), then its new tokens. So every new token finds its predecessors right before
it, and what is to be remembered at any position are the `conv_len` rows up to there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.layers.attention.torch_native import tree_mask_of
from sglang.srt.mem_cache.hybrid_kv_pool import HybridLinearKVPool
from sglang.srt.mem_cache.mamba_pool import MambaPool
from sglang.srt.mem_cache.state_snapshots import INITIAL_STATE, OWN_STATE, StatePlan
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.platforms import current_platform

# Tokens that the scan takes at a time, by device: on a GPU as many as its registers have room for.
_CHUNK_SIZES = {"cpu": 32, "cuda": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanChunk:
    """Tokens [begin, end) of the batch; the state after them also goes to `slot` unless it is 0."""

    begin: int
    end: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStates:
    """A prefill step of b requests with n new tokens and m snapshots; int64 on the device."""

    sources: torch.Tensor  # [b] slots that the requests begin with
    num_conv_rows: int  # n + b * conv_len
    token_rows: torch.Tensor  # [n]
    history_rows: torch.Tensor  # [b * conv_len]
    last_rows: torch.Tensor  # [b * conv_len] what is remembered in the end
    snapshot_rows: torch.Tensor  # [m * conv_len]
    snapshot_slots: torch.Tensor  # [m]
    chunks: list[list[ScanChunk]]  # of each request, on the host
    chunk_table: torch.Tensor  # [3, number of chunks]: begin, end, slot
    chunk_starts: torch.Tensor  # [b + 1] first chunk of each request; their number


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStates:
    """A verification of `num_nodes` drafted tokens a request, which leaves all states as they are.

    `parents` int64 [b, num_nodes]: node before each node; that of node 0 has no meaning.
    """

    num_nodes: int
    parents: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStates:
    """`slots` [b]: each request's own. Without `prefill` and `tree`: a decode step.

    `layer_index`: the model's layer -> the pool's.
    """

    pool: MambaPool
    layer_index: Mapping[int, int]
    slots: torch.Tensor
    prefill: PrefillStates | None
    tree: TreeStates | None


def chunk_size(device: torch.device) -> int:
    """Most tokens of a `ScanChunk`."""
    return _CHUNK_SIZES[device.type]


def make_step_states(batch: ForwardBatch) -> StepStates:
    """The states of one batch. Raises ValueError where its pool holds none.

    Those of decode steps and verifications follow from device tensors alone: they can be captured.
    """
    kv_pool = batch.token_to_kv_pool
    if not isinstance(kv_pool, HybridLinearKVPool):
        raise ValueError(f"linear attention needs recurrent states, not {type(kv_pool).__name__}")
    pool = kv_pool.mamba_pool
    slots = batch.req_pool_indices + pool.first_working_slot
    prefill = tree = None
    if batch.forward_mode.is_target_verify():
        tree = _tree_states(batch)
    elif batch.forward_mode.is_extend():
        prefill = _prefill_states(batch, slots, pool.shape.conv_len)
    return StepStates(
        pool=pool, layer_index=kv_pool.linear_layer_index, slots=slots, prefill=prefill, tree=tree
    )


def _tree_states(batch: ForwardBatch) -> TreeStates:
    num_nodes = batch.input_ids.shape[0] // max(batch.batch_size, 1)
    mask = tree_mask_of(batch)
    nodes = torch.arange(num_nodes, device=batch.input_ids.device)
    if mask is None:
        parents = (nodes - 1).clamp(min=0).expand(batch.batch_size, num_nodes)
    else:
        # Parents precede their children, so the last of the other nodes on the path is the parent.
        parents = (mask.tril(-1) * nodes).amax(-1)
    return TreeStates(num_nodes=num_nodes, parents=parents)


def keep_states(batch: ForwardBatch, plan: StatePlan) -> None:
    """Copy the states that a decode step has left to the snapshots of its plan."""
    kv_pool = batch.token_to_kv_pool
    if not isinstance(kv_pool, HybridLinearKVPool):
        raise ValueError("a plan for recurrent states, and a pool without")
    indices, slots = _to_device(
        [
            np.array([snapshot.index for snapshot in plan.snapshots]),
            np.array([snapshot.slot for snapshot in plan.snapshots]),
        ]
    )
    own = batch.req_pool_indices[indices] + kv_pool.mamba_pool.first_working_slot
    kv_pool.mamba_pool.copy(own, slots)


def _prefill_states(batch: ForwardBatch, slots: torch.Tensor, conv_len: int) -> PrefillStates:
    lens, prefixes = batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    if lens is None or prefixes is None:
        raise ValueError("an extend batch needs extend_seq_lens_cpu and extend_prefix_lens_cpu")
    plan = batch.state_plan or StatePlan(
        sources=[OWN_STATE if prefix else INITIAL_STATE for prefix in prefixes]
    )
    starts = np.concatenate(([0], np.cumsum(lens)))  # of each request's tokens in the batch
    owner = np.repeat(np.arange(len(lens)), lens)
    # Row of the first remembered input of each request.
    first_rows = starts[:-1] + np.arange(len(lens)) * conv_len
    cuts = [(s.index, s.position - prefixes[s.index], s.slot) for s in plan.snapshots]
    step = chunk_size(slots.device)
    chunks = [
        _cut(int(starts[i]), length, step, [cut[1:] for cut in cuts if cut[0] == i])
        for i, length in enumerate(lens)
    ]
    table = [(c.begin, c.end, c.slot) for of_request in chunks for c in of_request]
    arrays = [
        np.array(plan.sources, dtype=np.int64),
        np.arange(len(owner)) + (owner + 1) * conv_len,
        _runs(first_rows, conv_len),
        _runs(first_rows + np.array(lens), conv_len),
        _runs(np.array([first_rows[i] + taken for i, taken, _ in cuts]), conv_len),
        np.array([slot for _, _, slot in cuts], dtype=np.int64),
        np.array(table, dtype=np.int64).reshape(-1, 3).T.reshape(-1),
        np.cumsum([0, *(len(of_request) for of_request in chunks)]),
    ]
    sources, token_rows, history, last, snap_rows, snap_slots, packed, chunk_starts = _to_device(
        arrays
    )
    return PrefillStates(
        sources=torch.where(sources == OWN_STATE, slots, sources),
        num_conv_rows=len(owner) + len(lens) * conv_len,
        token_rows=token_rows,
        history_rows=history,
        last_rows=last,
        snapshot_rows=snap_rows,
        snapshot_slots=snap_slots,
        chunks=chunks,
        chunk_table=packed.view(3, -1),
        chunk_starts=chunk_starts,
    )


def _cut(start: int, length: int, step: int, cuts: Sequence[tuple[int, int]]) -> list[ScanChunk]:
    """A request's tokens in chunks of `step` at most, of which one ends wherever a snapshot is.

    `cuts`: (tokens before it, slot) of each snapshot. Before the first token a chunk is empty.
    """
    chunks = [ScanChunk(begin=start, end=start, slot=slot) for end, slot in cuts if end == 0]
    done = 0
    for end, slot in [*sorted(cuts), (length, INITIAL_STATE)]:
        while done < end:
            upto = min(done + step, end)
            of_chunk = slot if upto == end else INITIAL_STATE
            chunks.append(ScanChunk(begin=start + done, end=start + upto, slot=of_chunk))
            done = upto
    return chunks


def _runs(first: np.ndarray, length: int) -> np.ndarray:
    """`length` numbers from each of `first` on."""
    return (first.astype(np.int64).reshape(-1, 1) + np.arange(length)).reshape(-1)


def _to_device(arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
    packed = torch.from_numpy(np.concatenate(arrays).astype(np.int64))
    return current_platform().to_device_async(packed).split([len(part) for part in arrays])
