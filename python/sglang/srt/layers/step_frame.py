"""What stands around the model in a captured step: the inputs, the choice of tokens, the report.

A captured step reads its inputs from a ring of places in page-locked host memory and leaves its
report in another (`model_executor/host_exchange.py`). A step of a small model is little more than
launches, so each of these operations is one kernel on CUDA (`triton_ops/step_frame.py`), two where
the largest logits are found; the functions of the same names here are their reference, for any
device. Nothing is read back.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch

# In front of the inputs stands the number of the step; two values, so that what follows is aligned
# as kernels like it.
HEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRings:
    """Where steps meet the host. p places; a step uses the one that is `count` modulo p."""

    inputs: torch.Tensor  # int64 [p, HEAD + n], page-locked
    reports: torch.Tensor  # int64 [p, 1 + 2 * m], page-locked: number, token ids, flags
    count: torch.Tensor  # int64 [1] on the device: steps so far
    received: torch.Tensor  # int64 [HEAD + n] on the device: inputs of the step that runs


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTables:
    """What a decode step finds by row of the request table, and where it puts what follows."""

    last_token_ids: torch.Tensor  # int64 [rows]
    req_to_token: torch.Tensor  # int32 [rows, columns]
    input_ids: torch.Tensor  # int64 [b or more]
    positions: torch.Tensor  # int64 [b or more]


def receive(rings: HostRings, num_values: int) -> None:
    """Bring the number and so many inputs of the step to `received`, and count it."""
    kernels = _kernels_of(rings.count)
    if kernels is not None:
        kernels.receive(rings, num_values)
        return
    place = int(rings.count) % len(rings.inputs)
    rings.received[: HEAD + num_values] = rings.inputs[place, : HEAD + num_values]
    rings.count.add_(1)


def receive_decode(rings: HostRings, size: int, tables: DecodeTables) -> None:
    """`receive` for `size` requests, int64 [3, size]: rows, lengths with the new token, slots.

    Also their tokens and positions, and the slots into the request table.
    """
    kernels = _kernels_of(rings.count)
    if kernels is not None:
        kernels.receive_decode(rings, size, tables)
        return
    receive(rings, 3 * size)
    rows, lens, slots = rings.received[HEAD : HEAD + 3 * size].view(3, size)
    positions = tables.positions[:size]
    torch.sub(lens, 1, out=positions)
    torch.index_select(tables.last_token_ids, 0, rows, out=tables.input_ids[:size])
    tables.req_to_token[rows, positions] = slots.to(torch.int32)


def choose_and_report(
    rings: HostRings, logits: torch.Tensor, rows: torch.Tensor, last_token_ids: torch.Tensor
) -> torch.Tensor:
    """The largest entry of each row of logits [b, V]: noted for the requests, and reported.

    `rows` int64 [b], of `last_token_ids`. Returns int64 [2, b]: places of the largest; 1 where the
    row has NaN or +inf. The same, behind the step's number, is on the host once an event recorded
    after the call has passed.
    """
    kernels = _kernels_of(rings.count)
    if kernels is not None:
        report: torch.Tensor = kernels.choose_and_report(rings, logits, rows, last_token_ids)
        return report
    # A comparison with NaN is false.
    is_unusable = ~(logits < torch.inf).all(-1)
    report = torch.stack((logits.argmax(-1), is_unusable.long()))
    last_token_ids.index_copy_(0, rows, report[0])
    number = rings.received[:1]
    place = rings.reports[int(number) % len(rings.reports)]
    place[:1], place[1 : 1 + report.numel()] = number, report.view(-1)
    return report


def _kernels_of(tensor: torch.Tensor) -> Any:
    """The module of the kernels; None where these functions are used."""
    return _cuda_kernels() if tensor.device.type == "cuda" else None


@functools.cache
def _cuda_kernels() -> Any:
    return importlib.import_module("sglang.srt.layers.triton_ops.step_frame")
