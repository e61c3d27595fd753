"""What models offer beside the forward pass: weight table, reading back, sharing, captures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.base import WeightLoadError
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.registry import resolve_model_class
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_models import make_tiny_checkpoint, tiny_weights

PROMPT = [(7 * i + 3) % 250 for i in range(9)]


def load(folder: Path) -> LlamaForCausalLM:
    model = load_model(ModelConfig.from_path(str(folder)), show_progress=False)
    assert isinstance(model, LlamaForCausalLM)
    return model


def reference_states(folder: Path, **options: str) -> tuple[torch.Tensor, ...]:
    """Of the prompt: the embeddings, then what each layer gives, float32 [1, tokens, hidden]."""
    from transformers import AutoModelForCausalLM  # takes seconds: only by who runs this

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.inference_mode():
        states = reference(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    assert states is not None
    return tuple(states)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next"])
def test_every_checkpoint_tensor_can_be_read_back(tmp_path: Path, family: str) -> None:
    model = load(make_tiny_checkpoint(tmp_path, family))
    weights = tiny_weights(model.config.hf_config)
    for name, tensor in weights.items():
        assert model.get_weights_by_name(name, 5) == tensor[:5].tolist(), name


def test_fused_names_can_be_read_and_unknown_ones_are_none(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path))
    fused = model.get_weights_by_name("model.layers.0.self_attn.qkv_proj.weight", 1000)
    parts = [
        model.get_weights_by_name(f"model.layers.0.self_attn.{part}_proj.weight", 1000) or []
        for part in "qkv"
    ]
    assert fused == parts[0] + parts[1] + parts[2]
    assert model.get_weights_by_name("model.layers.7.self_attn.q_proj.weight") is None


def test_update_is_in_place_and_changes_only_its_rows(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path))
    storages = {name: p.data_ptr() for name, p in model.named_parameters()}
    before = {name: p.clone() for name, p in model.named_parameters()}
    new = torch.randn(20, 60)
    loaded = model.load_weights([("model.layers.1.self_attn.k_proj.weight", new)])
    assert loaded == {"model.layers.1.self_attn.k_proj.weight"}
    assert storages == {name: p.data_ptr() for name, p in model.named_parameters()}
    changed = "model.layers.1.self_attn.qkv_proj.weight"
    after = dict(model.named_parameters())
    assert torch.equal(after[changed][60:80], new)
    assert torch.equal(after[changed][:60], before[changed][:60])
    assert torch.equal(after[changed][80:], before[changed][80:])
    assert all(torch.equal(after[name], before[name]) for name in before if name != changed)


def test_update_with_bad_tensors_names_all_of_them(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path))
    bad = [
        ("model.layers.0.mlp.up_proj.weight", torch.zeros(90, 61)),
        ("model.layers.9.mlp.up_proj.weight", torch.zeros(90, 60)),
    ]
    with pytest.raises(WeightLoadError) as error:
        model.load_weights(bad)
    message = str(error.value)
    assert "model.layers.9.mlp.up_proj.weight" in message
    assert "model.layers.0.mlp.up_proj.weight: expected shape (90, 60), got (90, 61)" in message


def test_tied_head_shares_storage_and_ignores_a_stored_head(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path, tie_word_embeddings=True))
    embed, head = model.get_embed_and_head()
    assert embed.data_ptr() == head.data_ptr()
    before = embed.clone()
    assert model.load_weights([("lm_head.weight", torch.zeros(263, 60))]) == set()
    assert torch.equal(model.get_embed_and_head()[1], before)
    assert model.get_weights_by_name("lm_head.weight", 2) == before[:2].tolist()


def test_shared_embedding_follows_the_other_model(tmp_path: Path) -> None:
    target = load(make_tiny_checkpoint(tmp_path / "a", seed=1))
    draft = load(make_tiny_checkpoint(tmp_path / "b", seed=2))
    draft.set_embed_and_head(*target.get_embed_and_head())
    target.load_weights([("model.embed_tokens.weight", torch.full((263, 60), 0.5))])
    assert draft.get_weights_by_name("model.embed_tokens.weight", 1) == [[0.5] * 60]


def test_fused_expert_tensors_load_like_separate_ones(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path, "qwen3_moe"))
    prefix = "model.layers.0.mlp.experts"
    gate_up, down = torch.randn(8, 52, 60), torch.randn(8, 60, 26)
    loaded = model.load_weights(
        [(f"{prefix}.gate_up_proj", gate_up), (f"{prefix}.down_proj", down)]
    )
    assert len(loaded) == 24
    assert model.get_weights_by_name(f"{prefix}.3.up_proj.weight", 26) == gate_up[3, 26:].tolist()
    assert model.get_weights_by_name(f"{prefix}.7.down_proj.weight", 60) == down[7].tolist()


@pytest.mark.parametrize("layer_ids", [[0, 1, 2], [2], [1, 0]])
def test_captured_streams_are_the_reference_hidden_states(
    tmp_path: Path, layer_ids: list[int]
) -> None:
    folder = make_tiny_checkpoint(tmp_path, num_hidden_layers=3)
    model = load(folder)
    model.set_eagle3_layers_to_capture(layer_ids)
    runner = MiniRunner(model)
    output = runner.extend([runner.new_request()], [PROMPT], capture=CaptureHiddenMode.FULL)
    expected = reference_states(folder)
    # Captured in layer order, whatever the order they were asked for.
    wanted = torch.cat([expected[layer_id][0] for layer_id in sorted(layer_ids)], dim=-1)
    assert output.hidden_states is not None
    torch.testing.assert_close(output.hidden_states, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe", "qwen3_next"])
def test_every_family_captures_the_usual_layers(tmp_path: Path, family: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family, num_hidden_layers=5)
    model = load(folder)
    model.set_eagle3_layers_to_capture()
    runner = MiniRunner(model)
    output = runner.extend([runner.new_request()], [PROMPT], capture=CaptureHiddenMode.FULL)
    has_experts = family in ("qwen3_moe", "qwen3_next")
    kind = {"experts_implementation": "eager"} if has_experts else {}
    expected = reference_states(folder, **kind)
    # Of five layers the early, middle and late one are all the third: it comes three times.
    assert output.hidden_states is not None
    wanted = torch.cat([expected[2][0]] * 3, dim=-1)
    # Recurrent layers differ by up to 1e-4 from one kind of CPU to the next, another layer by 8.
    torch.testing.assert_close(output.hidden_states, wanted, atol=5e-4, rtol=0)


def test_captured_rows_of_prefill_decode_and_verification_agree(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path, num_hidden_layers=6))
    model.set_eagle3_layers_to_capture([1, 3, 5])
    runner = MiniRunner(model)
    rows = [runner.new_request() for _ in range(3)]
    full, last = CaptureHiddenMode.FULL, CaptureHiddenMode.LAST
    whole = runner.extend([rows[0]], [PROMPT], capture=full).hidden_states
    assert whole is not None and whole.shape == (len(PROMPT), 180)
    runner.extend(rows[1:2], [PROMPT[:5]])
    verified = runner.extend(rows[1:2], [PROMPT[5:]], capture=full, mode=ForwardMode.TARGET_VERIFY)
    assert verified.next_token_logits.shape[0] == 4
    torch.testing.assert_close(verified.hidden_states, whole[5:], atol=1e-4, rtol=0)
    prefilled = runner.extend(rows[2:], [PROMPT[:8]], capture=last)
    torch.testing.assert_close(prefilled.hidden_states, whole[7:8], atol=1e-4, rtol=0)
    decoded = runner.decode(rows[2:], PROMPT[8:], capture=last)
    torch.testing.assert_close(decoded.hidden_states, whole[8:], atol=1e-4, rtol=0)


def test_without_capture_mode_no_stream_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(make_tiny_checkpoint(tmp_path))
    model.set_eagle3_layers_to_capture([0, 1, 2])
    runner = MiniRunner(model)
    monkeypatch.setattr("sglang.srt.models.llama.add_rows", None)
    assert runner.extend([runner.new_request()], [PROMPT]).hidden_states is None


def test_capture_after_the_last_layer_is_not_normed(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path))
    runner = MiniRunner(model)
    final = runner.extend([runner.new_request()], [PROMPT], capture=CaptureHiddenMode.FULL)
    model.set_eagle3_layers_to_capture([2])
    stream = runner.extend([runner.new_request()], [PROMPT], capture=CaptureHiddenMode.FULL)
    assert stream.hidden_states is not None and final.hidden_states is not None
    torch.testing.assert_close(
        model.model.norm(stream.hidden_states), final.hidden_states, atol=1e-5, rtol=0
    )


def test_default_capture_layers_and_bounds(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path, num_hidden_layers=8))
    model.set_eagle3_layers_to_capture()
    assert model.model.layers_to_capture == (2, 4, 5)
    with pytest.raises(ValueError, match="0..8"):
        model.set_eagle3_layers_to_capture([9])


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_half_precision_stays_close_to_float32(tmp_path: Path, family: str) -> None:
    folder = make_tiny_checkpoint(tmp_path, family)
    wide = MiniRunner(load(folder))
    config = ModelConfig.from_path(str(folder), dtype="bfloat16")
    narrow = MiniRunner(load_model(config, show_progress=False))
    logits = []
    for runner in (wide, narrow):
        row = runner.new_request()
        runner.extend([row], [PROMPT])
        output = runner.decode([row], [5])
        assert output.next_token_logits.dtype == torch.float32
        logits.append(output.next_token_logits[0])
    correlation = torch.corrcoef(torch.stack(logits))[0, 1]
    # A router may choose another expert after rounding; the rest must agree closely.
    assert correlation > (0.9 if family == "qwen3_moe" else 0.999)


def test_idle_batch_passes_through(tmp_path: Path) -> None:
    runner = MiniRunner(load(make_tiny_checkpoint(tmp_path, "qwen3_moe")))
    output = runner.extend([], [], mode=ForwardMode.IDLE)
    assert output.next_token_logits.shape == (0, 263)


def test_registry_names_what_is_supported() -> None:
    assert resolve_model_class(["Unknown", "LlamaForCausalLM"]) is LlamaForCausalLM
    with pytest.raises(ValueError, match="FooForCausalLM.*Qwen3MoeForCausalLM"):
        resolve_model_class(["FooForCausalLM"])
    with pytest.raises(ValueError, match="no 'architectures'"):
        resolve_model_class([])
