"""Every model class against transformers on tiny random weights: logits and greedy tokens."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.base import LanguageModel
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_models import make_tiny_checkpoint, tiny_config

TOLERANCE = 1e-4

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
DEEPSEEK_YARN_ROPE = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.8,
    "mscale_all_dim": 0.8,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("llama", {"head_dim": 18}),
    "llama_rope_linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama_rope_llama3": ("llama", {"rope_scaling": LLAMA3_ROPE}),
    "llama_rope_yarn": ("llama", {"rope_scaling": YARN_ROPE}),
    "llama_rope_dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "llama_new_rope_layout": (
        "llama",
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3_tied": ("qwen3", {"tie_word_embeddings": True}),
    "moe_norm_topk": ("qwen3_moe", {}),
    "moe_plain_topk": ("qwen3_moe", {"norm_topk_prob": False}),
    "moe_mixed_layers": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "gemma3": ("gemma3", {}),
    "gemma3_tied": ("gemma3", {"tie_word_embeddings": True}),
    "gemma3_listed_layers": (
        "gemma3",
        {
            "sliding_window": 17,
            "layer_types": ["full_attention", "sliding_attention"] * 3,
            "rope_scaling": None,
        },
    ),
    "gemma3_new_rope_layout": (
        "gemma3",
        {
            "rope_scaling": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
            },
        },
    ),
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next_mixed_layers": (
        "qwen3_next",
        {
            "mlp_only_layers": [1],
            "layer_types": None,
            "full_attention_interval": 2,
            "linear_num_key_heads": 1,
            "attention_bias": True,
        },
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2_lite": (
        "deepseek_v2",
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
    "deepseek_v2_rope_yarn": ("deepseek_v2", {"rope_scaling": DEEPSEEK_YARN_ROPE}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_plain_q": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "deepseek_v3_rope_yarn": ("deepseek_v3", {"rope_scaling": DEEPSEEK_YARN_ROPE}),
}

PROMPTS = [
    [(7 * i + 3) % 250 for i in range(37)],
    [(11 * i + 5) % 250 for i in range(5)],
    [(5 * i * i + 1) % 250 for i in range(20)],
]


class Pair:
    """Our model and transformers' from one folder."""

    def __init__(self, folder: Path) -> None:
        config = ModelConfig.from_path(str(folder))
        self.ours: LanguageModel = load_model(config, show_progress=False)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            attn_implementation="eager",
            experts_implementation="eager",
        )
        reference, info = loaded
        self.reference: Any = reference.eval()
        assert not info["missing_keys"] and not info["unexpected_keys"], info

    @torch.inference_mode()
    def reference_logits(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens), V]"""
        logits: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return logits.float()

    @torch.inference_mode()
    def reference_greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        past, fed, answer = None, prompt, []
        for _ in range(num_tokens):
            out = self.reference(torch.tensor([fed]), past_key_values=past, use_cache=True)
            past = out.past_key_values
            answer.append(int(out.logits[0, -1].argmax()))
            fed = answer[-1:]
        return answer


@pytest.fixture(scope="module", params=CASES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, overrides = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    return Pair(make_tiny_checkpoint(folder, family, **overrides))


@pytest.mark.parametrize("backend", ["torch_native", "torch_reference"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_prefill_and_decode_logits_equal_reference(
    pair: Pair, page_size: int, backend: str
) -> None:
    runner = MiniRunner(pair.ours, page_size=page_size, backend=backend)
    rows = [runner.new_request() for _ in PROMPTS]
    continuation = [17, 200, 3, 99]
    steps = [runner.extend(rows, PROMPTS).next_token_logits]
    for token in continuation:
        steps.append(runner.decode(rows, [token] * len(rows)).next_token_logits)
    for index, prompt in enumerate(PROMPTS):
        expected = pair.reference_logits(prompt + continuation)[len(prompt) - 1 :]
        got = torch.stack([step[index] for step in steps])
        torch.testing.assert_close(got, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunked_prefill_equals_one_pass(pair: Pair, page_size: int) -> None:
    runner = MiniRunner(pair.ours, page_size=page_size)
    prompt = PROMPTS[0]
    row, other = runner.new_request(), runner.new_request()
    runner.extend([row], [prompt[:7]])
    # The second chunk shares its batch with a fresh request, before and behind it.
    runner.extend([other, row], [PROMPTS[1], prompt[7:30]])
    logits = runner.extend([row, other], [prompt[30:], PROMPTS[2]]).next_token_logits
    expected = pair.reference_logits(prompt)[-1]
    torch.testing.assert_close(logits[0], expected, atol=TOLERANCE, rtol=0)
    expected = pair.reference_logits(PROMPTS[1] + PROMPTS[2])[-1]
    torch.testing.assert_close(logits[1], expected, atol=TOLERANCE, rtol=0)


def test_greedy_continuations_are_identical(pair: Pair) -> None:
    answers = MiniRunner(pair.ours, page_size=16).greedy(PROMPTS, 64, chunk_size=16)
    assert answers == [pair.reference_greedy(prompt, 64) for prompt in PROMPTS]


WINDOW = {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}
# Family, keys that its file leaves out, keys that its file has.
SILENT: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("deepseek_v2", ("topk_method", "norm_topk_prob", "routed_scaling_factor"), {}),
    ("deepseek_v2", (), {"rope_interleave": False}),
    ("deepseek_v3", ("topk_method", "scoring_func"), {}),
    ("deepseek_v3", ("norm_topk_prob",), {}),
    ("deepseek_v3", ("routed_scaling_factor",), {}),
    ("deepseek_v3", ("n_group", "topk_group"), {"n_routed_experts": 16}),
    ("deepseek_v3", (), {"rope_interleave": False}),
    ("gemma3", ("rms_norm_eps", "query_pre_attn_scalar", "hidden_activation"), {}),
    ("gemma3", ("sliding_window", "rope_theta", "rope_local_base_freq"), {}),
    ("llama", ("rms_norm_eps", "rope_theta", "tie_word_embeddings", "hidden_act"), {}),
    ("qwen3_moe", ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"), {}),
    ("qwen3_next", ("norm_topk_prob",), {}),
    ("qwen3_next", ("partial_rotary_factor",), {}),
    *[(family, (), WINDOW) for family in ("llama", "qwen3", "qwen3_moe", "qwen3_next")],
    *[(family, ("max_window_layers",), WINDOW) for family in ("qwen2", "qwen3_moe")],
    *[(family, ("use_sliding_window",), WINDOW) for family in ("qwen2", "qwen3", "qwen3_moe")],
]


@pytest.mark.parametrize(("family", "absent", "stated"), SILENT)
def test_what_a_file_does_not_say_is_the_familys(
    tmp_path: Path, family: str, absent: tuple[str, ...], stated: dict[str, Any]
) -> None:
    make_tiny_checkpoint(tmp_path, family, **stated)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: config[key] for key in config if key not in absent}))
    pair = Pair(tmp_path)
    runner = MiniRunner(pair.ours)
    logits = runner.extend([runner.new_request()], PROMPTS[:1]).next_token_logits[0]
    expected = pair.reference_logits(PROMPTS[0])[-1]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)


def test_dynamic_rope_past_the_original_length_equals_reference(tmp_path: Path) -> None:
    # The reference rotates token by token with the base of the length reached so far, as we do;
    # a longer prompt in one pass would make it use one base for all of it.
    pair = Pair(
        make_tiny_checkpoint(
            tmp_path,
            max_position_embeddings=32,
            rope_scaling={"type": "dynamic", "factor": 4.0},
        )
    )
    prompt = PROMPTS[2]
    answer = pair.reference_greedy(prompt, 64)
    assert MiniRunner(pair.ours).greedy([prompt], 64) == [answer]


def test_gemma_layers_whose_rotation_is_left_out_have_the_familys() -> None:
    stated = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
    raw = tiny_config("gemma3", rope_scaling=None, rope_parameters=stated)
    del raw["rope_local_base_freq"]
    config = ModelConfig.from_dict(raw)
    reference = Gemma3TextConfig(**copy.deepcopy(raw)).rope_parameters
    assert config.local_rope is not None and reference is not None
    assert config.local_rope.theta == reference["sliding_attention"]["rope_theta"] == 10_000
    assert config.rope.theta == reference["full_attention"]["rope_theta"] == 500_000
