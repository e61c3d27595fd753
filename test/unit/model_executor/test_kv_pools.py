"""Which pool a configuration gets, and that its size is the one that was reckoned with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.model_executor.kv_pools import KVPoolShape, kv_bytes_per_token, make_kv_pool
from sglang.test.fakes.tiny_models import tiny_config


def config_of(family: str, **overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config(family, **overrides))


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize(
    ("family", "kind"), [("llama", MHATokenToKVPool), ("deepseek_v3", MLATokenToKVPool)]
)
def test_a_pool_takes_the_bytes_it_was_planned_with(family: str, kind: type, tp_size: int) -> None:
    config = config_of(family)
    shape = KVPoolShape(num_tokens=24, page_size=4, dtype=torch.bfloat16, tp_size=tp_size)
    pool = make_kv_pool(config, shape, "cpu")
    assert isinstance(pool, kind)
    planned = kv_bytes_per_token(config, tp_size, torch.bfloat16)
    assert sum(pool.get_kv_size_bytes()) == planned * 28
    assert sum(buffer.nbytes for buffer in pool.buffers()) == planned * 28
    heads = config.get_num_kv_heads(tp_size)
    assert pool.get_key_buffer(1).shape == (28, heads, config.kv_key_dim)
    assert pool.get_value_buffer(1).shape == (28, heads, config.kv_value_dim)


def test_buffers_are_made_by_who_is_told_to() -> None:
    made = []

    def allocate(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.zeros(tuple(shape), dtype=dtype))
        return made[-1]

    shape = KVPoolShape(num_tokens=8, page_size=1, dtype=torch.float32, tp_size=1)
    for family, count in (("llama", 2), ("deepseek_v2", 1)):
        made.clear()
        pool = make_kv_pool(config_of(family), shape, "cpu", allocate)
        assert len(made) == count
        assert all(a is b for a, b in zip(pool.buffers(), made, strict=True))


def test_latent_rows_are_the_same_for_any_number_of_ranks() -> None:
    config = config_of("deepseek_v2")
    assert config.mla is not None and config.mla.latent_dim == 30
    assert config.head_dim == config.mla.qk_rope_head_dim == 8
    assert [config.get_num_kv_heads(size) for size in (1, 2, 3, 64)] == [1] * 4
    assert config.get_num_attention_heads(3) == 2
    assert config_of("llama").mla is None


def test_bad_sizes_of_latent_attention_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="even"):
        config_of("deepseek_v2", qk_rope_head_dim=7)
    with pytest.raises(ModelConfigError, match="v_head_dim"):
        config_of("deepseek_v2", v_head_dim=None)
    with pytest.raises(ModelConfigError, match="kv_lora_rank"):
        config_of("deepseek_v2", kv_lora_rank="512")
