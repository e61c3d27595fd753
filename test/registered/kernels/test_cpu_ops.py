"""The C++ CPU kernels against the torch implementations, and the promises `ops` makes."""

from __future__ import annotations

import ctypes
import dataclasses
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang.srt.layers.cpu import build, native, ops, reference
from sglang.srt.layers.cpu.layer_stack import (
    DecoderLayer,
    DecodeRows,
    LayerStack,
    Product,
    StackConfig,
)

needs_kernels = pytest.mark.skipif(not ops.available(), reason="no C++ compiler: torch is in use")

ODD_WIDTHS = [576, 96, 77, 33, 8, 5]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(20)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# ------------------------------------------------------------------ linear


@needs_kernels
@pytest.mark.parametrize("k", ODD_WIDTHS)
@pytest.mark.parametrize("weight_format", ops.WEIGHT_FORMATS)
def test_linear_equals_torch_in_every_format(k: int, weight_format: ops.WeightFormat) -> None:
    weight = torch.randn(53, k) / k**0.5
    bias = torch.randn(53)
    stored = weight if weight_format == "fp32" else ops.CompressedWeight(weight, weight_format)
    for n in (*range(1, 9), ops.small_rows()):
        x = torch.randn(n, k)
        close(native.linear(x, stored, bias), reference.linear(x, stored, bias))
        close(native.linear(x, stored), reference.linear(x, stored))


@needs_kernels
@pytest.mark.parametrize("weight_format", ops.WEIGHT_FORMATS)
def test_linear_row_is_bitwise_the_same_alone_and_in_a_batch(
    weight_format: ops.WeightFormat,
) -> None:
    weight = torch.randn(131, 200)
    stored = weight if weight_format == "fp32" else ops.CompressedWeight(weight, weight_format)
    x = torch.randn(ops.small_rows(), 200)
    alone = torch.cat([native.linear(row[None], stored) for row in x])
    for n in range(2, ops.small_rows() + 1):
        assert torch.equal(native.linear(x[:n], stored), alone[:n])


@needs_kernels
def test_linear_does_not_depend_on_the_number_of_threads() -> None:
    weight, x = torch.randn(300, 576), torch.randn(3, 576)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(native.linear(x, weight))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_linear_reads_rows_that_lie_apart_and_rejects_broken_rows() -> None:
    wide, weight = torch.randn(4, 100), torch.randn(7, 40)
    close(ops.linear(wide[:, 30:70], weight), wide[:, 30:70].contiguous() @ weight.T)
    close(ops.linear(torch.randn(20, 40), weight).sum() * 0, torch.tensor(0.0))
    if ops.available():
        with pytest.raises(ValueError, match="gaps"):
            ops.linear(torch.randn(40, 4).T, weight)
        with pytest.raises(ValueError, match="float32"):
            ops.linear(torch.randn(4, 40).double(), weight)
        with pytest.raises(ValueError, match="not supported"):
            ops.linear(torch.randn(4, 40), weight.double())
        with pytest.raises(ValueError, match="fit"):
            ops.linear(torch.randn(4, 39), weight)


def test_many_rows_use_the_float32_source() -> None:
    weight = torch.randn(16, 32)
    stored = ops.CompressedWeight(weight, "int8")
    x = torch.randn(ops.small_rows() + 1, 32)
    expected = x @ (weight if ops.available() else stored.dequantized()).T
    close(ops.linear(x, stored), expected)


# ------------------------------------------------------------------ compressed weights


def test_compressed_weight_follows_its_source_after_refresh() -> None:
    weight = torch.randn(40, 64)
    x = torch.randn(2, 64)
    for weight_format in ("bf16", "fp16", "int8"):
        stored = ops.CompressedWeight(weight, weight_format)
        address = stored.data.data_ptr()
        before = ops.linear(x, stored)
        weight.mul_(-4.0)
        assert torch.equal(ops.linear(x, stored), before)
        stored.refresh()
        assert stored.data.data_ptr() == address
        close(ops.linear(x, stored), -4.0 * before)


def test_int8_error_is_half_a_step_and_zero_rows_stay_zero() -> None:
    weight = torch.randn(20, 64)
    weight[3] = 0
    stored = ops.CompressedWeight(weight, "int8")
    assert stored.scale is not None
    error = (stored.dequantized() - weight).abs()
    assert bool((error <= stored.scale[:, None] * 0.5001).all())
    assert torch.equal(stored.dequantized()[3], torch.zeros(64))


def test_lossless_format_is_found_only_where_nothing_is_lost() -> None:
    weight = torch.randn(30, 16)
    assert ops.find_lossless_format(weight) == "fp32"
    assert ops.find_lossless_format(weight.bfloat16().float()) == "bf16"
    assert ops.find_lossless_format(weight.half().float()) == "fp16"


@needs_kernels
def test_lossless_copy_gives_the_bits_of_the_float32_weight() -> None:
    formats: dict[torch.dtype, ops.WeightFormat] = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    for dtype, weight_format in formats.items():
        weight = torch.randn(50, 120).to(dtype).float()
        weight[0, :4] = torch.tensor([0.0, -0.0, 2.0**-20, -(2.0**-14)])
        stored = ops.CompressedWeight(weight, weight_format)
        x = torch.randn(3, 120)
        assert torch.equal(native.linear(x, stored), native.linear(x, weight))


def test_compressed_weight_rejects_what_it_cannot_hold() -> None:
    with pytest.raises(ValueError, match="fp32"):
        ops.CompressedWeight(torch.zeros(2, 2), "fp32")
    with pytest.raises(ValueError, match="float32 matrix"):
        ops.CompressedWeight(torch.zeros(2, 2).half(), "int8")


# ------------------------------------------------------------------ elementwise


@pytest.mark.parametrize("width", ODD_WIDTHS)
@pytest.mark.parametrize("n", [1, 3, 70])
def test_rmsnorm_equals_torch(n: int, width: int) -> None:
    x, weight, residual = torch.randn(n, width), torch.randn(width), torch.randn(n, width)
    close(ops.rmsnorm(x, weight, 1e-5), reference.rmsnorm(x, weight, 1e-5))
    close(
        ops.rmsnorm(x, weight, 1e-5, weight_offset=1.0),
        reference.rmsnorm(x, weight, 1e-5, weight_offset=1.0),
    )
    kept, expected_residual = x.clone(), residual.clone()
    expected = reference.rmsnorm(x, weight, 1e-5, expected_residual)
    close(ops.rmsnorm(x, weight, 1e-5, residual), expected)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(x, kept)


def test_rmsnorm_of_heads_inside_a_fused_row() -> None:
    fused, weight = torch.randn(5, 10 * 64), torch.randn(64)
    heads = fused[:, 64 : 7 * 64].unflatten(1, (6, 64))
    close(ops.rmsnorm(heads, weight, 1e-6), reference.rmsnorm(heads, weight, 1e-6))


@pytest.mark.parametrize("width", ODD_WIDTHS)
@pytest.mark.parametrize("n", [1, 3, 90])
def test_gated_activations_equal_torch(n: int, width: int) -> None:
    x = torch.randn(n, 2 * width) * 8
    x[0, 0], x[0, -1] = -200.0, 200.0
    close(ops.silu_and_mul(x), reference.silu_and_mul(x))
    close(ops.gelu_tanh_and_mul(x), reference.gelu_tanh_and_mul(x))


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (64, 32), (12, 12), (10, 6)])
@pytest.mark.parametrize("n", [1, 40])
def test_rotary_in_place_on_views_of_a_fused_row(n: int, head_dim: int, rotary_dim: int) -> None:
    cos_sin = torch.randn(50, rotary_dim)
    positions = torch.randint(0, 50, (n,))
    fused = torch.randn(n, 7 * head_dim)
    expected = fused.clone()
    for implementation, rows in ((ops, fused), (reference, expected)):
        q, k, _ = rows.split([4 * head_dim, 2 * head_dim, head_dim], dim=1)
        implementation.rotary(positions, q, k.unflatten(1, (2, head_dim)), cos_sin, head_dim)
    close(fused, expected)


# ------------------------------------------------------------------ attention


def paged_case(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k_buffer, v_buffer, req_to_token, req_pool_indices): scattered slots, odd table rows."""
    slots = sum(lengths) + 10
    k_buffer = torch.full((slots, kv_heads, head_dim), float("nan"))
    v_buffer = k_buffer.clone()
    req_to_token = torch.full((2 * len(lengths) + 1, max(lengths) + 3), -1, dtype=torch.int32)
    order, start = torch.randperm(slots), 0
    requests = torch.arange(len(lengths)) * 2 + 1
    for request, length in zip(requests.tolist(), lengths):
        used = order[start : start + length]
        req_to_token[request, :length] = used.int()
        k_buffer[used] = torch.randn(length, kv_heads, head_dim)
        v_buffer[used] = torch.randn(length, kv_heads, head_dim)
        start += length
    return k_buffer.to(dtype), v_buffer.to(dtype), req_to_token, requests


SHAPES = [(9, 3, 64), (4, 4, 16), (10, 2, 80), (6, 1, 20), (2, 1, 128), (3, 3, 5)]
OPTIONS = [(0, 0.0), (30, 0.0), (0, 5.0), (7, 3.0)]  # (window, logit_cap)
KV_TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("window", "logit_cap"), OPTIONS)
def test_decode_attention_equals_torch(
    heads: int, kv_heads: int, head_dim: int, window: int, logit_cap: float, dtype: torch.dtype
) -> None:
    lengths = [1, 5, 127, 128, 129, 300]
    paged = paged_case(lengths, heads, kv_heads, head_dim, dtype)
    q = torch.randn(len(lengths), (heads + 2) * head_dim)[:, : heads * head_dim]
    q = q.unflatten(1, (heads, head_dim))
    arguments = (*paged, torch.tensor(lengths), head_dim**-0.5, None, window, logit_cap)
    close(ops.decode_attention(q, *arguments), reference.decode_attention(q, *arguments))


@pytest.mark.parametrize("dtype", KV_TYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
@pytest.mark.parametrize(("window", "logit_cap"), OPTIONS)
def test_extend_attention_equals_torch(
    heads: int, kv_heads: int, head_dim: int, window: int, logit_cap: float, dtype: torch.dtype
) -> None:
    prefixes, extends = [0, 0, 130, 200], [1, 140, 3, 100]
    lengths = [a + b for a, b in zip(prefixes, extends)]
    paged = paged_case(lengths, heads, kv_heads, head_dim, dtype)
    q = torch.randn(sum(extends), heads, head_dim)
    arguments = (
        *paged,
        torch.tensor(prefixes),
        torch.tensor(extends),
        head_dim**-0.5,
        None,
        window,
        logit_cap,
    )
    close(ops.extend_attention(q, *arguments), reference.extend_attention(q, *arguments))


@needs_kernels
def test_attention_of_a_request_does_not_depend_on_its_batch_or_chunks() -> None:
    lengths = [200, 31]
    keys, values, table, requests = paged_case(lengths, 9, 3, 64, torch.float32)
    paged = (keys, values, table)
    q = torch.randn(200, 9, 64)

    def extend(first: int, last: int) -> torch.Tensor:
        prefix, count = torch.tensor([first]), torch.tensor([last - first])
        return native.extend_attention(q[first:last], *paged, requests[:1], prefix, count, 0.125)

    whole = extend(0, 200)
    assert torch.equal(torch.cat([extend(0, 77), extend(77, 78), extend(78, 200)]), whole)

    both = native.decode_attention(q[:2], *paged, requests, torch.tensor(lengths), 0.125)
    alone = native.decode_attention(q[:1], *paged, requests[:1], torch.tensor([200]), 0.125)
    assert torch.equal(both[:1], alone)


@needs_kernels
def test_attention_writes_into_out_and_checks_its_inputs() -> None:
    keys, values, table, requests = paged_case([9], 4, 2, 8, torch.float32)
    paged = (keys, values, table)
    q, out, lengths = torch.randn(1, 4, 8), torch.zeros(1, 4, 8), torch.tensor([9])
    result = native.decode_attention(q, *paged, requests, lengths, 1.0, out)
    assert result is out
    assert bool(out.abs().sum() > 0)
    with pytest.raises(ValueError, match="int32"):
        native.decode_attention(q, keys, values, table.long(), requests, lengths, 1.0)
    with pytest.raises(ValueError, match="add up"):
        native.extend_attention(q, *paged, requests, lengths * 0, lengths, 1.0)


# ------------------------------------------------------------------ building and choosing


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_switch_selects_torch() -> None:
    code = (
        "import torch\nfrom sglang.srt.layers.cpu import ops\n"
        "assert not ops.available()\n"
        "assert ops.linear(torch.ones(1, 3), torch.ones(2, 3)).tolist() == [[3.0, 3.0]]"
    )
    run_python(code, **{build.SWITCH: "off"})


def test_without_a_compiler_there_is_one_warning_and_torch_works(tmp_path: Path) -> None:
    code = (
        "import torch\nfrom sglang.srt.layers.cpu import build, ops\n"
        "build.load_kernels()\nprint(ops.available(), ops.silu_and_mul(torch.zeros(1, 2)).shape)"
    )
    output = run_python(code, PATH=str(tmp_path), CXX="", HISPEC_CACHE=str(tmp_path))
    assert output.count("no C++ compiler found") == 1
    assert "False torch.Size([1, 1])" in output


def test_nothing_is_built_before_it_is_used(tmp_path: Path) -> None:
    """A server on a GPU imports the same modules."""
    code = "from sglang.srt.model_executor import model_runner\nprint(model_runner.__name__)"
    output = run_python(code, PATH=str(tmp_path), CXX="", HISPEC_CACHE=str(tmp_path))
    assert "model_runner" in output and "compiler" not in output


def test_failing_compiler_is_reported_and_leaves_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho broken >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    with pytest.raises(build.BuildError, match="broken"):
        build._built_library()
    assert not list(tmp_path.rglob("*.so"))


@needs_kernels
def test_library_shares_the_openmp_runtime_of_torch() -> None:
    mapped = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line or "libiomp5" in line or "libomp" in line
    }
    assert len(mapped) == 1, mapped


def _product_in_child(queue: multiprocessing.Queue[float]) -> None:
    queue.put(float(ops.linear(torch.ones(1, 64), torch.ones(512, 64)).sum()))


@needs_kernels
def test_kernels_work_in_a_forked_child_after_the_pool_was_used() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        ops.linear(torch.ones(1, 64), torch.ones(512, 64))
        context = multiprocessing.get_context("fork")
        queue: multiprocessing.Queue[float] = context.Queue()
        child = context.Process(target=_product_in_child, args=(queue,), daemon=True)
        child.start()
        try:
            assert queue.get(timeout=30) == 64.0 * 512
        finally:
            child.kill()
            child.join()
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_ctypes_mirrors_the_structs() -> None:
    library = build.load_kernels()
    assert library is not None
    library.hs_sizeof.restype = ctypes.c_int64
    structs = (native.PagedStruct, native.LayerStruct, native.StackStruct)
    assert [library.hs_sizeof(i) for i in range(3)] == [ctypes.sizeof(s) for s in structs]


# ------------------------------------------------------------------ all layers in one call


def make_stack(
    weight_format: ops.WeightFormat, kv_dtype: torch.dtype, extras: bool
) -> tuple[LayerStack, list[DecoderLayer], DecodeRows, torch.Tensor]:
    """Three small random layers and a step of four requests; `extras`: biases, q/k norms, gelu."""
    hidden, inner, heads, kv_heads, head_dim = 48, 72, 6, 2, 16
    lengths = [1, 40, 129, 300]
    req_to_token = torch.randperm(600, dtype=torch.int32)[: 4 * 150].view(2, 300)
    req_to_token = torch.stack([req_to_token[i % 2].roll(i) for i in range(4)])

    def product(m: int, k: int) -> Product:
        weight = torch.randn(m, k) / k**0.5
        stored = weight if weight_format == "fp32" else ops.CompressedWeight(weight, weight_format)
        return Product(weight=stored, bias=torch.randn(m) if extras else None)

    layers = [
        DecoderLayer(
            qkv=product((heads + 2 * kv_heads) * head_dim, hidden),
            o=product(hidden, heads * head_dim),
            gate_up=product(2 * inner, hidden),
            down=product(hidden, inner),
            input_norm=torch.rand(hidden),
            post_norm=torch.rand(hidden),
            k_buffer=torch.randn(600, kv_heads, head_dim).to(kv_dtype),
            v_buffer=torch.randn(600, kv_heads, head_dim).to(kv_dtype),
            q_norm=torch.rand(head_dim) if extras else None,
            k_norm=torch.rand(head_dim) if extras else None,
        )
        for _ in range(3)
    ]
    config = StackConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        eps=1e-5,
        scaling=0.25,
        activation="gelu_tanh" if extras else "silu",
        norm_offset=1.0 if extras else 0.0,
        window=50 if extras else 0,
    )
    stack = LayerStack(
        layers,
        config,
        final_norm=torch.rand(hidden),
        cos_sin=torch.randn(300, head_dim),
        req_to_token=req_to_token,
    )
    seq_lens = torch.tensor(lengths)
    rows = DecodeRows(
        positions=seq_lens - 1,
        slots=torch.tensor([590, 591, 592, 593]),
        req_pool_indices=torch.tensor([2, 0, 3, 1]),
        seq_lens=seq_lens,
    )
    for row, slot in enumerate(rows.slots.tolist()):
        req_to_token[rows.req_pool_indices[row], lengths[row] - 1] = slot
    return stack, layers, rows, torch.randn(4, hidden)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("weight_format", "kv_dtype", "extras"),
    [
        ("fp32", torch.float32, False),
        ("fp32", torch.float32, True),
        ("bf16", torch.bfloat16, False),
        ("fp32", torch.float16, True),
        ("int8", torch.float32, True),
    ],
)
def test_layer_stack_is_bitwise_the_single_operations(
    weight_format: ops.WeightFormat, kv_dtype: torch.dtype, extras: bool, threads: int
) -> None:
    stack, layers, rows, hidden = make_stack(weight_format, kv_dtype, extras)
    kept = hidden.clone()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = stack.run_single_ops(hidden, rows)
        expected_keys = [layer.k_buffer.clone() for layer in layers]
        expected_values = [layer.v_buffer.clone() for layer in layers]
        for layer in layers:
            layer.k_buffer[rows.slots] = 0
            layer.v_buffer[rows.slots] = 0
        actual = stack.run(hidden, rows)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(hidden, kept)
    assert torch.equal(actual, expected)
    for layer, keys, values in zip(layers, expected_keys, expected_values):
        assert torch.equal(layer.k_buffer, keys)
        assert torch.equal(layer.v_buffer, values)


@needs_kernels
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16])
def test_layer_stack_rounds_values_of_every_size_as_torch_does(kv_dtype: torch.dtype) -> None:
    """Values of heads are rounded to the cache's type, from its smallest ones to infinity."""
    stack, layers, rows, hidden = make_stack("fp32", kv_dtype, True)
    first = layers[0]
    assert isinstance(first.qkv.weight, torch.Tensor) and first.qkv.bias is not None
    # Of float16: between two numbers, around the largest, around the smallest with all digits.
    edges = [2049.0, 2051.0, 65504.0, 65519.0, 65520.0, 7e4, 2**-14, 2**-14 * (1 - 2**-12)]
    edges += [2**-25, 1.5 * 2**-25, 1.5 * 2**-24, 2.5 * 2**-24, 0.0, -0.0, -65520.0, -(2**-24)]
    values = torch.cat((torch.tensor(edges), torch.logspace(-10, 6, 16)))
    first.qkv.weight.zero_()
    first.qkv.bias[-len(values) :] = values
    stack.run_single_ops(hidden, rows)
    expected = first.v_buffer[rows.slots].clone()
    first.v_buffer[rows.slots] = 0
    stack.run(hidden, rows)
    assert torch.equal(first.v_buffer[rows.slots], expected)


def test_layer_stack_sees_weights_written_in_place() -> None:
    stack, layers, rows, hidden = make_stack("fp32", torch.float32, False)
    before = stack.run(hidden, rows)
    weight = layers[1].down.weight
    assert isinstance(weight, torch.Tensor)
    weight.mul_(2.0)
    after = stack.run(hidden, rows)
    assert not torch.allclose(after, before)
    close(after, stack.run_single_ops(hidden, rows))


def test_layer_stack_rejects_shapes_that_do_not_fit() -> None:
    stack, layers, rows, hidden = make_stack("fp32", torch.float32, False)
    wrong = dataclasses.replace(layers[1], o=layers[1].down)
    with pytest.raises(ValueError, match="layer 1: o is"):
        LayerStack(
            [layers[0], wrong],
            stack._config,
            final_norm=stack._final_norm,
            cos_sin=stack._cos_sin,
            req_to_token=stack._req_to_token,
        )
    if ops.available():
        with pytest.raises(ValueError, match="hidden has shape"):
            stack.run(hidden[:, :40].contiguous(), rows)


def test_a_compiler_that_cannot_be_run_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build.shutil, "which", {"g++": "/usr/bin/g++"}.get)
    monkeypatch.setenv("CXX", "/nonexistent")
    assert build._find_compiler() == "/usr/bin/g++"
    assert "CXX=/nonexistent" in caplog.text
    caplog.clear()
    monkeypatch.delenv("CXX")
    assert build._find_compiler() == "/usr/bin/g++"
    assert not caplog.records
