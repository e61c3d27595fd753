"""A load is refused from the first token on that does not fit, and not before."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from load_fit import check_before_loading, check_pool, kv_tokens
from sglang.srt.configs.model_config import ModelConfig
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import tiny_config

register_cpu_ci(est_time=3, suite="benchmarks")


def load(**changes: Any) -> Namespace:
    args = {"batch": [1, 3], "input_len": 20, "output_len": 10, "prefill": [], "first_uses": []}
    rest = {"page_size": 16, "kv_cache_dtype": "auto", "max_total_tokens": None}
    return Namespace(**{**args, **rest, **changes})


def test_the_largest_batch_counts_in_whole_pages() -> None:
    assert kv_tokens(load()) == 3 * 32
    assert kv_tokens(load(prefill=[96])) == 112
    check_pool(load(), 96)
    with pytest.raises(ValueError, match="KV of 96 tokens, and the pool holds 95"):
        check_pool(load(), 95)


def test_a_prompt_needs_room_for_its_first_token() -> None:
    config = ModelConfig.from_dict(tiny_config("llama"))
    check_before_loading(load(prefill=[config.context_len - 1]), config)
    with pytest.raises(ValueError, match="--prefill"):
        check_before_loading(load(prefill=[config.context_len]), config)
