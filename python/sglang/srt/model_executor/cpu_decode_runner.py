"""Decode steps of few requests on the CPU: all layers in one native call.

At batch 1 a step reads every weight once; what is lost beside that is lost between operations.
`layers.cpu.layer_stack` goes through the layers with the threads awake, and may read compressed
copies of the weights. Owns those copies. Serves dense Llama-like models on one rank in float32;
everything else goes module by module. Scheduler thread only.
"""

from __future__ import annotations

import logging
import time
from typing import Literal, cast

import numpy as np
import torch

from sglang.srt.layers.cpu import ops
from sglang.srt.layers.cpu.layer_stack import (
    DecoderLayer,
    DecodeRows,
    LayerStack,
    Product,
    StackConfig,
)
from sglang.srt.layers.linear import (
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.decode_runner import StagedStep, is_plain_decode
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.models.base import LanguageModel
from sglang.srt.models.llama import GatedMLP, LlamaDecoderLayer, LlamaForCausalLM

logger = logging.getLogger(__name__)

_ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {
    "silu": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}


class CpuDecodeRunner:
    """See the module docstring. Holds references to the parameters: they must not be rebound."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        *,
        weight_format: str,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: MHATokenToKVPool,
    ) -> None:
        """`weight_format`: "auto" (the smallest that keeps every value), or a format's name."""
        self.num_steps = 0
        self._model = model
        self._weight_format = weight_format
        self._req_to_token_pool = req_to_token_pool
        self._token_to_kv_pool = token_to_kv_pool
        self._build()

    def _build(self) -> None:
        """Choose formats, make the compressed copies and describe the layers to the kernels."""
        start = time.perf_counter()
        model = self._model
        self._compressed: list[ops.CompressedWeight] = []
        modules = [cast(LlamaDecoderLayer, layer) for layer in model.model.layers]
        layers = [
            self._describe(layer, self._token_to_kv_pool, layer_id)
            for layer_id, layer in enumerate(modules)
        ]
        config, attention = model.config, modules[0].self_attn.attn
        self._stack = LayerStack(
            layers,
            StackConfig(
                num_heads=attention.num_heads,
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.head_dim,
                eps=config.rms_norm_eps,
                scaling=attention.scaling,
                activation=_ACTIVATIONS[config.hidden_act],
                window=config.sliding_windows[0] or 0,
            ),
            final_norm=model.model.norm.weight.data,
            cos_sin=model.model.rotary_emb.cos_sin,
            req_to_token=self._req_to_token_pool.req_to_token,
        )
        self._head = self._pack(model.lm_head.weight.data)
        logger.info(
            "CPU decode: %d layers in one call, %d of %d matrices compressed (%s), %.2f s",
            len(layers),
            len(self._compressed),
            4 * len(layers) + 1,
            self._weight_format,
            time.perf_counter() - start,
        )

    def stage(self, step: np.ndarray) -> StagedStep | None:
        """Nothing to stage: inputs are read where they are."""
        return None

    def can_run(self, batch: ForwardBatch) -> bool:
        """Plain decode of as many requests as the own products are faster for than torch's."""
        return is_plain_decode(batch) and batch.batch_size <= ops.small_rows()

    def spared_bytes(self, batch_size: int) -> int:
        """Bytes of weights that a step does not read, for benchmarks: of sources of copies."""
        if batch_size > ops.small_rows():
            return 0
        return sum(weight.source.nbytes - weight.num_bytes for weight in self._compressed)

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput:
        """One decode step."""
        self.num_steps += 1
        hidden = self._model.model.embed_tokens(batch.input_ids)
        rows = DecodeRows(
            positions=batch.positions,
            slots=batch.out_cache_loc,
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
        )
        logits = ops.linear(self._stack.run(hidden, rows), self._head)
        return LogitsProcessorOutput(next_token_logits=logits)

    def weights_changed(self) -> None:
        """Make the compressed copies anew; "auto" keeps its promise that no value is lost."""
        if self._weight_format == "auto" and any(
            ops.find_lossless_format(weight.source) != weight.weight_format
            for weight in self._compressed
        ):
            self._build()
            return
        for weight in self._compressed:
            weight.refresh()

    def _describe(
        self, layer: LlamaDecoderLayer, pool: MHATokenToKVPool, layer_id: int
    ) -> DecoderLayer:
        attention, mlp = layer.self_attn, cast(GatedMLP, layer.mlp)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        return DecoderLayer(
            qkv=self._product(attention.qkv_proj),
            o=self._product(attention.o_proj),
            gate_up=self._product(mlp.gate_up_proj),
            down=self._product(mlp.down_proj),
            input_norm=layer.input_layernorm.weight.data,
            post_norm=layer.post_attention_layernorm.weight.data,
            k_buffer=pool.get_key_buffer(layer_id),
            v_buffer=pool.get_value_buffer(layer_id),
            q_norm=None if q_norm is None else q_norm.weight.data,
            k_norm=None if k_norm is None else k_norm.weight.data,
        )

    def _product(
        self, linear: QKVParallelLinear | MergedColumnParallelLinear | RowParallelLinear
    ) -> Product:
        bias = None if linear.bias is None else linear.bias.data
        return Product(weight=self._pack(linear.weight.data), bias=bias)

    def _pack(self, weight: torch.Tensor) -> torch.Tensor | ops.CompressedWeight:
        name = self._weight_format
        if name == "auto":
            name = ops.find_lossless_format(weight)
        if name == "fp32":
            return weight
        compressed = ops.CompressedWeight(weight, name)  # type: ignore[arg-type]
        self._compressed.append(compressed)
        return compressed


def why_not_supported(model: LanguageModel, num_ranks: int) -> str | None:
    """A reason why decode steps of `model` must go module by module; None where they need not."""
    if not ops.available():
        return "the CPU kernels are not in use"
    if num_ranks > 1:
        return "the model is split over ranks"
    if next(model.parameters()).dtype != torch.float32:
        return "the model is not in float32"
    if not isinstance(model, LlamaForCausalLM) or model.config.hidden_act not in _ACTIVATIONS:
        return "the model is not of the Llama kind"
    if not model.is_plain:
        return "the model's layers do more than Llama's"
    if model.config.mla is not None:
        return "the model's attention is latent"
    if not all(isinstance(layer.mlp, GatedMLP) for layer in model.model.layers):
        return "the model has experts"
    if len(set(model.config.sliding_windows)) != 1:
        return "the layers' attention windows differ"
    return None
