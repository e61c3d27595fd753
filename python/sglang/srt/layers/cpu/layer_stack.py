"""All decoder layers of one decode step in one call.

Owns the description of a stack (which tensors, which sizes) and its two ways to run: one C++ call
that goes through every layer with the threads awake, or the single operations of `ops` one after
the other where the kernels are not in use. Both give the same bits when the kernels are in use.
Built once by the model's owner; holds references to the tensors, so weights may be written in
place at any time between steps, but not rebound. One model thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sglang.srt.layers.cpu import native, ops
from sglang.srt.layers.cpu.weights import CompressedWeight

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """y = x weight^T + bias; weight [out, in] float32 or compressed, bias [out] or None."""

    weight: torch.Tensor | CompressedWeight
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayer:
    """Tensors of one pre-norm layer; norms [hidden] float32, q_norm and k_norm [head_dim].

    `qkv` stacks the rows of q, k and v; `gate_up` those of gate and up. `k_buffer` and `v_buffer`
    [slots, kv_heads, head_dim] are the layer's part of the KV pool: float32, bfloat16 or
    float16.
    """

    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StackConfig:
    """What the layers share. `window` and `logit_cap` as in `ops.decode_attention`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scaling: float
    activation: Activation = "silu"
    norm_offset: float = 0.0
    window: int = 0
    logit_cap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """One decode step, one row per request; integer vectors [n] on the CPU.

    `seq_lens` count the new token; `slots` say where its keys and values go.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor


class LayerStack:
    """The layers between embedding and output product, final norm included."""

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        config: StackConfig,
        *,
        final_norm: torch.Tensor,
        cos_sin: torch.Tensor,
        req_to_token: torch.Tensor,
    ) -> None:
        """cos_sin float32 [positions, rotary_dim]; req_to_token int32 [requests, positions].

        Raises ValueError where shapes do not fit.
        """
        self._layers = tuple(layers)
        self._config = config
        self._final_norm = final_norm
        self._cos_sin = cos_sin
        self._req_to_token = req_to_token
        self._hidden = final_norm.shape[0]
        self._check()
        self._native = self._make_native() if ops.available() else None

    def run(self, hidden: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        """Embeddings [n, hidden] -> normed hidden states [n, hidden]; writes the new KV.

        Meant for n <= ops.small_rows(); more rows work but torch's products would be faster.
        """
        if self._native is not None:
            return native.layer_stack(
                self._native,
                hidden,
                rows.positions,
                rows.slots,
                rows.req_pool_indices,
                rows.seq_lens,
            )
        return self.run_single_ops(hidden, rows)

    def run_single_ops(self, hidden: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        """The same by single operations: the fall-back, and what the tests compare with."""
        residual = hidden.clone()
        x: torch.Tensor | None = None
        for layer in self._layers:
            x = self._run_layer(layer, x, residual, rows)
        return self._norm(x, residual, self._final_norm)

    def _norm(
        self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        config = self._config
        if x is None:
            return ops.rmsnorm(residual, weight, config.eps, None, config.norm_offset)
        return ops.rmsnorm(x, weight, config.eps, residual, config.norm_offset)

    def _run_layer(
        self,
        layer: DecoderLayer,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        rows: DecodeRows,
    ) -> torch.Tensor:
        config = self._config
        normed = self._norm(x, residual, layer.input_norm)
        qkv = ops.linear(normed, layer.qkv.weight, layer.qkv.bias)
        q, k, v = qkv.unflatten(1, (-1, config.head_dim)).split(
            [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rmsnorm(q, layer.q_norm, config.eps, None, config.norm_offset)
            k = ops.rmsnorm(k, layer.k_norm, config.eps, None, config.norm_offset)
        ops.rotary(rows.positions, q, k, self._cos_sin, config.head_dim)
        slots = rows.slots.long()
        layer.k_buffer[slots] = k.to(layer.k_buffer.dtype)
        layer.v_buffer[slots] = v.to(layer.v_buffer.dtype)
        attended = ops.decode_attention(
            q,
            layer.k_buffer,
            layer.v_buffer,
            self._req_to_token,
            rows.req_pool_indices,
            rows.seq_lens,
            config.scaling,
            None,
            config.window,
            config.logit_cap,
        )
        projected = ops.linear(attended.flatten(1), layer.o.weight, layer.o.bias)
        normed = self._norm(projected, residual, layer.post_norm)
        gate_up = ops.linear(normed, layer.gate_up.weight, layer.gate_up.bias)
        gated = ops.silu_and_mul if config.activation == "silu" else ops.gelu_tanh_and_mul
        return ops.linear(gated(gate_up), layer.down.weight, layer.down.bias)

    def _check(self) -> None:
        config, hidden = self._config, self._hidden
        q_size = config.num_heads * config.head_dim
        kv_shape = (config.num_kv_heads, config.head_dim)
        if not self._layers:
            raise ValueError("a stack needs at least one layer")
        inner = _shape(self._layers[0].down)[1]
        expected = {
            "qkv": (q_size + 2 * config.num_kv_heads * config.head_dim, hidden),
            "o": (hidden, q_size),
            "gate_up": (2 * inner, hidden),
            "down": (hidden, inner),
        }
        for index, layer in enumerate(self._layers):
            for name, shape in expected.items():
                if _shape(getattr(layer, name)) != shape:
                    found = _shape(getattr(layer, name))
                    raise ValueError(f"layer {index}: {name} is {found}, expected {shape}")
            for buffer in (layer.k_buffer, layer.v_buffer):
                first = self._layers[0].k_buffer
                if tuple(buffer.shape[1:]) != kv_shape or buffer.stride() != first.stride():
                    raise ValueError(f"layer {index}: KV buffer {tuple(buffer.shape)} does not fit")
                if buffer.dtype != first.dtype:
                    raise ValueError("KV buffers differ in type")

    def _make_native(self) -> native.StackPointers:
        config, first = self._config, self._layers[0]
        paged = native.make_paged(
            config.num_heads,
            first.k_buffer,
            first.v_buffer,
            self._req_to_token,
            config.scaling,
            config.window,
            config.logit_cap,
        )
        layers = (native.LayerStruct * len(self._layers))()
        for target, layer in zip(layers, self._layers):
            for name in ("qkv", "o", "gate_up", "down"):
                product: Product = getattr(layer, name)
                setattr(target, name, native.make_weight(product.weight, product.bias))
            for name, size in (
                ("input_norm", self._hidden),
                ("post_norm", self._hidden),
                ("q_norm", config.head_dim),
                ("k_norm", config.head_dim),
            ):
                setattr(target, name, native.vector_pointer(name, getattr(layer, name), size))
            target.k, target.v = layer.k_buffer.data_ptr(), layer.v_buffer.data_ptr()
        stack = native.StackStruct(
            ctypes.cast(layers, ctypes.c_void_p),
            len(self._layers),
            self._hidden,
            _shape(first.down)[1],
            native.vector_pointer("final_norm", self._final_norm, self._hidden),
            native.matrix_pointer("cos_sin", self._cos_sin),
            self._cos_sin.shape[1],
            native.SILU if config.activation == "silu" else native.GELU_TANH,
            config.eps,
            config.norm_offset,
            paged,
        )
        return native.StackPointers(stack=stack, layers=layers, hidden=self._hidden)


def _shape(product: Product) -> tuple[int, ...]:
    weight = product.weight
    return tuple((weight.data if isinstance(weight, CompressedWeight) else weight).shape)
