"""Shard arithmetic of every parallel layer, for several ranks within one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sglang.srt.distributed import parallel_state
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.moe import FusedExperts
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.layers.weight_slot import WeightOwner, WeightSlot, iterate_weight_slots


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Pretend to be one rank of a group; only layers' constructors are run, no collective."""

    def become(rank: int, size: int) -> None:
        group = parallel_state.TPGroup(size=size, rank=rank)
        monkeypatch.setattr(parallel_state, "_tp_group", group)

    return become


def filled_on_each_rank(
    make: Callable[[], WeightOwner],
    full: dict[str, torch.Tensor],
    size: int,
    as_rank: Callable[[int, int], None],
) -> list[WeightOwner]:
    """One layer a rank, loaded from `full`, whose names are those of a layer called a.proj."""
    layers = []
    for rank in range(size):
        as_rank(rank, size)
        layer = make()
        slots = layer.weight_slots("a.proj")
        assert slots.keys() == full.keys()
        for name, slot in slots.items():
            slot.write(full[name])
        layers.append(layer)
    return layers


def test_column_parallel_rows(as_rank: Callable[[int, int], None]) -> None:
    full = {"a.proj.weight": torch.randn(6, 5), "a.proj.bias": torch.randn(6)}
    layers = filled_on_each_rank(lambda: ColumnParallelLinear(5, 6, bias=True), full, 3, as_rank)
    x = torch.randn(4, 5)
    got = torch.cat([layer(x) for layer in layers], dim=1)
    torch.testing.assert_close(got, x @ full["a.proj.weight"].T + full["a.proj.bias"])


def test_row_parallel_partial_sums(as_rank: Callable[[int, int], None]) -> None:
    full = {"a.proj.weight": torch.randn(4, 6), "a.proj.bias": torch.randn(4)}
    layers = filled_on_each_rank(
        lambda: RowParallelLinear(6, 4, bias=True, reduce=False), full, 3, as_rank
    )
    x = torch.randn(2, 6)
    got = sum(layer(part) for layer, part in zip(layers, x.split(2, dim=1)))
    torch.testing.assert_close(got, x @ full["a.proj.weight"].T + full["a.proj.bias"])


def test_merged_columns_keep_each_part_together(as_rank: Callable[[int, int], None]) -> None:
    full = {"a.gate_proj.weight": torch.randn(4, 5), "a.up_proj.weight": torch.randn(8, 5)}
    layers = filled_on_each_rank(
        lambda: MergedColumnParallelLinear(5, {"gate_proj": 4, "up_proj": 8}), full, 2, as_rank
    )
    for rank, layer in enumerate(layers):
        gate = full["a.gate_proj.weight"][2 * rank : 2 * rank + 2]
        up = full["a.up_proj.weight"][4 * rank : 4 * rank + 4]
        assert torch.equal(layer.get_parameter("weight"), torch.cat((gate, up)))


@pytest.mark.parametrize(("size", "kv_head_of_rank"), [(1, [0]), (2, [0, 1]), (4, [0, 0, 1, 1])])
def test_qkv_heads(
    as_rank: Callable[[int, int], None], size: int, kv_head_of_rank: list[int]
) -> None:
    names = ("q_proj", "k_proj", "v_proj")
    full = {f"a.{n}.weight": torch.randn(r * 3, 5) for n, r in zip(names, (8, 2, 2))}
    layers = filled_on_each_rank(lambda: QKVParallelLinear(5, 3, 8, 2), full, size, as_rank)
    for rank, layer in enumerate(layers):
        num_heads, num_kv_heads = 8 // size, max(1, 2 // size)
        assert isinstance(layer, QKVParallelLinear)
        assert (layer.num_heads, layer.num_kv_heads) == (num_heads, num_kv_heads)
        first = kv_head_of_rank[rank] * 3
        expected = [
            full["a.q_proj.weight"][rank * num_heads * 3 : (rank + 1) * num_heads * 3],
            full["a.k_proj.weight"][first : first + num_kv_heads * 3],
            full["a.v_proj.weight"][first : first + num_kv_heads * 3],
        ]
        assert torch.equal(layer.weight, torch.cat(expected))


def test_vocabulary_padding_stays_zero(as_rank: Callable[[int, int], None]) -> None:
    full = {"a.proj.weight": torch.randn(5, 3)}
    layers = filled_on_each_rank(lambda: VocabParallelEmbedding(5, 3), full, 4, as_rank)
    rows = torch.cat([layer.get_parameter("weight") for layer in layers])
    assert torch.equal(rows[:5], full["a.proj.weight"])
    assert rows.shape == (8, 3) and not rows[5:].any()


def test_experts_are_split_inside(as_rank: Callable[[int, int], None]) -> None:
    full = {}
    for expert in range(3):
        full[f"a.proj.{expert}.gate_proj.weight"] = torch.randn(4, 5)
        full[f"a.proj.{expert}.up_proj.weight"] = torch.randn(4, 5)
        full[f"a.proj.{expert}.down_proj.weight"] = torch.randn(5, 4)
    layers = filled_on_each_rank(lambda: FusedExperts(3, 5, 4, "silu"), full, 2, as_rank)
    x = torch.randn(6, 5)
    ids = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [0, 2], [2, 0]])
    weights = torch.rand(6, 2)
    expected = torch.zeros(6, 5)
    for token in range(6):
        for expert, weight in zip(ids[token].tolist(), weights[token]):
            gate, up, down = (
                full[f"a.proj.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            hidden = nn.functional.silu(x[token] @ gate.T) * (x[token] @ up.T)
            expected[token] += weight * (hidden @ down.T)
    as_rank(0, 1)  # the partial results are added here instead of by a collective
    torch.testing.assert_close(sum(layer(x, ids, weights) for layer in layers), expected)


def test_replicated_layer_takes_everything() -> None:
    layer = ReplicatedLinear(3, 2, bias=True)
    names = [name for name, _ in iterate_weight_slots(nn.ModuleDict({"gate": layer}))]
    assert names == ["gate.weight", "gate.bias"]


def test_wrong_shape_is_refused_with_both_shapes() -> None:
    slot = WeightSlot(target=torch.zeros(2, 3), full_shape=(4, 3), shard_dim=0)
    with pytest.raises(ValueError, match=r"\(4, 3\), got \(2, 3\)"):
        slot.write(torch.zeros(2, 3))


@pytest.mark.parametrize(
    "make",
    [
        lambda: ColumnParallelLinear(4, 7),
        lambda: RowParallelLinear(7, 4),
        lambda: QKVParallelLinear(4, 2, 7, 7),
        lambda: QKVParallelLinear(4, 2, 8, 5),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    as_rank: Callable[[int, int], None], make: Callable[[], WeightOwner]
) -> None:
    as_rank(0, 8)
    with pytest.raises(ValueError, match="cannot be split over"):
        make()
