"""Prefill steps at start, so that no request pays for what the first use of a size costs.

On a GPU that is compiling kernels, choosing algorithms of the libraries and growing the memory of
activations. Requests of the warm-up write to the dummy slot and read from it: no cache, table or
allocator changes. Called by `ModelRunner` once, on the scheduler thread (the libraries keep what
they have planned per thread); collective over the ranks, which must agree on `max_tokens`.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple, Protocol

import torch
from tqdm import tqdm

from sglang.srt.layers.attention.base import AttentionBackend
from sglang.srt.layers.dispatch import send_to_host
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.platforms import current_platform

logger = logging.getLogger(__name__)

# Batches are compiled for by powers of eight: these stand for up to 1, 8 and 64 prompts.
_BATCH_SIZES = (1, 2, 9)
_SHORT_PROMPT = 64
# Of all steps together: some seconds with a model that fills a GPU.
_MAX_WARM_UP_TOKENS = 160_000


class WarmableRunner(Protocol):
    """What is warmed up."""

    @property
    def attn_backend(self) -> AttentionBackend: ...

    @property
    def req_to_token_pool(self) -> ReqToTokenPool: ...

    @property
    def token_to_kv_pool(self) -> KVCache: ...

    @property
    def device(self) -> torch.device: ...

    def forward(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput: ...


class PrefillShape(NamedTuple):
    """A prefill step of equal prompts without prefix."""

    num_prompts: int
    length: int


def warm_up_shapes(max_tokens: int, plan_lengths: list[int]) -> list[PrefillShape]:
    """The steps to try: short prompts, few and many; then one prompt of each of `plan_lengths`.

    The longest that may occur, `max_tokens`, comes last, also if it has no plan of its own.
    Lengths are left out, longest first, where all together would take too long.
    """
    short = min(_SHORT_PROMPT, max_tokens)
    shapes = [PrefillShape(n, short) for n in _BATCH_SIZES if n * short <= max_tokens]
    left = _MAX_WARM_UP_TOKENS - sum(n * length for n, length in shapes)
    for length in sorted({*plan_lengths, max_tokens}):
        left -= length
        if left >= 0 and length > short:
            shapes.append(PrefillShape(1, length))
    return shapes


@torch.inference_mode()
def warm_up_prefill(runner: WarmableRunner, max_tokens: int, show_progress: bool) -> None:
    """Run each shape once. `max_tokens`: of the longest prefill step of one request."""
    start = time.perf_counter()
    shapes = warm_up_shapes(max_tokens, runner.attn_backend.planned_prefill_lengths(max_tokens))
    bar = tqdm(shapes, desc="warming up prefill", unit="size", disable=not show_progress)
    for shape in bar:
        runner.forward(_dummy_batch(runner, shape))
    for dtype in (torch.int64, torch.int32, torch.bool):
        current_platform().to_device_async(torch.zeros(1, dtype=dtype))
        send_to_host(torch.zeros(1, dtype=dtype, device=runner.device))
    current_platform().synchronize()
    logger.info(
        "warmed up prefill steps of %d sizes (up to %d tokens) in %.1f s",
        len(shapes),
        shapes[-1].num_prompts * shapes[-1].length,
        time.perf_counter() - start,
    )


def _dummy_batch(runner: WarmableRunner, shape: PrefillShape) -> ForwardBatch:
    """Prompts of token 0. The table's rows are still zeros, the dummy slot, as is every slot."""
    num_prompts, length = shape
    num_tokens = num_prompts * length

    def filled(count: int, value: int) -> torch.Tensor:
        return torch.full((count,), value, dtype=torch.int64, device=runner.device)

    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=num_prompts,
        input_ids=filled(num_tokens, 0),
        positions=torch.arange(length, device=runner.device).repeat(num_prompts),
        req_pool_indices=filled(num_prompts, 0),
        seq_lens=filled(num_prompts, length),
        seq_lens_cpu=[length] * num_prompts,
        out_cache_loc=filled(num_tokens, 0),
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool=runner.token_to_kv_pool,
        extend_seq_lens=filled(num_prompts, length),
        extend_prefix_lens=filled(num_prompts, 0),
        extend_seq_lens_cpu=[length] * num_prompts,
        extend_prefix_lens_cpu=[0] * num_prompts,
    )
