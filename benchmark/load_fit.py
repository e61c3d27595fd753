"""Whether the load of `bench_one_batch.py` fits: a batch that does not is never whole, and waits.

No script: the benchmarks import it.
"""

from __future__ import annotations

import argparse

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.model_runner import kv_bytes_per_token, resolve_kv_dtype
from sglang.srt.platforms import current_platform


def longest_request(args: argparse.Namespace) -> int:
    """Tokens of the longest request, prompt and answer."""
    prompts = [*args.prefill, *args.first_uses]
    return max([args.input_len + args.output_len, *(length + 1 for length in prompts)])


def kv_tokens(args: argparse.Namespace) -> int:
    """Tokens of KV that the largest batch takes, in whole pages; or the longest prompt."""

    def in_pages(tokens: int) -> int:
        return -(-tokens // args.page_size) * args.page_size

    batch = max(args.batch) * in_pages(args.input_len + args.output_len)
    return max(batch, in_pages(longest_request(args)))


def check_before_loading(args: argparse.Namespace, config: ModelConfig) -> None:
    """Refuse, before it takes any time, what the model or the memory cannot hold.

    Raises ValueError.
    """
    if longest_request(args) > config.context_len:
        raise ValueError(
            f"a request would have {longest_request(args)} tokens, and the model's context "
            f"{config.context_len}: shorten --input-len, --output-len or --prefill"
        )
    kv_dtype = resolve_kv_dtype(args.kv_cache_dtype, config.dtype)
    # Layers with a window left out: what fits must not be refused here; the pool is checked later.
    token_bytes = kv_bytes_per_token(config, 1, kv_dtype, window_ratio=0.0)
    in_memory = current_platform().memory_info().free_bytes // max(token_bytes, 1)
    check_pool(args, min(in_memory, args.max_total_tokens or in_memory))


def check_pool(args: argparse.Namespace, num_tokens: int) -> None:
    """Raise ValueError where a pool of so many tokens does not hold the load."""
    if kv_tokens(args) > num_tokens:
        raise ValueError(
            f"the load needs KV of {kv_tokens(args)} tokens, and the pool holds {num_tokens}: "
            "take smaller --batch, --input-len or --output-len, or more --max-total-tokens"
        )
