"""The `triton` backend against the reference in float32.

Without a GPU the kernels run in Triton's interpreter, on tiny shapes, and are compiled for Hopper
once; with one (mark `cuda`) they run there on real shapes too.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt.layers.attention.base import AttentionBackend, RunnerFacts
from sglang.srt.layers.attention.registry import create_attention_backend
from sglang.srt.layers.attention.triton_ops import paged_attention as launcher
from sglang.srt.layers.attention.triton_ops.dense_prefill import make_plan
from sglang.srt.layers.dispatch import TorchOps
from sglang.srt.layers.radix_attention import RadixAttention, Rotation
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
LAYER_ID = 1
EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
VERIFY, DRAFT = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND

# Relative error of the whole output, by the coarsest type on the way.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
    # The reference rounds keys and values to it as well; what is left is bfloat16.
    torch.float8_e4m3fn: 1e-2,
    torch.float8_e5m2: 1e-2,
}


@dataclass
class TreeInput:
    """The part of a verify input that attention reads."""

    custom_mask: torch.Tensor | None


@dataclass(frozen=True)
class Shape:
    """Sizes of a case."""

    prefix_lens: list[int]
    new_lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    tree: bool = False
    mapped: bool = False  # the pool keeps slots in rows of other numbers, windows' only
    behind: int = 0  # keys of earlier draft steps that the mask covers beside the new tokens
    mode: ForwardMode = EXTEND
    seq_lens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        total = [p + n for p, n in zip(self.prefix_lens, self.new_lens)]
        object.__setattr__(self, "seq_lens", total)

    @property
    def tolerance(self) -> float:
        return max(TOLERANCE[self.dtype], TOLERANCE[self.kv_dtype or self.dtype])


class MappedPool(MHATokenToKVPool):
    """A pool whose rows are numbered by a map. ``full_to_swa`` int32 [size + 1]."""

    full_to_swa: torch.Tensor

    def slot_map(self, layer_id: int) -> torch.Tensor | None:
        return self.full_to_swa

    def set_kv_buffer(
        self, layer: Any, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        super().set_kv_buffer(layer, self.rows_of(layer.layer_id, loc), k, v)


class Case:
    """A batch whose keys and values lie at random slots of a pool full of NaN."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.shape = shape
        num_slots = sum(shape.seq_lens) + 8
        slots = list(range(1, num_slots))
        rng.shuffle(slots)
        num_rows = len(shape.seq_lens) + 2
        self.rows = rng.sample(range(num_rows), len(shape.seq_lens))
        self.table = ReqToTokenPool(num_rows, max(shape.seq_lens, default=0) + 3, DEVICE)
        # Cells behind a request's end hold what an earlier request left there.
        self.table.req_to_token.fill_(slots.pop())
        self.pool = self._pool(num_slots, shape.kv_dtype or shape.dtype)
        self.reference_pool = self._pool(num_slots, torch.float32)
        for pool in (self.pool, self.reference_pool):
            pool.k_data.fill_(float("nan"))
            pool.v_data.fill_(float("nan"))
        # The reference pads with the dummy slot.
        self.reference_pool.k_data[:, 0] = self.reference_pool.v_data[:, 0] = 0.0
        k, v, locations = self._fill(slots)
        self.k, self.v, self.out_cache_loc = k, v, locations
        num_tokens = sum(shape.new_lens)
        # Queries as they come: rows of the fused qkv product.
        fused = torch.randn(num_tokens, 2 * shape.heads * shape.head_dim, device=DEVICE)
        self.q = fused.to(shape.dtype)[:, : shape.heads * shape.head_dim]
        self.mask = self._tree_mask() if shape.tree else None
        if shape.mapped and shape.window is not None:
            self._forget_behind(shape.window)

    def _pool(self, num_slots: int, dtype: torch.dtype) -> MHATokenToKVPool:
        shape = self.shape
        layers = LAYER_ID + 1
        kind = MappedPool if shape.mapped else MHATokenToKVPool
        pool = kind(num_slots, 1, dtype, shape.kv_heads, shape.head_dim, layers, DEVICE)
        if isinstance(pool, MappedPool):
            order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(3))
            rows = torch.cat((torch.zeros(1, dtype=torch.int64), order + 1))
            pool.full_to_swa = rows.to(torch.int32).to(DEVICE)
        return pool

    def _forget_behind(self, window: int) -> None:
        """Take the rows of what no new token looks at: now they are the dummy row."""
        for row, prefix_len in zip(self.rows, self.shape.prefix_lens):
            gone = self.table.req_to_token[row, : max(prefix_len - window + 1, 0)].long()
            for pool in (self.pool, self.reference_pool):
                assert isinstance(pool, MappedPool)
                pool.full_to_swa[gone] = 0

    def _fill(self, slots: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        shape, layer = self.shape, self.layer()
        new_k, new_v, new_slots = [], [], []
        for row, prefix_len, seq_len in zip(self.rows, shape.prefix_lens, shape.seq_lens):
            own = torch.tensor([slots.pop() for _ in range(seq_len)], dtype=torch.int64)
            self.table.write(row, 0, own)
            own = own.to(DEVICE)
            kv = torch.randn(2, seq_len, shape.kv_heads, shape.head_dim, device=DEVICE)
            k, v = kv.to(shape.dtype).to(self.pool.dtype)
            self.pool.set_kv_buffer(layer, own[:prefix_len], k[:prefix_len], v[:prefix_len])
            self.reference_pool.set_kv_buffer(
                layer, own[:prefix_len], k[:prefix_len], v[:prefix_len]
            )
            new_k.append(k[prefix_len:])
            new_v.append(v[prefix_len:])
            new_slots.append(own[prefix_len:])
        return torch.cat(new_k), torch.cat(new_v), torch.cat(new_slots)

    def _tree_mask(self) -> torch.Tensor:
        """Of the keys that the mask covers the first, the row's own and a random half."""
        new, behind = self.shape.new_lens[0], self.shape.behind
        tree = torch.rand(len(self.rows), new, behind + new) < 0.5
        tree[:, :, 0] = True
        tree[:, :, behind:] |= torch.eye(new, dtype=torch.bool)
        return tree.to(DEVICE)

    def layer(self) -> RadixAttention:
        shape = self.shape
        return RadixAttention(
            shape.heads, shape.head_dim, 0.3, shape.kv_heads, LAYER_ID, shape.window
        )

    def batch(self, pool: MHATokenToKVPool) -> ForwardBatch:
        shape = self.shape
        # Of a tree's tokens each two are alternatives.
        share = 2 if shape.tree else 1
        positions = [
            p + i // share for p, n in zip(shape.prefix_lens, shape.new_lens) for i in range(n)
        ]

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=DEVICE)

        batch = ForwardBatch(
            forward_mode=shape.mode,
            batch_size=len(self.rows),
            input_ids=tensor([0] * len(positions)),
            positions=tensor(positions),
            req_pool_indices=tensor(self.rows),
            seq_lens=tensor(shape.seq_lens),
            seq_lens_cpu=shape.seq_lens,
            out_cache_loc=self.out_cache_loc,
            req_to_token_pool=self.table,
            token_to_kv_pool=pool,
            spec_info=TreeInput(self.mask),
        )
        if shape.mode is not DECODE:
            batch.extend_seq_lens = tensor(shape.new_lens)
            batch.extend_prefix_lens = tensor(shape.prefix_lens)
            batch.extend_seq_lens_cpu = shape.new_lens
            batch.extend_prefix_lens_cpu = shape.prefix_lens
        return batch

    def facts(self, dtype: torch.dtype) -> RunnerFacts:
        return RunnerFacts(
            device=DEVICE,
            dtype=dtype,
            num_heads=self.shape.heads,
            num_kv_heads=self.shape.kv_heads,
            head_dim=self.shape.head_dim,
            page_size=1,
            max_context_len=self.table.max_context_len,
            max_running_requests=len(self.rows),
        )

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        batch = self.batch(self.pool)
        backend.init_forward_metadata(batch)
        return backend.forward(self.q, self.k, self.v, self.layer(), batch)

    def expected(self) -> torch.Tensor:
        batch = self.batch(self.reference_pool)
        backend = create_attention_backend("torch_reference", self.facts(torch.float32))
        backend.init_forward_metadata(batch)
        k, v = self.k.float(), self.v.float()
        return backend.forward(self.q.float(), k, v, self.layer(), batch)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert got.shape == expected.shape
    return float((got.float() - expected).norm() / expected.norm())


def check(shape: Shape) -> None:
    case = Case(shape)
    backend = create_attention_backend("triton", case.facts(shape.dtype))
    # Twice: the second run finds the scratch memory as the first left it.
    for _ in range(2):
        error = relative_error(case.run(backend), case.expected())
        assert error < shape.tolerance, error


TINY = {
    "extend": Shape([0, 17, 3, 0], [9, 1, 12, 1]),
    "extend-window": Shape([0, 70, 3], [9, 1, 12], window=5),
    "extend-odd-group": Shape([5, 40], [7, 3], heads=6, kv_heads=2),
    "extend-one-group": Shape([5], [7], heads=7, kv_heads=1, head_dim=24),
    # As a captured prefill step: requests without tokens, then one of padding.
    "extend-padded": Shape([0, 17, 0, 0, 0], [9, 3, 0, 0, 12]),
    "extend-padded-window": Shape([0, 70, 0, 0], [9, 3, 0, 12], window=5, mapped=True),
    "decode": Shape([1, 40, 8, 0, 70], [1] * 5, mode=DECODE),
    "decode-half": Shape([1, 40, 70], [1] * 3, mode=DECODE, dtype=torch.float16),
    "decode-window": Shape([1, 40, 90], [1] * 3, mode=DECODE, window=7),
    "decode-mha": Shape([70, 4], [1, 1], heads=3, kv_heads=3, head_dim=10, mode=DECODE),
    "decode-many-heads": Shape([33], [1], heads=20, kv_heads=1, mode=DECODE),
    "verify-tree": Shape([6, 50], [5, 5], tree=True, mode=VERIFY),
    "verify-tree-window": Shape([6, 50], [5, 5], tree=True, window=9, mode=VERIFY),
    "verify-no-prefix": Shape([0, 40, 0], [5] * 3, tree=True, mode=VERIFY),
    "branches": Shape([20, 9, 70], [4] * 3, tree=True, behind=8, mode=VERIFY),
    "branches-only": Shape([4, 4], [2, 2], tree=True, behind=4, mode=VERIFY),
    "verify-causal": Shape([6, 50], [4, 4], mode=VERIFY),
    "draft": Shape([20, 3, 0], [2, 4, 1], mode=DRAFT),
    "extend-mapped": Shape([0, 70, 3], [9, 1, 12], window=5, mapped=True),
    "decode-mapped": Shape([1, 40, 90], [1] * 3, mode=DECODE, window=7, mapped=True),
    "verify-mapped": Shape([6, 50], [4, 4], mode=VERIFY, window=9, mapped=True),
    "verify-tree-mapped": Shape([6, 50], [5, 5], tree=True, window=9, mode=VERIFY, mapped=True),
    "verify-one": Shape([40, 3], [1, 1], mode=VERIFY),
    "branches-one": Shape([40, 6], [1, 1], tree=True, behind=4, window=6, mode=VERIFY),
    "verify-odd-group": Shape([70], [4], heads=9, kv_heads=3, head_dim=64, mode=VERIFY),
    "draft-mha": Shape([0, 33], [2, 2], heads=3, kv_heads=3, head_dim=10, mode=DRAFT),
    "draft-half": Shape([5, 70], [8, 8], heads=4, kv_heads=1, dtype=torch.float16, mode=DRAFT),
    "draft-rounded": Shape([5, 70], [3, 3], kv_dtype=torch.float16, mode=DRAFT),
    # The interpreter multiplies no bfloat16: such queries are among the large batches.
    "extend-fp16-cache": Shape([0, 17], [9, 3], kv_dtype=FP16),
    "decode-fp16-cache": Shape([1, 40, 70], [1] * 3, kv_dtype=FP16, mode=DECODE),
    "decode-bf16-cache": Shape([1, 40, 70], [1] * 3, dtype=FP16, kv_dtype=BF16, mode=DECODE),
    "verify-fp16-cache": Shape([6, 50], [4, 4], kv_dtype=FP16, mode=VERIFY),
    "draft-16": Shape([60], [16], heads=8, kv_heads=1, head_dim=64, mode=DRAFT),
    "draft-window": Shape([30, 1], [6, 6], head_dim=24, window=3, mode=DRAFT),
    "tree-mapped-128": Shape(
        [20], [5], 4, 1, 128, tree=True, behind=3, window=9, mode=VERIFY, mapped=True
    ),
}
# Every request has as many new tokens, or a mask says what they see.
ROTATED = [
    name for name in TINY if name.startswith(("decode", "verify", "branch", "draft-", "tree"))
]


@pytest.mark.parametrize("name", TINY)
def test_tiny_batches_equal_the_reference(name: str) -> None:
    check(TINY[name])


SHARED = ("decode", "verify-tree", "branches", "extend-window")
# Of many shares, which the interpreter takes seconds for, every kind with one of the two loops.
MANY_SHARES_IN_ONE_LOOP = ("decode", "extend-window")


@pytest.mark.parametrize(
    ("name", "share_target", "one_loop"),
    [
        pytest.param(
            name,
            share_target,
            one_loop,
            marks=pytest.mark.slow
            if share_target == 40 and one_loop != (name in MANY_SHARES_IN_ONE_LOOP)
            else (),
        )
        for name, share_target, one_loop in itertools.product(SHARED, (0, 1, 5, 40), (False, True))
    ],
)
def test_sharing_the_keys_changes_nothing(
    name: str, share_target: int, one_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_config(monkeypatch, share_target=share_target, one_loop=one_loop)
    check(TINY[name])


@pytest.mark.parametrize("name", ["verify-tree", "extend-window"])
def test_large_row_blocks_are_merged_by_a_second_kernel(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_config(monkeypatch, share_target=5)
    monkeypatch.setattr(launcher, "_MERGE_HERE_BLOCK", 255)
    check(TINY[name])


@pytest.mark.parametrize("num_new", [1, 4])
@pytest.mark.parametrize("lengths", [[40, 3, 90], [0, 200, 1]])
def test_shares_of_few_new_tokens_are_merged_every_time(lengths: list[int], num_new: int) -> None:
    heads, kv_heads, dim = 10, 2, 16
    torch.manual_seed(0)
    keys, values = torch.randn(2, 220, kv_heads, dim, device=DEVICE)
    table = torch.randint(0, 220, (3, 200), device=DEVICE, dtype=torch.int32)
    inputs = launcher.PagedAttentionInputs(
        queries=torch.randn(3 * num_new, heads, dim, device=DEVICE),
        keys=keys,
        values=values,
        table=table,
        table_rows=torch.arange(3, device=DEVICE),
        seq_lens=torch.tensor(lengths, device=DEVICE),
        query_lens=None,
        tree_mask=None,
        scaling=0.3,
        window=None,
    )
    workspace = launcher.Workspace(torch.device(DEVICE))
    # Four tokens of five heads: two blocks of rows, the second partly filled.
    config = replace(launcher.choose_config(inputs), block_m=16, block_n=16, share_target=6)
    whole = launcher.paged_attention(inputs, workspace, replace(config, share_target=0))
    known = torch.full((3,), num_new, device=DEVICE)
    for query_lens in (None, None, known):
        for memory in workspace._memory:
            memory.fill_(float("nan"))
        told = replace(inputs, query_lens=query_lens)
        got = launcher.paged_attention(told, workspace, config)
        torch.testing.assert_close(got, whole, rtol=1e-5, atol=1e-5)
        assert not workspace.arrivals.any()
        assert not workspace._memory[-1].isnan().all(), "nothing was shared"


@dataclass
class RotatedStep:
    """A step whose keys are still to be rotated and written; the reference has done both."""

    case: Case
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor  # [n, kv_heads, head_dim], as `v`; both are columns of one product
    v: torch.Tensor
    rotation: Rotation
    expected: torch.Tensor

    @classmethod
    def create(cls, shape: Shape, rotary_dim: int) -> RotatedStep:
        case = Case(shape)
        batch = case.batch(case.pool)
        table = torch.randn(max(shape.seq_lens) + 1, rotary_dim, device=DEVICE)
        fused = torch.cat((case.k, case.v), dim=1).to(shape.dtype)
        k, v = fused[:, : shape.kv_heads], fused[:, shape.kv_heads :]
        rotated = TorchOps().apply_rope(
            case.q.clone(), k.flatten(1), batch.positions, table, shape.head_dim
        )
        # The reference is given what the pool can hold.
        rounded = rotated[1].to(case.pool.dtype).float().view(k.shape)
        reference = create_attention_backend("torch_reference", case.facts(torch.float32))
        ours = case.batch(case.reference_pool)
        reference.init_forward_metadata(ours)
        expected = reference.forward(rotated[0].float(), rounded, v.float(), case.layer(), ours)
        rotation = Rotation(positions=batch.positions, cos_sin=table)
        return cls(case, batch, case.q.clone(), k, v, rotation, expected)

    def run(self, backend: AttentionBackend) -> torch.Tensor:
        return backend.forward_rotating(
            self.q, self.k, self.v, self.rotation, self.case.layer(), self.batch
        )

    def check(self, got: torch.Tensor) -> None:
        """The result and what is in the pool, except for the dummy row."""
        shape, pool, wanted = self.case.shape, self.case.pool, self.case.reference_pool
        kv_dtype = shape.kv_dtype or shape.dtype
        tolerance = shape.tolerance
        assert relative_error(got, self.expected) < tolerance
        # Rarely an 8-bit float falls on the other side.
        step = 0.3 if kv_dtype.itemsize == 1 else tolerance
        for ours, theirs in ((pool.k_data, wanted.k_data), (pool.v_data, wanted.v_data)):
            ours, theirs = ours[LAYER_ID, 1:].float(), theirs[LAYER_ID, 1:]
            torch.testing.assert_close(ours, theirs, rtol=step, atol=tolerance, equal_nan=True)
            assert relative_error(ours.nan_to_num(), theirs.nan_to_num()) < tolerance


def check_rotating(shape: Shape, rotary_dim: int) -> None:
    """The kernel that rotates and writes against the reference that is given rotated keys."""
    step = RotatedStep.create(shape, rotary_dim)
    before = step.q.clone(), step.k.clone(), step.v.clone()
    backend = create_attention_backend("triton", step.case.facts(shape.dtype))
    backend.init_forward_metadata(step.batch)
    assert backend.can_rotate(step.batch)
    step.check(step.run(backend))
    assert all(map(torch.equal, (step.q, step.k, step.v), before))


@pytest.mark.parametrize("name", ROTATED)
def test_rotating_in_the_kernel_changes_nothing(name: str) -> None:
    # Of every second case only half of the features are rotated.
    part = 1 + ROTATED.index(name) % 2
    check_rotating(TINY[name], TINY[name].head_dim // (2 * part) * 2)


def use_config(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Make small shares of what is launched from now on."""
    sizes = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 2} | changes
    config = launcher.LaunchConfig(**sizes)
    monkeypatch.setattr(launcher, "choose_config", lambda inputs: config)
    monkeypatch.setattr(launcher, "MIN_KEYS_PER_SHARE", 16)


@pytest.mark.parametrize("share_target", [0, 6, 15])
def test_whoever_reads_a_new_key_writes_it(
    share_target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_config(monkeypatch, share_target=share_target)
    check_rotating(Shape([129, 16, 200], [1] * 3, mode=DECODE), 16)
    # Six shares of whole blocks: the fifth has the last key, the sixth has none.
    check_rotating(Shape([129], [1], mode=DECODE), 16)
    # New keys of two shares, read by two row blocks, of which the first needs some of them only.
    check_rotating(Shape([43, 13], [9, 9], mode=VERIFY, window=40), 16)
    check_rotating(Shape([43], [9], mode=VERIFY, tree=True, behind=7), 16)


@pytest.mark.parametrize("num_new", [1, 3])
def test_a_share_of_unseen_keys_counts_nothing(
    num_new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_config(monkeypatch, share_target=8)
    case = Case(Shape([60], [num_new], tree=True, behind=50, mode=VERIFY))
    assert case.mask is not None
    case.mask[:, :, :50] = False
    got = case.run(create_attention_backend("triton", case.facts(torch.float32)))
    assert relative_error(got, case.expected()) < 1e-5


def test_padding_rows_are_rotated_into_the_dummy_slot() -> None:
    """As in a captured step: their lengths are those of new tokens alone, their slots are 0."""
    step = RotatedStep.create(Shape([40, 0, 9, 0], [4] * 4, mode=VERIFY), 16)
    case, batch = step.case, step.batch
    padding = [1, 3]
    before = case.pool.k_data.clone()
    case.table.req_to_token[case.rows[1]] = 0
    batch.req_pool_indices[3] = case.rows[1]
    tokens = torch.tensor([4 * row + i for row in padding for i in range(4)])
    others = torch.tensor([i for i in range(16) if i not in tokens])
    batch.out_cache_loc = batch.out_cache_loc.clone()
    batch.out_cache_loc[tokens] = 0
    got = step.run(create_attention_backend("triton", case.facts(torch.float32)))
    assert relative_error(got[others], step.expected[others]) < 1e-5
    assert got.isfinite().all()
    changed = case.pool.k_data[LAYER_ID].isfinite().flatten(1).any(1)
    written = changed & ~before[LAYER_ID].isfinite().flatten(1).any(1)
    expected = {0, *batch.out_cache_loc[others].tolist()}
    assert set(written.nonzero().flatten().tolist()) == expected


def test_what_the_kernel_does_not_rotate() -> None:
    def can_rotate(shape: Shape, **changes: Any) -> bool:
        case = Case(shape)
        batch = replace(case.batch(case.pool), **changes)
        backend = create_attention_backend("triton", case.facts(torch.float32))
        return backend.can_rotate(batch)

    assert can_rotate(Shape([3, 4], [4, 4], mode=VERIFY))
    assert can_rotate(Shape([3, 4], [16, 16], mode=DRAFT))
    assert not can_rotate(Shape([3, 4], [4, 4])), "prompts have any length"
    assert not can_rotate(Shape([3, 4], [4, 3], mode=DRAFT)), "different lengths"
    assert not can_rotate(Shape([3], [17], mode=VERIFY)), "many tokens"
    assert not can_rotate(Shape([3], [16], 8, 1, 128, mode=VERIFY)), "a large block of rows"
    two = Shape([3, 4], [4, 4], mode=DRAFT)
    assert not can_rotate(two, extend_seq_lens_cpu=[4, 5]), "not as many as there are"
    assert not can_rotate(two, extend_seq_lens_cpu=None), "lengths unknown to the host"


@pytest.mark.parametrize("shape", [TINY["extend"], Shape([3, 2], [17, 17], mode=VERIFY)])
def test_rotating_more_than_the_kernel_does_is_refused(shape: Shape) -> None:
    case = Case(shape)
    batch = case.batch(case.pool)
    backend = create_attention_backend("triton", case.facts(torch.float32))
    rotation = Rotation(positions=batch.positions, cos_sin=torch.zeros(99, 16, device=DEVICE))
    with pytest.raises(ValueError, match="equally many"):
        backend.forward_rotating(case.q, case.k, case.v, rotation, case.layer(), batch)


def test_tokens_that_are_not_equally_many_need_lengths() -> None:
    case = Case(Shape([3, 4], [2, 1], mode=VERIFY))
    batch = replace(case.batch(case.pool), forward_mode=DECODE)
    backend = create_attention_backend("triton", case.facts(torch.float32))
    with pytest.raises(ValueError, match="need query_lens"):
        backend.forward(case.q, case.k, case.v, case.layer(), batch)


def test_too_many_shares_are_refused() -> None:
    case = Case(Shape([1], [1], mode=DECODE))
    queries = case.q.view(1, 4, 16)
    keys, values = case.pool.get_kv_buffer(LAYER_ID)
    inputs = launcher.PagedAttentionInputs(
        queries=queries,
        keys=keys,
        values=values,
        table=case.table.req_to_token,
        table_rows=torch.zeros(1, dtype=torch.int64, device=DEVICE),
        seq_lens=torch.ones(1, dtype=torch.int64, device=DEVICE),
        query_lens=None,
        tree_mask=None,
        scaling=1.0,
        window=None,
    )
    config = replace(launcher.choose_config(inputs), share_target=launcher.MAX_SHARES)
    with pytest.raises(ValueError, match="too many"):
        launcher.paged_attention(inputs, launcher.Workspace(torch.device(DEVICE)), config)


def test_padding_rows_of_length_zero_get_zeros() -> None:
    case = Case(Shape([1, 40, 8], [1] * 3, mode=DECODE))
    batch = case.batch(case.pool)
    batch.seq_lens[1] = 0
    backend = create_attention_backend("triton", case.facts(torch.float32))
    got = backend.forward(case.q, case.k, case.v, case.layer(), batch)
    expected = case.expected()
    assert not got[1].any()
    assert relative_error(got[[0, 2]], expected[[0, 2]]) < 1e-5


def test_empty_batch() -> None:
    case = Case(Shape([3], [1], mode=DECODE))
    batch = replace(case.batch(case.pool), out_cache_loc=case.out_cache_loc[:0])
    batch.forward_mode = ForwardMode.IDLE
    batch.seq_lens, batch.req_pool_indices = batch.seq_lens[:0], batch.req_pool_indices[:0]
    backend = create_attention_backend("triton", case.facts(torch.float32))
    out = backend.forward(case.q[:0], case.k[:0], case.v[:0], case.layer(), batch)
    assert out.shape == (0, case.q.shape[1])


def test_new_keys_are_written_to_their_slots_only() -> None:
    case = Case(Shape([4], [3]))
    before = case.pool.k_buffer[LAYER_ID].clone()
    case.run(create_attention_backend("triton", case.facts(torch.float32)))
    after = case.pool.k_buffer[LAYER_ID]
    same = (before == after) | (before.isnan() & after.isnan())
    changed = (~same).flatten(1).any(1).nonzero().flatten().tolist()
    assert sorted(changed) == sorted(case.out_cache_loc.tolist())
    assert torch.equal(after[case.out_cache_loc], case.k)


def test_a_mask_that_does_not_fit_is_refused() -> None:
    case = Case(TINY["verify-tree"])
    assert case.mask is not None
    case.mask = case.mask[:, :4]
    with pytest.raises(ValueError, match="tree mask"):
        case.run(create_attention_backend("triton", case.facts(torch.float32)))


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = Case(Shape([3], [1], mode=DECODE))
    batch = case.batch(case.pool)
    backend = create_attention_backend("triton", case.facts(torch.float32))
    layer = RadixAttention(4, 8, 0.3, 2, LAYER_ID)
    with pytest.raises(ValueError, match="do not fit"):
        backend.forward(case.q[:, :32], None, None, layer, batch)


def test_long_prompts_without_prefix_are_divided() -> None:
    assert make_plan([0, 5], [1023, 4000]) is None
    plan = make_plan([0, 7, 0], [1030, 2, 2048])
    assert plan is not None and plan.rest_tokens is not None and plan.rest_lens is not None
    assert [(span.start, span.length) for span in plan.spans] == [(0, 1024), (1032, 2048)]
    assert plan.rest_tokens.tolist() == [*range(1024, 1030), 1030, 1031]
    assert plan.rest_lens.tolist() == [6, 2, 0]
    whole = make_plan([0], [2048])
    assert whole is not None and whole.rest_tokens is None


_COMPILE = """
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sglang.srt.layers.attention.triton_ops.paged_attention_kernel import paged_attention_kernel

pointers = dict(
    queries="*bf16", out="*bf16", key_buffer="*bf16", value_buffer="*bf16", table="*i32",
    table_rows="*i64", slot_map="*i32", seq_lens="*i64", query_lens="*i64", tree_mask="*u8",
    partial_out="*fp32", partial_lse="*fp32", arrivals="*i32", new_keys="*bf16", new_values="*bf16",
    positions="*i64", cos_sin="*fp32", slots="*i64", scale_log2="fp32",
)
sizes = dict(
    NUM_KV_HEADS=8, GROUP=4, HEAD_DIM=128, BLOCK_D=128, BLOCK_M=16, BLOCK_N=64, BATCH_BLOCK=16,
    WINDOW=0, QUERIES=1, NEW_BLOCK=1, TREE=False, MAPPED=False, SHARED=True, PRECISION="tf32",
    HALF=64, ONE_LOOP=True, MASKED_STAGES=5, MERGE_HERE=True, MERGE_ROWS=4, MERGE_SHARES=8,
    PDL=True,
)
if sys.argv[1] == "verify":
    sizes.update(
        QUERIES=0, TREE=True, BLOCK_M=64, HALF=0, ONE_LOOP=False, MASKED_STAGES=1,
        MERGE_HERE=False,
    )
if sys.argv[1] == "rotating-verify":
    sizes.update(
        QUERIES=5, NEW_BLOCK=8, TREE=True, BLOCK_M=32, ONE_LOOP=False, MASKED_STAGES=1,
        MERGE_ROWS=32, MERGE_SHARES=1,
    )
if sys.argv[1] == "window":
    sizes.update(MAPPED=True, WINDOW=512)
names = paged_attention_kernel.arg_names
signature = {
    name: "constexpr" if name in sizes else pointers.get(name, "i32") for name in names
}
strides = ("query_stride", "out_stride", "key_stride", "value_stride", "new_key_stride",
           "new_value_stride", "cos_sin_stride")
aligned = {
    (i,): [["tt.divisibility", 16]]
    for i, name in enumerate(names)
    if pointers.get(name, "").startswith("*") or name in strides
}
source = ASTSource(paged_attention_kernel, signature, sizes, aligned)
compiled = triton.compile(
    source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "num_stages": 5}
)
assert compiled.asm["cubin"][:4] == b"\\x7fELF"
ptx = compiled.asm["ptx"]
assert "mma.sync" in ptx or "wgmma" in ptx, "no matrix unit"
assert "cp.async" in ptx, "no asynchronous loads"
assert compiled.metadata.shared <= 227 * 1024
"""


@pytest.mark.parametrize("kind", ["decode", "verify", "rotating-verify", "window"])
def test_kernel_compiles_for_hopper(tmp_path: Path, kind: str) -> None:
    root = Path(__file__).resolve().parents[3]
    environment = dict(os.environ, PYTHONPATH=str(root / "python"), TRITON_CACHE_DIR=str(tmp_path))
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, kind], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]


LARGE = {
    "decode-1x32k": Shape([32767], [1], 32, 8, 128, BF16, mode=DECODE),
    "decode-64-mixed": Shape(
        [(i * 977) % 4000 for i in range(64)], [1] * 64, 32, 8, 128, BF16, mode=DECODE
    ),
    "decode-300": Shape([i % 77 for i in range(300)], [1] * 300, 9, 3, 64, FP16, mode=DECODE),
    "decode-200-mixed": Shape(
        [(i * 977) % 3000 for i in range(200)], [1] * 200, 32, 8, 128, BF16, mode=DECODE
    ),
    "decode-300-fp8": Shape(
        [i % 99 for i in range(300)], [1] * 300, 32, 8, 128, BF16, FP8, mode=DECODE
    ),
    "decode-e5m2": Shape([500, 3], [1, 1], 32, 8, 128, BF16, torch.float8_e5m2, mode=DECODE),
    "decode-fp8": Shape([5000, 3], [1, 1], 32, 8, 128, BF16, FP8, mode=DECODE),
    "decode-fp16-cache": Shape([900, 3], [1, 1], 32, 8, 128, BF16, FP16, mode=DECODE),
    "decode-fp32": Shape([900, 3], [1, 1], 8, 8, 96, torch.float32, mode=DECODE),
    "decode-256": Shape([5000, 100], [1, 1], 8, 1, 256, BF16, mode=DECODE, window=512),
    "decode-80": Shape([700, 100], [1, 1], 8, 8, 80, BF16, mode=DECODE),
    "extend-4k": Shape([0], [4096], 32, 8, 128, BF16),
    "extend-mixed": Shape([0, 3000, 17, 900], [1000, 300, 1, 129], 32, 8, 128, BF16),
    "extend-dense": Shape([0, 700, 0, 0], [2048, 50, 1500, 20], 32, 8, 128, BF16),
    "extend-dense-mha": Shape([0, 0], [1024, 1024], 4, 4, 64, FP16),
    "extend-32k": Shape([31744], [1024], 32, 8, 128, BF16),
    "extend-window": Shape([0, 3000], [1000, 300], 16, 8, 96, FP16, window=256),
    "extend-odd": Shape([100, 0], [500, 333], 14, 2, 64, BF16),
    "extend-256": Shape([1000], [600], 8, 4, 256, BF16),
    "extend-fp8": Shape([1000, 0], [600, 20], 32, 8, 128, BF16, FP8),
    "extend-fp16-cache": Shape([1000, 0], [600, 20], 32, 8, 128, BF16, FP16),
    "verify-1x32k": Shape([32000], [16], 32, 8, 128, BF16, tree=True, mode=VERIFY),
    "verify-8": Shape(
        [999 * i for i in range(8)], [8] * 8, 32, 8, 128, BF16, tree=True, mode=VERIFY
    ),
    "branches-8": Shape(
        [50 + 700 * i for i in range(8)],
        [8] * 8,
        32,
        8,
        128,
        BF16,
        tree=True,
        behind=40,
        mode=VERIFY,
    ),
    "verify-small-model": Shape([777], [4], 9, 3, 64, BF16, mode=VERIFY),
    "verify-small-model-32": Shape(
        [i * 97 for i in range(32)], [4] * 32, 9, 3, 64, FP16, mode=VERIFY
    ),
    "verify-300": Shape([i % 177 for i in range(300)], [4] * 300, 32, 8, 128, BF16, mode=VERIFY),
    "verify-fp8": Shape(
        [5000, 3], [5, 5], 32, 8, 128, BF16, FP8, window=700, tree=True, mode=VERIFY, mapped=True
    ),
    "verify-fp32": Shape([900, 3], [2, 2], 8, 8, 96, torch.float32, mode=VERIFY),
    "draft-16": Shape([900, 30, 4000], [16] * 3, 32, 8, 128, BF16, mode=DRAFT),
    "draft-80": Shape([700, 100], [3, 3], 8, 8, 80, BF16, window=64, mode=DRAFT),
    "verify-60": Shape([3000, 10], [60, 60], 32, 8, 128, FP16, tree=True, mode=VERIFY),
}


# As far as the kernel rotates them: up to 16 tokens a request, in blocks of up to 64 rows.
ROTATED_LARGE = [
    name
    for name in LARGE
    if name.startswith(("decode", "verify", "branches", "draft")) and name != "verify-60"
]


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", LARGE)
def test_large_batches_equal_the_reference(name: str) -> None:
    check(LARGE[name])


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("name", ROTATED_LARGE)
def test_rotating_large_batches(name: str) -> None:
    check_rotating(LARGE[name], LARGE[name].head_dim)


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_captured_decode_follows_new_lengths() -> None:
    case = Case(LARGE["decode-64-mixed"])
    backend = create_attention_backend("triton", case.facts(BF16))
    batch, layer = case.batch(case.pool), case.layer()
    final = batch.seq_lens.clone()
    batch.seq_lens.fill_(1)
    backend.forward(case.q, case.k, case.v, layer, batch)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(case.q, case.k, case.v, layer, batch)
    batch.seq_lens.copy_(final)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert relative_error(out, case.expected()) < 1e-2


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("tree", [False, True])
def test_captured_verification_rotates_at_new_lengths(tree: bool) -> None:
    """Padding while it is captured, real requests when it is replayed."""
    shape = Shape([i * 331 for i in range(8)], [5] * 8, 9, 3, 64, BF16, tree=tree, mode=VERIFY)
    step = RotatedStep.create(shape, 64)
    batch = step.batch
    given = (batch.seq_lens, batch.positions, batch.out_cache_loc, batch.req_pool_indices)
    final = [tensor.clone() for tensor in given]
    batch.seq_lens.fill_(5)
    for tensor in given[1:3]:
        tensor.fill_(0)
    backend = create_attention_backend("triton", step.case.facts(BF16))
    step.run(backend)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run(backend)
    for tensor, values in zip(given, final):
        tensor.copy_(values)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        step.check(out)
