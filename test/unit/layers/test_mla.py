"""Latent attention: both forms give the same, in every kind of step, and which is taken when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.srt.configs.model_config import MLAConfig, ModelConfig, RopeConfig
from sglang.srt.layers import mla as mla_layer
from sglang.srt.layers.mla import is_expanding_cheaper
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.base import LanguageModel
from sglang.srt.models.deepseek_v2 import attention_scaling
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

PUBLISHED = MLAConfig(
    kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
PROMPTS = [[(7 * i + 3) % 250 for i in range(21)], [(11 * i + 5) % 250 for i in range(6)]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = make_tiny_checkpoint(tmp_path_factory.mktemp("mla"), "deepseek_v3")
    return load_model(ModelConfig.from_path(str(folder)), show_progress=False)


def run(model: LanguageModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of chunks, a shared batch and a decode step, and the rows that were cached."""
    runner = MiniRunner(model, page_size=4, seed=5)
    first, second = runner.new_request(), runner.new_request()
    logits = [runner.extend([first], [PROMPTS[0][:9]]).next_token_logits]
    output = runner.extend([second, first], [PROMPTS[1], PROMPTS[0][9:]])
    logits.append(output.next_token_logits)
    logits.append(runner.decode([first, second], [17, 200]).next_token_logits)
    # A draft that catches up has few new tokens: never expanded.
    output = runner.extend([second], [[3, 4]], mode=ForwardMode.DRAFT_EXTEND)
    logits.append(output.next_token_logits)
    pool = runner.kv_pool
    assert isinstance(pool, MLATokenToKVPool)
    return torch.cat(logits), pool.kv_data[:, 4:]


def test_both_forms_give_the_same(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    def choose(value: bool) -> None:
        def fixed(*_: object) -> bool:
            taken.append(value)
            return value

        monkeypatch.setattr(mla_layer, "is_expanding_cheaper", fixed)

    choose(True)
    expanded_logits, expanded_rows = run(model)
    assert len(taken) == 2 * model.config.num_hidden_layers  # extends, and only those
    choose(False)
    absorbed_logits, absorbed_rows = run(model)
    torch.testing.assert_close(absorbed_logits, expanded_logits, atol=2e-5, rtol=0)
    torch.testing.assert_close(absorbed_rows, expanded_rows, atol=2e-5, rtol=0)
    assert expanded_rows.any()


def test_an_absorbed_step_reads_the_cached_rows(model: LanguageModel) -> None:
    logits = []
    for spoil in (False, True):
        runner = MiniRunner(model, page_size=4, seed=5)
        row = runner.new_request()
        runner.extend([row], [PROMPTS[0]])
        pool = runner.kv_pool
        assert isinstance(pool, MLATokenToKVPool)
        slot = int(runner.req_to_token_pool.req_to_token[row, 3])
        if spoil:
            pool.kv_data[0, slot, 0, -1] += 50.0  # the rotated key, which no value has
        logits.append(runner.decode([row], [9]).next_token_logits)
    assert not torch.allclose(logits[0], logits[1], atol=1e-3)


def test_prompts_are_expanded_and_short_tails_are_not() -> None:
    assert is_expanding_cheaper(PUBLISHED, [1], [0])
    assert is_expanding_cheaper(PUBLISHED, [4096, 100], [0, 0])
    assert is_expanding_cheaper(PUBLISHED, [2048], [8192])
    assert not is_expanding_cheaper(PUBLISHED, [8], [8192])
    assert not is_expanding_cheaper(PUBLISHED, [8, 16], [0, 8192])
    assert is_expanding_cheaper(PUBLISHED, [2048, 16], [0, 8192])


def test_yarn_scales_the_logits_of_whole_heads() -> None:
    plain = RopeConfig(theta=1e4, rope_type="default")
    assert attention_scaling(192, plain) == 192**-0.5
    params = {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    yarn = RopeConfig(theta=1e4, rope_type="yarn", params=tuple(params.items()))
    assert attention_scaling(192, yarn) == pytest.approx(192**-0.5 * 1.3688879**2)
    silent = RopeConfig(theta=1e4, rope_type="yarn", params=(("factor", 40.0),))
    assert attention_scaling(192, silent) == 192**-0.5


def test_layers_behind_the_last_one_are_not_the_models(tmp_path: Path) -> None:
    config = ModelConfig.from_path(str(make_tiny_checkpoint(tmp_path, "deepseek_v3")))
    model = load_model(config, show_progress=False)
    extra = [("model.layers.2.eh_proj.weight", torch.empty(0, device="meta"))]
    assert not model.check_weights(extra, complete=False).unexpected
    inner = [("model.layers.1.eh_proj.weight", torch.empty(0, device="meta"))]
    assert model.check_weights(inner, complete=False).unexpected
