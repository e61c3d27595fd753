"""Linear layers, whole or split over the tensor-parallel ranks.

A weight is one row-major [out, in] parameter per layer; fused layers stack their parts along the
rows. Which code multiplies is chosen when a layer is created (`layers.dispatch`).
Column-parallel layers split rows and leave the result split; row-parallel ones split columns and
sum the partial results over ranks (a collective).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from sglang.srt.distributed.communication import tensor_model_parallel_all_reduce
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.dispatch import default_ops
from sglang.srt.layers.weight_slot import WeightOwner, WeightSlot, new_parameter, sibling_name


def split_evenly(size: int, num_ranks: int, what: str) -> int:
    """`size / num_ranks`; raises ValueError, naming `what`, where it is no integer."""
    if size % num_ranks:
        raise ValueError(f"{what} of size {size} cannot be split over {num_ranks} ranks")
    return size // num_ranks


class _Linear(WeightOwner):
    """Weight [out, in] and optional bias [out] of this rank."""

    bias: nn.Parameter | None

    def __init__(self, num_rows: int, num_columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = new_parameter(num_rows, num_columns)
        self.bias = new_parameter(num_rows) if bias else None
        self._ops = default_ops()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, in of this rank] -> [n, out of this rank]."""
        return self._ops.linear(x, self.weight, self.bias)


class ReplicatedLinear(_Linear):
    """The whole product on every rank."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(output_size, input_size, bias)

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        slots = {
            f"{name}.weight": WeightSlot(
                target=self.weight.data, full_shape=tuple(self.weight.shape)
            )
        }
        if self.bias is not None:
            slots[f"{name}.bias"] = WeightSlot(
                target=self.bias.data, full_shape=tuple(self.bias.shape)
            )
        return slots


class _RowBlocks(_Linear):
    """Stacked row blocks, each a checkpoint tensor of its own, each split over ranks by rows.

    A block is (checkpoint name of the part, rows of the whole model, rows of this rank, first
    row of this rank).
    """

    def __init__(
        self, input_size: int, blocks: Sequence[tuple[str, int, int, int]], bias: bool
    ) -> None:
        super().__init__(sum(rows for _, _, rows, _ in blocks), input_size, bias)
        self._blocks = tuple(blocks)
        self.output_sizes = tuple(rows for _, _, rows, _ in blocks)

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        slots: dict[str, WeightSlot] = {}
        offset = 0
        for part, full_rows, rows, first_row in self._blocks:
            part_name = sibling_name(name, part) if part else name
            for suffix, parameter in (("weight", self.weight), ("bias", self.bias)):
                if parameter is None:
                    continue
                slots[f"{part_name}.{suffix}"] = WeightSlot(
                    target=parameter.data.narrow(0, offset, rows),
                    full_shape=(full_rows, *parameter.shape[1:]),
                    shard_dim=0,
                    shard_start=first_row,
                )
            offset += rows
        return slots


class ColumnParallelLinear(_RowBlocks):
    """Output features split over ranks; result [n, output_size / ranks]."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        group = get_tp_group()
        rows = split_evenly(output_size, group.size, "output")
        super().__init__(input_size, [("", output_size, rows, group.rank * rows)], bias)


class MergedColumnParallelLinear(_RowBlocks):
    """Several column-parallel products of one input, e.g. gate and up.

    `parts` maps each checkpoint name to its output size. Result [n, sum of sizes / ranks].
    """

    def __init__(self, input_size: int, parts: Mapping[str, int], bias: bool = False) -> None:
        group = get_tp_group()
        blocks = []
        for part, size in parts.items():
            rows = split_evenly(size, group.size, part)
            blocks.append((part, size, rows, group.rank * rows))
        super().__init__(input_size, blocks, bias)


class QKVParallelLinear(_RowBlocks):
    """q, k and v of one input, split over ranks by heads.

    With more ranks than KV heads each KV head is held by several ranks. Result
    [n, (num_heads + 2 * num_kv_heads) * head_dim], numbers of this rank, in the order q, k, v.
    """

    def __init__(
        self,
        input_size: int,
        head_dim: int,
        total_num_heads: int,
        total_num_kv_heads: int,
        bias: bool = False,
        query_width: int | None = None,
    ) -> None:
        """`query_width`: rows of `q_proj` a head where they are not `head_dim` (a gate beside)."""
        group = get_tp_group()
        self_heads = split_evenly(total_num_heads, group.size, "query heads")
        if total_num_kv_heads >= group.size:
            kv_heads = split_evenly(total_num_kv_heads, group.size, "KV heads")
            first_kv_head = group.rank * kv_heads
        else:
            num_copies = split_evenly(group.size, total_num_kv_heads, "ranks per KV head")
            kv_heads, first_kv_head = 1, group.rank // num_copies
        query_width = head_dim if query_width is None else query_width
        q_rows, kv_rows = self_heads * query_width, kv_heads * head_dim
        q_total, kv_total = total_num_heads * query_width, total_num_kv_heads * head_dim
        first_kv_row = first_kv_head * head_dim
        super().__init__(
            input_size,
            [
                ("q_proj", q_total, q_rows, group.rank * q_rows),
                ("k_proj", kv_total, kv_rows, first_kv_row),
                ("v_proj", kv_total, kv_rows, first_kv_row),
            ],
            bias,
        )
        self.num_heads = self_heads
        self.num_kv_heads = kv_heads


class RowParallelLinear(_Linear):
    """Input features split over ranks, partial results summed: result [n, output_size].

    Collective with more than one rank. `reduce=False` leaves the partial sum to the caller.
    """

    def __init__(
        self, input_size: int, output_size: int, bias: bool = False, reduce: bool = True
    ) -> None:
        group = get_tp_group()
        columns = split_evenly(input_size, group.size, "input")
        super().__init__(output_size, columns, bias)
        self._input_size = input_size
        self._first_column = group.rank * columns
        self._reduce = reduce and group.device_group is not None
        # The bias belongs to the sum, so exactly one rank adds it.
        self._adds_bias = bias and group.rank == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [n, input_size / ranks] -> [n, output_size]."""
        out = self._ops.linear(x, self.weight, self.bias if self._adds_bias else None)
        return tensor_model_parallel_all_reduce(out) if self._reduce else out

    def weight_slots(self, name: str) -> Mapping[str, WeightSlot]:
        slots = {
            f"{name}.weight": WeightSlot(
                target=self.weight.data,
                full_shape=(self.weight.shape[0], self._input_size),
                shard_dim=1,
                shard_start=self._first_column,
            )
        }
        if self.bias is not None:
            slots[f"{name}.bias"] = WeightSlot(
                target=self.bias.data, full_shape=tuple(self.bias.shape)
            )
        return slots
