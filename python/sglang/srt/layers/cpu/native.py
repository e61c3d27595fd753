"""Calls of the C++ kernels: check shapes and types, pass pointers and strides.

Owns the ctypes declarations, which mirror `kernels.cpp`. Callers use `ops`, never this module. The
library is passed in once by `bind`; ctypes releases the interpreter lock during each call. One
model thread at a time should call: two would share the OpenMP pool.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch.nn import functional

from sglang.srt.layers.cpu.weights import CompressedWeight

# Up to this many rows the own product is at least as fast as torch's (measured by bench_cpu_ops.py
# with AVX-512: 1.0 to 1.2 times at 32 rows, 1.2 to 3 times from 2 to 16). `bind` sets it.
SMALL_ROWS = 8
_SMALL_ROWS_AVX512 = 32

_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}
_KV_TYPES = (torch.float32, torch.bfloat16, torch.float16)
SILU, GELU_TANH = 0, 1
_MAX_GROUP = 64  # query heads of one KV head; a fixed array in the kernel


class WeightStruct(ctypes.Structure):
    """`Weight` of linear.h."""

    _fields_ = [
        ("data", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("m", c_int64),
        ("k", c_int64),
        ("format", c_int64),
    ]


class PagedStruct(ctypes.Structure):
    """`Paged` of decode_attention.h."""

    _fields_ = [
        ("k", c_void_p),
        ("v", c_void_p),
        ("ldk", c_int64),
        ("ldv", c_int64),
        ("format", c_int64),
        ("req_to_token", c_void_p),
        ("ld_table", c_int64),
        ("q_heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("window", c_int64),
        ("scaling", c_float),
        ("logit_cap", c_float),
    ]


class LayerStruct(ctypes.Structure):
    """`Layer` of layer_stack.h."""

    _fields_ = [
        ("qkv", WeightStruct),
        ("o", WeightStruct),
        ("gate_up", WeightStruct),
        ("down", WeightStruct),
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
    ]


class StackStruct(ctypes.Structure):
    """`Stack` of layer_stack.h."""

    _fields_ = [
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("inter", c_int64),
        ("final_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("rot_dim", c_int64),
        ("act", c_int64),
        ("eps", c_float),
        ("norm_offset", c_float),
        ("paged", PagedStruct),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPointers:
    """A stack as the kernel wants it; `layers` keeps alive what `stack.layers` points to."""

    stack: StackStruct
    layers: ctypes.Array[LayerStruct]
    hidden: int


_P, _I, _F = c_void_p, c_int64, c_float
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "hs_linear": (_P, _I, _P, _P, _I, _I, _P, _I, _P, _I, _I, c_int),
    "hs_rmsnorm": (_P, _I, _P, _I, _P, _F, _F, _P, _I, _I, _I, _I, c_int),
    "hs_act_and_mul": (_P, _I, _P, _I, _I, _I, c_int, c_int),
    "hs_rotary": (_P, _P, _I, _I, _P, _I, _I, _P, _I, _I, _I, c_int),
    "hs_decode_attention": (_P, _P, _I, _P, _P, _I, _P, _I, c_int),
    "hs_extend_attention": (_P, _P, _I, _P, _P, _P, _I, _P, _I, c_int),
    "hs_layer_stack": (_P, _P, _P, _P, _P, _P, _I, _P, c_int),
    "hs_word_sums": (_P, _I, _P, c_int),
    "hs_read": (_P, _I, c_int),
}

_lib: ctypes.CDLL
_pool_was_forked = False


def bind(library: ctypes.CDLL) -> None:
    """Declare the entry points of `library` and use it from now on."""
    global _lib, SMALL_ROWS
    for name, argument_types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = argument_types
        function.restype = c_float if name == "hs_read" else None
    if library.hs_vector_lanes() == 16:
        SMALL_ROWS = _SMALL_ROWS_AVX512
    _lib = library


def _after_fork_in_child() -> None:
    # OpenMP's threads do not survive a fork and waiting for them would hang: stay with one.
    global _pool_was_forked
    _pool_was_forked = True


os.register_at_fork(after_in_child=_after_fork_in_child)


def _num_threads() -> int:
    return 1 if _pool_was_forked else torch.get_num_threads()


# ------------------------------------------------------------------ checks


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_float32_rows(name: str, x: torch.Tensor) -> None:
    """Float32 on the CPU, [n, ...] with all but the first dimension without gaps."""
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        raise ValueError(f"{name} must be float32 on the CPU, not {x.dtype} on {x.device}")
    stride = 1
    for size, step in zip(reversed(x.shape[1:]), reversed(x.stride()[1:])):
        if step != stride and size != 1:
            raise ValueError(f"{name} has gaps inside its rows: {x.shape}, strides {x.stride()}")
        stride *= size


def _check_vector(name: str, x: torch.Tensor, size: int) -> None:
    if x.dtype is not torch.float32 or x.shape != (size,) or not x.is_contiguous():
        raise ValueError(f"{name} must be float32 [{size}], not {x.dtype} {tuple(x.shape)}")


def _index_vector(x: torch.Tensor) -> torch.Tensor:
    """As contiguous int64 on the CPU (a copy only where it is something else)."""
    return x.to(device="cpu", dtype=torch.int64).contiguous()


# ------------------------------------------------------------------ linear


def _stored(
    weight: torch.Tensor | CompressedWeight,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The matrix as the kernels read it, and the scales of its rows (int8 only)."""
    if isinstance(weight, CompressedWeight):
        return weight.data, weight.scale
    if weight.dtype not in _FORMATS or weight.dtype is torch.int8 or not weight.is_contiguous():
        raise ValueError(f"weight of {weight.dtype}, strides {weight.stride()} is not supported")
    return weight, None


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | CompressedWeight,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.linear`."""
    n = x.shape[0]
    if n > SMALL_ROWS:
        full = weight.source if isinstance(weight, CompressedWeight) else weight
        return functional.linear(x, full.to(x.dtype), bias)
    data, scale = _stored(weight)
    _check_float32_rows("x", x)
    m, k = data.shape
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"x {tuple(x.shape)} does not fit weight {tuple(data.shape)}")
    if bias is not None:
        _check_vector("bias", bias, m)
    y = torch.empty(n, m)
    _lib.hs_linear(
        data.data_ptr(),
        _FORMATS[data.dtype],
        None if scale is None else scale.data_ptr(),
        None if bias is None else bias.data_ptr(),
        m,
        k,
        x.data_ptr(),
        x.stride(0),
        y.data_ptr(),
        m,
        n,
        _num_threads(),
    )
    return y


# ------------------------------------------------------------------ digests


def word_sums(data: torch.Tensor) -> tuple[int, int]:
    """See `ops.word_sums`."""
    _check_bytes(data)
    sums = (ctypes.c_uint64 * 2)()
    _lib.hs_word_sums(data.data_ptr(), data.numel(), sums, _num_threads())
    return sums[0], sums[1]


def _check_bytes(data: torch.Tensor) -> None:
    if data.dtype is not torch.uint8 or data.device.type != "cpu" or not data.is_contiguous():
        raise ValueError(f"expected contiguous bytes on the CPU, got {data.dtype} on {data.device}")


# ------------------------------------------------------------------ elementwise


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """See `ops.rmsnorm`."""
    _check_float32_rows("x", x)
    size = x.shape[-1]
    _check_vector("weight", weight, size)
    heads = x.shape[1] if x.ndim == 3 else 1
    if residual is not None:
        _check_float32_rows("residual", residual)
        _require(residual.shape == x.shape, "residual and x differ in shape")
    out = torch.empty(x.shape)
    _lib.hs_rmsnorm(
        x.data_ptr(),
        x.stride(0),
        None if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        weight_offset,
        eps,
        out.data_ptr(),
        heads * size,
        x.shape[0],
        heads,
        size,
        _num_threads(),
    )
    return out


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `ops.silu_and_mul`."""
    return _act_and_mul(x, SILU)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `ops.gelu_tanh_and_mul`."""
    return _act_and_mul(x, GELU_TANH)


def _act_and_mul(x: torch.Tensor, activation: int) -> torch.Tensor:
    _check_float32_rows("x", x)
    _require(x.ndim == 2 and x.shape[1] % 2 == 0, f"x must be [n, 2 * d], not {tuple(x.shape)}")
    n, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(n, size)
    _lib.hs_act_and_mul(
        x.data_ptr(), x.stride(0), out.data_ptr(), size, n, size, activation, _num_threads()
    )
    return out


def rotary(
    positions: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    head_dim: int,
) -> None:
    """See `ops.rotary`."""
    n, rotary_dim = q.shape[0], cos_sin.shape[1]
    for name, x in (("q", q), ("k", k), ("cos_sin", cos_sin)):
        _check_float32_rows(name, x)
    _require(cos_sin.is_contiguous() and rotary_dim <= head_dim, "cos_sin does not fit")
    q_size, k_size = q[0].numel() if n else 0, k[0].numel() if n else 0
    _require(q_size % head_dim == 0 and k_size % head_dim == 0, "rows are not whole heads")
    positions = _index_vector(positions)
    _require(positions.shape == (n,) and k.shape[0] == n, "positions, q and k differ in length")
    _lib.hs_rotary(
        positions.data_ptr(),
        q.data_ptr(),
        q.stride(0),
        q_size // head_dim,
        k.data_ptr(),
        k.stride(0),
        k_size // head_dim,
        cos_sin.data_ptr(),
        head_dim,
        rotary_dim,
        n,
        _num_threads(),
    )


# ------------------------------------------------------------------ attention


def make_paged(
    num_heads: int,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    scaling: float,
    window: int,
    logit_cap: float,
) -> PagedStruct:
    """Check one layer's KV and describe it. Raises ValueError where the kernels cannot read it."""
    kv_heads, head_dim = k_buffer.shape[1:]
    dtype = k_buffer.dtype
    _require(num_heads % kv_heads == 0, f"{num_heads} heads over {kv_heads} KV heads")
    _require(num_heads // kv_heads <= _MAX_GROUP, f"more than {_MAX_GROUP} heads per KV head")
    _require(v_buffer.shape == k_buffer.shape, "keys and values differ in shape")
    _require(dtype in _KV_TYPES, f"KV of {dtype} is not supported")
    for buffer in (k_buffer, v_buffer):
        _require(buffer.dtype == dtype, "keys and values differ in type")
        _require(buffer.stride(2) == 1 and buffer.stride(1) == head_dim, "KV rows have gaps")
    _require(req_to_token.dtype == torch.int32, "req_to_token must be int32")
    _require(req_to_token.stride(1) == 1, "req_to_token rows have gaps")
    return PagedStruct(
        k_buffer.data_ptr(),
        v_buffer.data_ptr(),
        k_buffer.stride(0),
        v_buffer.stride(0),
        _FORMATS[dtype],
        req_to_token.data_ptr(),
        req_to_token.stride(0),
        num_heads,
        kv_heads,
        head_dim,
        window,
        scaling,
        logit_cap,
    )


def _paged(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    scaling: float,
    window: int,
    logit_cap: float,
) -> PagedStruct:
    _check_float32_rows("q", q)
    _require(q.ndim == 3 and q.shape[2] == k_buffer.shape[2], "q must be [n, heads, head_dim]")
    return make_paged(q.shape[1], k_buffer, v_buffer, req_to_token, scaling, window, logit_cap)


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
    out: torch.Tensor | None = None,
    window: int = 0,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """See `ops.decode_attention`."""
    paged = _paged(q, k_buffer, v_buffer, req_to_token, scaling, window, logit_cap)
    out = _checked_out(q, out)
    requests, lengths = _index_vector(req_pool_indices), _index_vector(seq_lens)
    _require(requests.shape == lengths.shape == q.shape[:1], "one request and length per query")
    _lib.hs_decode_attention(
        ctypes.byref(paged),
        q.data_ptr(),
        q.stride(0),
        requests.data_ptr(),
        lengths.data_ptr(),
        q.shape[0],
        out.data_ptr(),
        out.stride(0),
        _num_threads(),
    )
    return out


def extend_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
    scaling: float,
    out: torch.Tensor | None = None,
    window: int = 0,
    logit_cap: float = 0.0,
) -> torch.Tensor:
    """See `ops.extend_attention`."""
    paged = _paged(q, k_buffer, v_buffer, req_to_token, scaling, window, logit_cap)
    out = _checked_out(q, out)
    requests, prefixes = _index_vector(req_pool_indices), _index_vector(prefix_lens)
    starts = functional.pad(_index_vector(extend_lens).cumsum(0), (1, 0))
    _require(requests.shape == prefixes.shape and len(starts) == len(requests) + 1, "lengths")
    _require(int(starts[-1]) == q.shape[0], "extend_lens do not add up to the rows of q")
    _lib.hs_extend_attention(
        ctypes.byref(paged),
        q.data_ptr(),
        q.stride(0),
        requests.data_ptr(),
        prefixes.data_ptr(),
        starts.data_ptr(),
        len(requests),
        out.data_ptr(),
        out.stride(0),
        _num_threads(),
    )
    return out


def _checked_out(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return torch.empty(q.shape)
    _check_float32_rows("out", out)
    _require(out.shape == q.shape, "out and q differ in shape")
    return out


# ------------------------------------------------------------------ whole stacks


def make_weight(weight: torch.Tensor | CompressedWeight, bias: torch.Tensor | None) -> WeightStruct:
    """Describe a product. Raises ValueError where the kernels cannot read it."""
    data, scale = _stored(weight)
    m, k = data.shape
    return WeightStruct(
        data.data_ptr(),
        None if scale is None else scale.data_ptr(),
        vector_pointer("bias", bias, m),
        m,
        k,
        _FORMATS[data.dtype],
    )


def vector_pointer(name: str, x: torch.Tensor | None, size: int) -> int | None:
    """Address of a float32 vector of that size; None stays None."""
    if x is None:
        return None
    _check_vector(name, x, size)
    return x.data_ptr()


def matrix_pointer(name: str, x: torch.Tensor) -> int:
    """Address of a contiguous float32 tensor."""
    _check_float32_rows(name, x)
    _require(x.is_contiguous(), f"{name} is not contiguous")
    return x.data_ptr()


def layer_stack(
    pointers: StackPointers,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
) -> torch.Tensor:
    """See `layer_stack.LayerStack.run`."""
    address = matrix_pointer("hidden", hidden)
    n = hidden.shape[0]
    _require(hidden.shape == (n, pointers.hidden), f"hidden has shape {tuple(hidden.shape)}")
    vectors = [_index_vector(x) for x in (positions, slots, req_pool_indices, seq_lens)]
    _require(all(x.shape == (n,) for x in vectors), "index vectors differ in length")
    out = torch.empty(n, pointers.hidden)
    _lib.hs_layer_stack(
        ctypes.byref(pointers.stack),
        address,
        *(x.data_ptr() for x in vectors),
        n,
        out.data_ptr(),
        _num_threads(),
    )
    return out


# ------------------------------------------------------------------ measuring


def read_all(x: torch.Tensor) -> float:
    """Read a contiguous float32 tensor once with all threads; returns its sum (for benchmarks)."""
    _check_float32_rows("x", x)
    return float(_lib.hs_read(x.data_ptr(), x.numel(), _num_threads()))
