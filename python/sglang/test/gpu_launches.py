"""Launches of every Triton kernel with shapes of real models, for `compile_kernels`.

Tensors are never read or written, only their shapes and types count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from sglang.srt.layers.attention.triton_ops.latent_attention import (
    LatentAttentionInputs,
    latent_attention,
)
from sglang.srt.layers.attention.triton_ops.paged_attention import (
    NewTokens,
    PagedAttentionInputs,
    Workspace,
    paged_attention,
)
from sglang.srt.layers.dispatch import ExpertWeights, KVDestination
from sglang.srt.layers.mamba.ops import DeltaInputs, StateMove
from sglang.srt.layers.mamba.step_states import PrefillStates
from sglang.srt.layers.mamba.triton_ops.linear_attention import TritonLinearAttention
from sglang.srt.layers.step_frame import DecodeTables, HostRings
from sglang.srt.layers.triton_ops import step_frame
from sglang.srt.layers.triton_ops.cuda_ops import CudaOps
from sglang.srt.layers.triton_ops.store_kv import store_kv
from sglang.srt.layers.triton_ops.word_sums import word_sums
from sglang.srt.mem_cache.triton_ops.page_copy import PageCopy
from sglang.srt.platforms.cuda_transfers import HostReader, write_to_host
from sglang.srt.speculative.step_ops import DraftTables, RowTables
from sglang.srt.speculative.triton_ops.step_ops import TritonStepOps

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
OPS = CudaOps()


class Launch(NamedTuple):
    """A call that launches kernels."""

    name: str
    run: Callable[[], object]


class Heads(NamedTuple):
    """Attention of one model on one GPU."""

    queries: int
    keys: int
    dim: int


LLAMA_8B, SMOLLM, GEMMA_4B, TWO_RANKS = (
    Heads(32, 8, 128),
    Heads(9, 3, 64),
    Heads(8, 4, 256),
    Heads(16, 4, 128),
)


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# -- attention --------------------------------------------------------------------------------


def _attend(
    heads: Heads,
    requests: int,
    tokens: int,
    *,
    extend: bool = False,
    tree: bool = False,
    window: int | None = None,
    dtype: torch.dtype = BF16,
    kv_dtype: torch.dtype | None = None,
) -> None:
    """`tokens` new ones of each request; not `extend`: rotated and written by the kernel."""
    total, kv_dtype = requests * tokens, kv_dtype or dtype
    new = NewTokens(
        keys=torch.empty(total, heads.keys, heads.dim, dtype=dtype),
        values=torch.empty(total, heads.keys, heads.dim, dtype=dtype),
        positions=_ids(total),
        cos_sin=torch.empty(8192, heads.dim),
        slots=_ids(total),
    )
    inputs = PagedAttentionInputs(
        queries=torch.empty(total, heads.queries, heads.dim, dtype=dtype),
        keys=torch.empty(4096, heads.keys, heads.dim, dtype=kv_dtype),
        values=torch.empty(4096, heads.keys, heads.dim, dtype=kv_dtype),
        table=torch.empty(300, 8192, dtype=torch.int32),
        table_rows=_ids(requests),
        seq_lens=_ids(requests),
        query_lens=_ids(requests) if extend else None,
        tree_mask=torch.empty(requests, tokens, 512, dtype=torch.bool) if tree else None,
        scaling=heads.dim**-0.5,
        window=window,
        slot_map=_ids(4096) if window else None,
        positions=new.positions,
        new=None if extend else new,
    )
    paged_attention(inputs, Workspace(CPU))


def _attend_latent(requests: int, tokens: int, *, equal: bool) -> None:
    inputs = LatentAttentionInputs(
        queries=torch.empty(requests * tokens, 16, 576, dtype=BF16),
        rows=torch.empty(4096, 1, 576, dtype=BF16),
        rank=512,
        table=torch.empty(300, 8192, dtype=torch.int32),
        table_rows=_ids(requests),
        seq_lens=_ids(requests),
        query_lens=None if equal else _ids(requests),
        tree_mask=None,
        scaling=576**-0.5,
    )
    latent_attention(inputs, Workspace(CPU))


ATTENTION = [
    *(Launch(f"decode, 8B, {n} requests", partial(_attend, LLAMA_8B, n, 1))
      for n in (1, 8, 64, 256)),
    Launch("decode, 8B, float16", lambda: _attend(LLAMA_8B, 8, 1, dtype=FP16)),
    Launch("decode, 8B, 8-bit cache", lambda: _attend(LLAMA_8B, 64, 1, kv_dtype=FP8)),
    Launch("decode, 8B, float16 cache", lambda: _attend(LLAMA_8B, 64, 1, kv_dtype=FP16)),
    Launch("decode, 8B on two ranks", lambda: _attend(TWO_RANKS, 64, 1)),
    Launch("decode, SmolLM2", lambda: _attend(SMOLLM, 8, 1)),
    Launch("decode, Gemma 3, window", lambda: _attend(GEMMA_4B, 8, 1, window=1024)),
    Launch("verification of a chain, 8B, 1 request", lambda: _attend(LLAMA_8B, 1, 4)),
    Launch("verification of a chain, 8B, 64 requests", lambda: _attend(LLAMA_8B, 64, 4)),
    Launch("verification of a tree, 8B, 8 requests", lambda: _attend(LLAMA_8B, 8, 8, tree=True)),
    Launch("verification of a tree, SmolLM2", lambda: _attend(SMOLLM, 8, 16, tree=True)),
    Launch("extend, 8B, one prompt", lambda: _attend(LLAMA_8B, 1, 2048, extend=True)),
    Launch("extend, 8B, last page of a hit", lambda: _attend(LLAMA_8B, 1, 64, extend=True)),
    Launch("extend, Gemma 3, window",
           lambda: _attend(GEMMA_4B, 2, 512, extend=True, window=1024)),
    Launch("extend, float32", lambda: _attend(LLAMA_8B, 2, 64, extend=True, dtype=FP32)),
    Launch("latent decode", lambda: _attend_latent(8, 1, equal=True)),
    Launch("latent extend", lambda: _attend_latent(2, 64, equal=False)),
]  # fmt: skip


# -- products and what lies between them ------------------------------------------------------


def _linear(rows: int, out: int, width: int, *, wide: bool = False) -> None:
    x, weight = torch.empty(rows, width, dtype=BF16), torch.empty(out, width, dtype=BF16)
    if wide:
        OPS.wide_linear(x, weight)
    else:
        OPS.linear(x, weight, torch.empty(out, dtype=BF16))


def _gated_linear(rows: int, out: int, width: int) -> None:
    x, weight = torch.empty(rows, width, dtype=BF16), torch.empty(out, width, dtype=BF16)
    OPS.silu_linear(x, weight, None)


def _experts(tokens: int) -> None:
    weights = ExpertWeights(
        gate_up=torch.empty(128, 2 * 768, 2048, dtype=BF16),
        down=torch.empty(128, 2048, 768, dtype=BF16),
        activation=OPS.silu_and_mul,
    )
    factors = torch.empty(tokens, 8, dtype=BF16)
    OPS.experts(torch.empty(tokens, 2048, dtype=BF16), _ids(tokens, 8), factors, weights)


def _norms(rows: int, width: int) -> None:
    x, residual = torch.empty(2, rows, width, dtype=BF16)
    weight = torch.empty(width, dtype=BF16)
    OPS.rms_norm(x, weight, 1e-5)
    OPS.add_rms_norm(x, residual, weight, 1e-5)
    OPS.norms_side_by_side(x, residual, weight, weight, 1e-5)


def _rotate(rows: int, heads: Heads) -> None:
    q = torch.empty(rows, heads.queries * heads.dim, dtype=BF16)
    k, v = torch.empty(2, rows, heads.keys * heads.dim, dtype=BF16)
    positions, cos_sin = _ids(rows), torch.empty(8192, heads.dim)
    buffers = torch.empty(2, 4096, heads.keys, heads.dim, dtype=BF16)
    destination = KVDestination(slots=_ids(rows), key_buffer=buffers[0], value_buffer=buffers[1])
    OPS.apply_rope(q, k, positions, cos_sin, heads.dim)
    OPS.rope_and_store(q, k, v, positions, cos_sin, heads.dim, destination)
    new = torch.empty(2, rows, heads.keys, heads.dim, dtype=BF16)
    store_kv(new[0], new[1], destination.slots, destination.key_buffer, destination.value_buffer)


PRODUCTS = [
    *(Launch(f"product of {rows} rows", partial(_linear, rows, 576, 576))
      for rows in (1, 2, 4, 8)),
    *(Launch(f"gated product of {rows} rows", partial(_gated_linear, rows, 3072, 576))
      for rows in (1, 2, 8)),
    Launch("gated product of one row, 8B", lambda: _gated_linear(1, 28672, 4096)),
    Launch("product of one row, 8B down", lambda: _linear(1, 4096, 14336)),
    Launch("head, 8B, one row", lambda: _linear(1, 128_256, 4096, wide=True)),
    Launch("experts, 1 token", lambda: _experts(1)),
    Launch("experts, 64 tokens", lambda: _experts(64)),
    Launch("experts, 4,096 tokens", lambda: _experts(4096)),
]  # fmt: skip


def _rings() -> HostRings:
    """Page-locked memory is as good as any here."""
    return HostRings(inputs=_ids(4, 2000), reports=_ids(4, 600), count=_ids(1), received=_ids(2000))


def _read_from_host(dtype: torch.dtype) -> None:
    HostReader(CPU).read(torch.empty(7, dtype=dtype, device=CPU), torch.empty(7, dtype=dtype))


def _receive_decode(size: int) -> None:
    tables = DecodeTables(
        last_token_ids=_ids(300),
        req_to_token=torch.empty(300, 8192, dtype=torch.int32),
        input_ids=_ids(size),
        positions=_ids(size),
    )
    step_frame.receive_decode(_rings(), size, tables)


ELEMENTWISE = [
    Launch("norms, a few rows", lambda: _norms(4, 4096)),
    Launch("norms, many rows", lambda: _norms(4096, 2560)),
    Launch("activation", lambda: OPS.silu_and_mul(torch.empty(64, 2 * 14336, dtype=BF16))),
    Launch("activation, tanh", lambda: OPS.gelu_tanh_and_mul(torch.empty(64, 20480, dtype=BF16))),
    Launch("rotation, 8B", lambda: _rotate(64, LLAMA_8B)),
    Launch("rotation, SmolLM2", lambda: _rotate(4096, SMOLLM)),
    Launch("largest logit", lambda: OPS.checked_argmax(torch.empty(64, 128_256))),
    Launch("rows of the embedding",
           lambda: OPS.take_rows(torch.empty(4096, 4096, dtype=BF16), _ids(64))),
    Launch("sum of rows", lambda: OPS.add_rows(*torch.empty(3, 64, 4096, dtype=BF16))),
    Launch("token ids to the host", lambda: write_to_host(_ids(2, 64))),
    Launch("slots to the device", lambda: _read_from_host(torch.int32)),
    Launch("flags to the device", lambda: _read_from_host(torch.bool)),
    Launch("inputs of a captured step", lambda: step_frame.receive(_rings(), 1576)),
    Launch("inputs of a captured decode step", lambda: _receive_decode(64)),
    Launch("choice and report of a captured step", lambda: step_frame.choose_and_report(
        _rings(), torch.empty(64, 128_256), _ids(64), _ids(300))),
]  # fmt: skip


# -- speculation, recurrent states, copies -----------------------------------------------------


def _speculate(requests: int, nodes: int, vocab_size: int) -> None:
    ops, rows = TritonStepOps(), _ids(requests)
    tables = RowTables(
        req_to_token=torch.empty(300, 8192, dtype=torch.int32),
        committed_lens=_ids(300),
        last_token_ids=_ids(300),
        padding_row=299,
    )
    draft = DraftTables(token_ids=_ids(300, 4), hidden=torch.empty(300, 4096, dtype=BF16))
    hot, states = _ids(vocab_size), torch.empty(requests, 4096, dtype=BF16)
    places = ops.places(rows, tables, nodes, 8192)
    token_ids, _ = ops.start_chain(rows, places.root_ids, draft, nodes)
    ops.write_best(torch.empty(requests, vocab_size), hot, token_ids[:, 0])
    ops.remember(rows, torch.empty(requests, vocab_size), hot, states, rows, draft)
    accept, _ = ops.accept_best(torch.empty(requests * nodes, vocab_size), token_ids, None)
    ops.advance(rows, places.lens[0], accept, tables)


def _recur(requests: int, tokens: int) -> None:
    """Qwen3-Next: 16 key heads and 32 value heads of 128."""
    ops, total = TritonLinearAttention(), requests * tokens
    slots = _ids(requests)
    states = torch.empty(8, 32, 128, 128)
    inputs = DeltaInputs(
        query=torch.empty(total, 16, 128, dtype=BF16),
        key=torch.empty(total, 16, 128, dtype=BF16),
        value=torch.empty(total, 32, 128, dtype=BF16),
        a=torch.empty(total, 32, dtype=BF16),
        b=torch.empty(total, 32, dtype=BF16),
        log_rate=torch.empty(32),
        dt_bias=torch.empty(32),
    )
    if tokens > 1:
        step = PrefillStates(
            sources=slots,
            num_conv_rows=total + 3 * requests,
            token_rows=_ids(total),
            history_rows=_ids(3 * requests),
            last_rows=_ids(3 * requests),
            snapshot_rows=_ids(0),
            snapshot_slots=_ids(0),
            chunks=[],
            chunk_table=_ids(3, requests),
            chunk_starts=_ids(requests + 1),
        )
        ops.delta_prefill(inputs, states, slots, step)
        return
    move = StateMove(source=states, source_slots=slots, target=states, target_slots=slots)
    ops.delta_step(inputs, move)
    x, taps = torch.empty(requests, 8192, dtype=BF16), torch.empty(8, 8192, 3, dtype=BF16)
    conv = StateMove(source=taps, source_slots=slots, target=taps, target_slots=slots)
    ops.conv_step(x, torch.empty(8192, 4, dtype=BF16), conv)
    rows = torch.empty(total * 32, 128, dtype=BF16)
    ops.gated_norm(rows, rows, torch.empty(128, dtype=BF16), 1e-6)


def _copy_pages(piece: int, pages: int, *, to_host: bool) -> None:
    sides = torch.empty(2, 2, 2, 64, piece, dtype=torch.int64)
    copy = PageCopy(list(sides[0]), list(sides[1]), _ids(2, pages), to_host=to_host)
    copy.launch(range(2))


OTHERS = [
    Launch("speculation, a chain", lambda: _speculate(1, 4, 128_256)),
    Launch("speculation, many requests", lambda: _speculate(300, 4, 49_152)),
    Launch("delta rule, prompt", lambda: _recur(2, 64)),
    Launch("delta rule, one token", lambda: _recur(8, 1)),
    *(Launch(f"pages {'to the host' if to_host else 'to the device'}, {piece} words",
             partial(_copy_pages, piece, 9, to_host=to_host))
      for piece in (256, 16_384) for to_host in (False, True)),
    Launch("fingerprint", lambda: word_sums([torch.zeros(1 << 20, dtype=torch.uint8)])),
]  # fmt: skip

GROUPS = {
    "attention": ATTENTION,
    "products": PRODUCTS,
    "elementwise": ELEMENTWISE,
    "others": OTHERS,
}
