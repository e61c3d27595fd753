"""`CudaOps` and the other elementwise kernels against the torch set.

Without a GPU in Triton's interpreter (float32 and float16, tiny); with one in bfloat16 too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt.layers.dispatch import ExpertWeights, KVDestination, TorchOps, select_ops
from sglang.srt.layers.triton_ops import cuda_ops
from sglang.srt.layers.triton_ops.argmax import argmax_rows
from sglang.srt.layers.triton_ops.cuda_ops import CudaOps
from sglang.srt.layers.triton_ops.gemv import gemv
from sglang.srt.layers.triton_ops.gemv import is_worthwhile as gemv_is_worthwhile
from sglang.srt.layers.triton_ops.moe import plan_experts
from sglang.srt.layers.triton_ops.skinny import is_worthwhile, skinny
from sglang.srt.layers.triton_ops.store_kv import store_kv

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
OURS, TORCH = CudaOps(), TorchOps()
DTYPES = [torch.float16, torch.bfloat16] if HAS_CUDA else [torch.float32, torch.float16]
# (tokens, width): widths that are no power of two too.
SHAPES = [(1, 4096), (700, 4096), (33, 576), (64, 14336)] if HAS_CUDA else [(3, 24), (1, 64)]


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    # Both round at the same places; what differs is the order of sums: a last digit, seldom.
    assert got.dtype == expected.dtype
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(got, expected, rtol=2 * eps, atol=2 * eps)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def test_half_precision_on_cuda_selects_this_set() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        assert isinstance(select_ops(torch.device("cuda"), dtype), CudaOps)
    assert isinstance(select_ops(torch.device("cuda"), torch.float32), TorchOps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, residual = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype)
    weight = randn(shape[1], dtype=dtype)
    before = x.clone()
    close(OURS.rms_norm(x, weight, 1e-5), TORCH.rms_norm(x, weight, 1e-5))
    expected, stream = TORCH.add_rms_norm(x, residual.clone(), weight, 1e-5)
    got, ours = OURS.add_rms_norm(x, residual, weight, 1e-5)
    close(got, expected)
    assert torch.equal(ours, stream)
    assert torch.equal(x, before)
    close(OURS.rms_norm(x, weight, 1e-5, 1.0), TORCH.rms_norm(x, weight, 1e-5, 1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_two_norms_side_by_side(shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, width = shape
    x, wide = randn(n, width, dtype=dtype), randn(n, 2 * width, dtype=dtype)
    y = wide[:, width:]  # one of several states
    weights = randn(2, width, dtype=dtype)
    joined, copy = OURS.norms_side_by_side(x, y, weights[0], weights[1], 1e-5)
    expected, wanted = TORCH.norms_side_by_side(x, y, weights[0], weights[1], 1e-5)
    close(joined, expected)
    assert torch.equal(copy, wanted)
    assert copy.data_ptr() != y.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_taken_and_added(shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, width = shape
    table = randn(9, width + 4, dtype=dtype)[:, :width]
    rows = torch.randint(0, 9, (n, 3), device=DEVICE)[:, 1]
    assert torch.equal(OURS.take_rows(table, rows), table[rows])
    assert OURS.take_rows(table, rows[:0]).shape == (0, width)
    x, y = randn(n, width, dtype=dtype), randn(n, width, dtype=dtype)
    got, expected = (torch.zeros(n, 3 * width, device=DEVICE).to(dtype) for _ in range(2))
    OURS.add_rows(x, y, got[:, width : 2 * width])
    TORCH.add_rows(x, y, expected[:, width : 2 * width])
    assert torch.equal(got, expected)
    assert got.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_within_a_fused_product(dtype: torch.dtype) -> None:
    fused, weight = randn(5, 60, dtype=dtype), randn(10, dtype=dtype)
    heads = fused[:, 20:50].unflatten(-1, (-1, 10))
    close(OURS.rms_norm(heads, weight, 1e-6), TORCH.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated_activations(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = randn(*shape, dtype=dtype) * 3
    close(OURS.silu_and_mul(x), TORCH.silu_and_mul(x))
    got, expected = OURS.gelu_tanh_and_mul(x), TORCH.gelu_tanh_and_mul(x)
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [12, 8])
@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (1, 1)])
def test_rope_and_store(heads: tuple[int, int], rotary_dim: int, dtype: torch.dtype) -> None:
    head_dim, num_tokens = 12, 5
    sizes = [heads[0] * head_dim, heads[1] * head_dim, heads[1] * head_dim]
    fused = randn(num_tokens, sum(sizes), dtype=dtype)
    table = torch.randn(40, rotary_dim, device=DEVICE)
    positions = torch.randint(0, 40, (num_tokens,), device=DEVICE)
    q, k, v = fused.clone().split(sizes, dim=-1)
    expected = TORCH.apply_rope(q, k, positions, table, head_dim)

    q, k, _ = fused.clone().split(sizes, dim=-1)
    for got, wanted in zip(OURS.apply_rope(q, k, positions, table, head_dim), expected):
        close(got, wanted)

    slots = torch.tensor([7, 3, 9, 1, 5], device=DEVICE)
    buffers = torch.full((2, 11, heads[1], head_dim), float("nan"), device=DEVICE).to(dtype)
    q, k, v = fused.clone().split(sizes, dim=-1)
    destination = KVDestination(slots=slots, key_buffer=buffers[0], value_buffer=buffers[1])
    pair = OURS.rope_and_store(q, k, v, positions, table, head_dim, destination)
    for got, wanted in zip(pair, expected):
        close(got, wanted)
    assert torch.equal(buffers[0, slots].flatten(1), pair[1])
    assert torch.equal(buffers[1, slots].flatten(1), v)
    reference = torch.zeros_like(buffers)
    destination = KVDestination(slots=slots, key_buffer=reference[0], value_buffer=reference[1])
    q, k, v = fused.clone().split(sizes, dim=-1)
    TORCH.rope_and_store(q, k, v, positions, table, head_dim, destination)
    close(buffers[:, slots], reference[:, slots])
    untouched = [slot for slot in range(11) if slot not in slots.tolist()]
    assert buffers[:, untouched].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_kv(dtype: torch.dtype) -> None:
    fused = randn(4, 3 * 24, dtype=dtype)
    k, v = (part.unflatten(-1, (-1, 8)) for part in fused[:, 24:].split(24, dim=-1))
    slots = torch.tensor([6, 2, 5, 3], device=DEVICE)
    buffers = torch.full((2, 8, 3, 8), float("nan"), device=DEVICE).to(dtype)
    store_kv(k, v, slots, buffers[0], buffers[1])
    assert torch.equal(buffers[0, slots], k)
    assert torch.equal(buffers[1, slots], v)
    assert buffers[:, [0, 1, 4, 7]].isnan().all()


@pytest.mark.parametrize("width", [5, 4096, 9001])
def test_argmax_takes_the_first_of_equals(width: int) -> None:
    x = torch.randn(3, 2 * width, device=DEVICE)[:, :width]
    x[1] = 0.25
    x[2, width // 2] = x[2, width - 1] = 9.0
    got, unusable = argmax_rows(x)
    assert got.dtype == torch.int64
    assert got.tolist() == x.argmax(-1).tolist()
    assert got.tolist()[1:] == [0, width // 2]
    assert not unusable.any()
    assert OURS.argmax(torch.full_like(x, float("nan"))).max() < width


@pytest.mark.parametrize("width", [5, 9001])
def test_rows_that_hold_no_numbers_are_found(width: int) -> None:
    x = torch.randn(6, width, device=DEVICE)
    x[1, width - 1] = float("nan")
    x[2, 0] = float("inf")
    x[3, 1:] = -float("inf")  # a grammar allows one token
    x[4] = float("nan")
    x[5, 2], x[5, 3] = float("inf"), -float("inf")
    got, unusable = argmax_rows(x)
    assert unusable.tolist() == [False, True, True, False, True, True]
    assert unusable.tolist() == TORCH.checked_argmax(x)[1].tolist()
    assert got.tolist()[3] == 0
    assert got.max() < width


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
def test_values_beyond_fp8_saturate() -> None:
    k = torch.tensor([[[1e4, -1e4] * 8]], dtype=torch.bfloat16, device=DEVICE)
    buffers = torch.zeros(2, 2, 1, 16, device=DEVICE).to(torch.float8_e4m3fn)
    store_kv(k, k, torch.tensor([1], device=DEVICE), buffers[0], buffers[1])
    assert buffers[0, 1].float().abs().unique().tolist() == [448.0]


# (out, in): sizes that no block divides, several iterations, and (on a GPU) those of a real model.
GEMV_SHAPES = [(5, 24), (33, 5 * 1024 + 8), (64, 4096)]
if HAS_CUDA:
    GEMV_SHAPES += [(6144, 4096), (4096, 14336), (128256, 4096), (576, 1536)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GEMV_SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_of_one_row(shape: tuple[int, int], with_bias: bool, dtype: torch.dtype) -> None:
    weight, x = randn(*shape, dtype=dtype), randn(1, shape[1], dtype=dtype)
    bias = randn(shape[0], dtype=dtype) * 10 if with_bias else None
    got = OURS.linear(x, weight, bias)
    exact = TORCH.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.dtype == dtype
    # One rounding to dtype, and a sum of `in` terms in float32.
    sum_error = torch.finfo(torch.float32).eps * shape[1]
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), exact, rtol=2 * rounding, atol=sum_error)
    if bias is None:
        wide = OURS.wide_linear(x, weight)
        assert wide.dtype == torch.float32
        torch.testing.assert_close(wide.double(), exact, rtol=1e-6, atol=sum_error)


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="the wide product of several rows is cuBLAS'")
def test_wide_linear_is_not_rounded() -> None:
    weight, x = randn(1000, 4096, dtype=torch.bfloat16), randn(9, 4096, dtype=torch.bfloat16)
    wide = OURS.wide_linear(x, weight)
    exact = x.double() @ weight.double().T
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double(), exact, rtol=1e-4, atol=5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("product", "shape"),
    [(gemv, shape) for shape in [(13, 300), (9, 1040), (5, 2100)]]
    + [(skinny, shape) for shape in [(33, 300), (96, 1040), (2060, 40)]],
)
def test_product_of_a_few_rows(
    product: Callable[..., torch.Tensor],
    shape: tuple[int, int],
    num_rows: int,
    with_bias: bool,
    dtype: torch.dtype,
) -> None:
    """Each block size; ends that are no multiple of it; rows with a distance."""
    x = randn(num_rows, 2 * shape[1], dtype=dtype)[:, : shape[1]] / shape[1] ** 0.5
    weight = randn(*shape, dtype=dtype)
    bias = randn(shape[0], dtype=dtype) if with_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    rounding = torch.finfo(dtype).eps
    # The matrix units shorten float32 to 11 bits.
    sum_error = 1e-3 if dtype is torch.float32 and HAS_CUDA else 1e-5
    got = product(x, weight, bias)
    torch.testing.assert_close(got.double(), exact, rtol=2 * rounding, atol=sum_error)
    wide = product(x, weight, bias, torch.float32)
    torch.testing.assert_close(wide.double(), exact, rtol=1e-5, atol=sum_error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 7])
@pytest.mark.parametrize("shape", [(26, 300), (18, 1040), (10, 2100)])
def test_gated_product_is_that_of_two_operations(
    shape: tuple[int, int], num_rows: int, with_bias: bool, dtype: torch.dtype
) -> None:
    """Bit by bit, in each block size: features that are no multiple of it, rows with a distance."""
    x = randn(num_rows, 2 * shape[1], dtype=dtype)[:, : shape[1]] / shape[1] ** 0.5
    weight = randn(*shape, dtype=dtype)
    bias = randn(shape[0], dtype=dtype) if with_bias else None
    assert torch.equal(gemv(x, weight, bias, gated=True), OURS.silu_and_mul(gemv(x, weight, bias)))


def test_gated_products_of_many_rows_and_of_odd_weights() -> None:
    x, weight = randn(17, 40, dtype=DTYPES[0]), randn(26, 40, dtype=DTYPES[0])
    expected = OURS.silu_and_mul(OURS.linear(x, weight, None))
    assert torch.equal(OURS.silu_linear(x, weight, None), expected)
    with pytest.raises(ValueError, match="no two halves"):
        gemv(x[:1], weight[:25], None, gated=True)


def test_few_rows_take_the_own_products(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    for name in ("gemv", "skinny"):
        note = functools.partial(lambda name, x, *_, **__: calls.append((name, len(x))), name)
        monkeypatch.setattr(cuda_ops, name, note)
    weight = randn(64, 32, dtype=torch.float16)
    for num_rows in (0, 1, 2, 8, 9, 16, 17):
        OURS.linear(randn(num_rows, 32, dtype=torch.float16), weight, None)
    assert calls == [("gemv", 1), ("gemv", 2), ("gemv", 8), ("skinny", 9), ("skinny", 16)]
    calls.clear()
    OURS.silu_linear(randn(8, 32, dtype=torch.float16), weight, None)
    assert calls == [("gemv", 8)], "gated in the same launch"
    assert gemv_is_worthwhile(2, 6144, 4096)
    assert not gemv_is_worthwhile(4, 6144, 4096), "the library has the matrix units"
    assert not is_worthwhile(4, 6144, 4096), "the library splits wide rows"
    assert is_worthwhile(4, 128256, 4096), "many features need no split"


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="the interpreter adds in another order")
@pytest.mark.parametrize("shape", [(960, 576), (576, 1536), (6144, 4096)])
@pytest.mark.parametrize("num_rows", [2, 3, 4])
def test_a_row_does_not_depend_on_those_beside_it(num_rows: int, shape: tuple[int, int]) -> None:
    """So that a verified token is judged by the logits that it would have had alone."""
    x, weight = (randn(rows, shape[1], dtype=torch.bfloat16) for rows in (num_rows, shape[0]))
    alone = torch.cat([gemv(x[row : row + 1], weight, None) for row in range(num_rows)])
    assert torch.equal(gemv(x, weight, None), alone)


def test_linear_of_one_row_of_a_padded_weight() -> None:
    dtype = DTYPES[0]
    weight = randn(7, 48, dtype=dtype)[:, :40]
    x = randn(2, 40, dtype=dtype)[1:]
    close(OURS.linear(x, weight, None), (x.float() @ weight.float().T).to(dtype))


# (tokens, experts, experts a token, hidden, intermediate)
MOE_SHAPES = [(1, 4, 2, 24, 20), (7, 3, 2, 16, 33), (40, 5, 1, 40, 16)]
if HAS_CUDA:
    MOE_SHAPES += [(1, 128, 8, 2048, 768), (64, 128, 8, 2048, 768), (3000, 128, 8, 2048, 768)]


def moe_case(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertWeights]:
    """(x, expert ids, factors, weights); the last expert is nobody's choice."""
    tokens, experts, top_k, hidden, intermediate = shape
    gate_up = randn(experts, 2 * intermediate, hidden, dtype=dtype) * hidden**-0.5
    down = randn(experts, hidden, intermediate, dtype=dtype) * intermediate**-0.5
    weights = ExpertWeights(gate_up=gate_up, down=down, activation=OURS.silu_and_mul)
    factors, ids = torch.rand(tokens, experts - 1, device=DEVICE).topk(top_k, dim=-1)
    return randn(tokens, hidden, dtype=dtype), ids, factors.to(dtype), weights


def moe_reference(
    x: torch.Tensor, ids: torch.Tensor, factors: torch.Tensor, weights: ExpertWeights
) -> torch.Tensor:
    """In float32 on the CPU, by the reference set."""
    wide = ExpertWeights(
        gate_up=weights.gate_up.float().cpu(),
        down=weights.down.float().cpu(),
        activation=TORCH.silu_and_mul,
    )
    return TORCH.experts(x.float().cpu(), ids.cpu(), factors.float().cpu(), wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", MOE_SHAPES)
def test_experts(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    case = moe_case(shape, dtype)
    got = OURS.experts(*case)
    expected = moe_reference(*case)
    assert got.dtype == dtype
    error = (got.float().cpu() - expected).norm() / expected.norm()
    assert error < 3 * torch.finfo(dtype).eps


def test_no_tokens_no_experts() -> None:
    case = moe_case(MOE_SHAPES[0], DTYPES[0])
    got = OURS.experts(case[0][:0], case[1][:0], case[2][:0], case[3])
    assert got.shape == (0, 24)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 5, 2), (50, 4, 3), (700, 6, 2)])
def test_plan_has_every_pair_once_in_blocks_of_one_expert(
    tokens: int, experts: int, top_k: int
) -> None:
    ids = torch.rand(tokens, experts, device=DEVICE).topk(top_k, dim=-1).indices
    plan = plan_experts(ids, experts)
    flat = ids.flatten().tolist()
    order = plan.order.tolist()
    assert order == sorted(range(tokens * top_k), key=lambda pair: flat[pair])
    starts = sorted(start for start in plan.blocks.tolist()[1:] if start >= 0)
    expected = []
    for expert in range(experts):
        places = [place for place, pair in enumerate(order) if flat[pair] == expert]
        expected += places[:: plan.block_pairs]
    assert starts == expected


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_captured_experts_follow_the_router(dtype: torch.dtype) -> None:
    ops = select_ops(torch.device(DEVICE), dtype)
    x, ids, factors, weights = moe_case((8, 16, 2, 64, 48), dtype)
    ops.experts(x, ids, factors, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.experts(x, ids, factors, weights)
    for _ in range(3):
        new = moe_case((8, 16, 2, 64, 48), dtype)
        for old, fresh in zip((x, ids, factors), new[:3]):
            old.copy_(fresh)
        graph.replay()
        expected = moe_reference(x, ids, factors, weights)
        error = (out.float().cpu() - expected).norm() / expected.norm()
        assert error < 3 * torch.finfo(torch.bfloat16).eps
