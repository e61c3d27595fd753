"""The operations of `layers.step_frame`, one kernel each; two where the largest logits are found.

Requests that only fill up a step share a row of the tables: several programs write the same slot
there, and any of their tokens may stay, since nobody reads it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.step_frame import HEAD, DecodeTables, HostRings
from sglang.srt.layers.triton_ops.argmax import block_maxima, merge_maxima
from sglang.srt.layers.triton_ops.device import launch_early

_BLOCK = 1024
_HEAD = tl.constexpr(HEAD)


@triton.jit(do_not_specialize=["num_places", "stride", "num_values"])
def _receive_kernel(
    inputs: tl.tensor,
    count: tl.tensor,
    received: tl.tensor,
    num_places: tl.tensor,
    stride: tl.tensor,
    num_values: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    counted = tl.load(count)
    row = inputs + counted % num_places * stride
    for start in range(0, num_values, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < num_values
        # The host has written since this was last read: what a cache kept of it does not count.
        tl.store(received + index, tl.load(row + index, mask=inside, volatile=True), mask=inside)
    tl.debug_barrier()  # one thread counts, after all have read the count
    tl.store(count, counted + 1)


@triton.jit(do_not_specialize=["num_places", "stride", "size"])
def _receive_decode_kernel(
    inputs: tl.tensor,
    count: tl.tensor,
    received: tl.tensor,
    last_token_ids: tl.tensor,
    req_to_token: tl.tensor,
    input_ids: tl.tensor,
    positions: tl.tensor,
    num_places: tl.tensor,
    stride: tl.tensor,
    table_stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    counted = tl.load(count)
    row = inputs + counted % num_places * stride
    number = tl.load(row, volatile=True)  # stored last: a store waits for it, and so would the rest
    row += _HEAD
    target = received + _HEAD
    for start in range(0, size, BLOCK):
        index = start + tl.arange(0, BLOCK)
        inside = index < size
        req = tl.load(row + index, mask=inside, other=0, volatile=True)
        length = tl.load(row + size + index, mask=inside, other=1, volatile=True)
        slot = tl.load(row + 2 * size + index, mask=inside, volatile=True)
        tl.store(target + index, req, mask=inside)
        tl.store(target + size + index, length, mask=inside)
        tl.store(target + 2 * size + index, slot, mask=inside)
        tl.store(positions + index, length - 1, mask=inside)
        tl.store(input_ids + index, tl.load(last_token_ids + req, mask=inside), mask=inside)
        cell = req_to_token + req * table_stride + length - 1
        tl.store(cell, slot.to(tl.int32), mask=inside)
    tl.store(received, number)
    tl.debug_barrier()
    tl.store(count, counted + 1)


@triton.jit(do_not_specialize=["num_places", "stride", "num_blocks"])
def _choose_and_report_kernel(
    best: tl.tensor,
    best_index: tl.tensor,
    rows: tl.tensor,
    last_token_ids: tl.tensor,
    received: tl.tensor,
    report: tl.tensor,
    reports: tl.tensor,
    num_places: tl.tensor,
    stride: tl.tensor,
    num_blocks: tl.tensor,
    width: tl.tensor,
    BLOCKS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        tl.extra.cuda.gdc_wait()
    num_reqs = tl.num_programs(0)
    request = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    token_id, is_unusable = merge_maxima(best, best_index, request, num_blocks, width, BLOCKS)
    flag = is_unusable.to(tl.int64)
    tl.store(last_token_ids + tl.load(rows + request), token_id)
    tl.store(report + request, token_id)
    tl.store(report + num_reqs + request, flag)
    number = tl.load(received)
    row = reports + number % num_places * stride
    tl.store(row, number)
    tl.store(row + 1 + request, token_id)
    tl.store(row + 1 + num_reqs + request, flag)


def receive(rings: HostRings, num_values: int) -> None:
    """See `layers.step_frame`."""
    _receive_kernel[(1,)](
        rings.inputs,
        rings.count,
        rings.received,
        len(rings.inputs),
        rings.inputs.stride(0),
        HEAD + num_values,
        BLOCK=_BLOCK,
        num_warps=4,
    )


def receive_decode(rings: HostRings, size: int, tables: DecodeTables) -> None:
    """See `layers.step_frame`."""
    _receive_decode_kernel[(1,)](
        rings.inputs,
        rings.count,
        rings.received,
        tables.last_token_ids,
        tables.req_to_token,
        tables.input_ids,
        tables.positions,
        len(rings.inputs),
        rings.inputs.stride(0),
        tables.req_to_token.stride(0),
        size,
        BLOCK=256,
        num_warps=4,
    )


def choose_and_report(
    rings: HostRings, logits: torch.Tensor, rows: torch.Tensor, last_token_ids: torch.Tensor
) -> torch.Tensor:
    """See `layers.step_frame`."""
    num_reqs = logits.shape[0]
    report = torch.empty((2, num_reqs), dtype=torch.int64, device=logits.device)
    maxima = block_maxima(logits)
    early = launch_early(logits.device, num_reqs)
    _choose_and_report_kernel[(num_reqs,)](
        maxima.values,
        maxima.places,
        rows,
        last_token_ids,
        rings.received,
        report,
        rings.reports,
        len(rings.reports),
        rings.reports.stride(0),
        maxima.num_blocks,
        maxima.width,
        BLOCKS=maxima.padded_blocks,
        EARLY=early,
        num_warps=1,
        **({"launch_pdl": True} if early else {}),
    )
    return report
