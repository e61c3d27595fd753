"""Both sets of operations mean the same, in float32, and the torch set in half precision too."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.layers.activation import get_gated_activation, get_gated_linear
from sglang.srt.layers.dispatch import CpuFloat32Ops, TorchOps, select_ops

TORCH, CPU = TorchOps(), CpuFloat32Ops()


def test_choice_follows_device_and_dtype() -> None:
    assert isinstance(select_ops(torch.device("cpu"), torch.float32), CpuFloat32Ops)
    assert isinstance(select_ops(torch.device("cpu"), torch.bfloat16), TorchOps)
    assert isinstance(select_ops(torch.device("cuda"), torch.float32), TorchOps)


@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_linear(num_rows: int) -> None:
    x, weight, bias = torch.randn(num_rows, 22), torch.randn(9, 22), torch.randn(9)
    for b in (bias, None):
        torch.testing.assert_close(CPU.linear(x, weight, b), TORCH.linear(x, weight, b))


@pytest.mark.parametrize("shape", [(5, 24), (5, 3, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    for ops in (CPU, TORCH):
        before = x.clone()
        torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), expected)
        assert torch.equal(x, before)


def test_add_rms_norm() -> None:
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    total = x + residual
    for ops in (CPU, TORCH):
        normed, stream = ops.add_rms_norm(x, residual.clone(), weight, 1e-5)
        torch.testing.assert_close(stream, total)
        torch.testing.assert_close(normed, TORCH.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("shape", [(5, 24), (5, 3, 8)])
def test_rms_norm_with_a_zero_centred_weight(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape), torch.randn(shape[-1]) * 0.1
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + 1)
    for ops in (CPU, TORCH):
        torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5, 1.0), expected)
    total = x + x
    for ops in (CPU, TORCH):
        normed, _ = ops.add_rms_norm(x, x.clone(), weight, 1e-5, 1.0)
        torch.testing.assert_close(normed, TORCH.rms_norm(total, weight, 1e-5, 1.0))
    # In half precision nothing is rounded before the product, as the checkpoints were trained.
    half = torch.bfloat16
    wide = TORCH.rms_norm(x.to(half).float(), weight.to(half).float(), 1e-5, 1.0)
    assert torch.equal(TORCH.rms_norm(x.to(half), weight.to(half), 1e-5, 1.0), wide.to(half))


def test_gated_activations() -> None:
    x = torch.randn(7, 26) * 3
    gate, up = x.chunk(2, dim=-1)
    functions = torch.nn.functional
    for ops in (CPU, TORCH):
        torch.testing.assert_close(ops.silu_and_mul(x), functions.silu(gate) * up)
        torch.testing.assert_close(
            ops.gelu_tanh_and_mul(x), functions.gelu(gate, approximate="tanh") * up
        )
    torch.testing.assert_close(get_gated_activation("gelu")(x), functions.gelu(gate) * up)


@pytest.mark.parametrize("name", ["silu", "swish", "gelu", "gelu_new"])
def test_gated_linear_activates_the_product(name: str) -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(20, 8), torch.randn(20)
    expected = get_gated_activation(name)(torch.nn.functional.linear(x, weight, bias))
    torch.testing.assert_close(get_gated_linear(name)(x, weight, bias), expected)


def test_unknown_activation_is_refused_by_name() -> None:
    for getter in (get_gated_activation, get_gated_linear):
        with pytest.raises(ValueError, match="relu6.*silu"):
            getter("relu6")


def test_apply_rope() -> None:
    table = torch.randn(50, 8)
    fused, positions = torch.randn(6, 30), torch.randint(0, 50, (6,))
    results = []
    for ops in (CPU, TORCH):
        q, k = fused.clone().split([20, 10], dim=-1)
        results.append(ops.apply_rope(q, k, positions, table, 10))
    for ours, expected in zip(*results):
        torch.testing.assert_close(ours, expected)
    assert not torch.allclose(results[0][0], fused[:, :20], atol=1e-2)


def test_torch_set_in_half_precision_stays_close() -> None:
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)
    half = torch.bfloat16
    normed, _ = TORCH.add_rms_norm(x.to(half), residual.to(half), weight.to(half), 1e-5)
    expected, _ = TORCH.add_rms_norm(x, residual, weight, 1e-5)
    assert normed.dtype == half
    torch.testing.assert_close(normed.float(), expected, atol=0.08, rtol=0.03)
