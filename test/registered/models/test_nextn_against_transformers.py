"""The MTP layer as a draft against the one that transformers runs beside the same target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from sglang.srt.configs.draft_config import read_draft_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_drafts import add_tiny_nextn_layer
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

# Transformers finds the layer by the number that it has in the published model.
LAYERS = 61
PROMPT = [3, 10, 17, 24, 31, 38]


class Recorder:
    """Results of the modules that have certain weights, by name, in the order of the calls."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights
        self.results: dict[str, list[torch.Tensor]] = {name: [] for name in weights}

    def __call__(self, module: nn.Module, inputs: Any, result: Any) -> None:
        own = getattr(module, "weight", None)
        for name, weight in self._weights.items():
            if own is not None and own.shape == weight.shape and torch.equal(own.data, weight):
                self.results[name].append(result.detach().clone()[0])


def merge_files(folder: Path) -> dict[str, torch.Tensor]:
    """Put all tensors in one file, where transformers looks for them; returns the layer's."""
    extra = load_file(str(folder / "model-mtp.safetensors"))
    whole = {**load_file(str(folder / "model.safetensors")), **extra}
    (folder / "model-mtp.safetensors").unlink()
    save_file(whole, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return extra


def test_states_of_the_layer_equal_those_of_transformers(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(
        tmp_path,
        "deepseek_v3",
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS - 1,
        intermediate_size=16,
    )
    add_tiny_nextn_layer(folder)
    extra = merge_files(folder)
    reference: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    recorder = Recorder(
        {
            "target": reference.model.norm.weight.data,
            "draft": extra[f"model.layers.{LAYERS}.shared_head.norm.weight"],
        }
    )
    handle = nn.modules.module.register_module_forward_hook(recorder)
    try:
        answer = reference.generate(
            torch.tensor([PROMPT]),
            max_new_tokens=3,
            do_sample=False,
            use_mtp=True,
            eos_token_id=None,
        )[0].tolist()
    finally:
        handle.remove()

    config = ModelConfig.from_path(str(folder))
    target = load_model(config, show_progress=False)
    draft = load_model(read_draft_config(str(folder), config), show_progress=False)
    assert isinstance(draft, DeepseekV3ForCausalLMNextN)
    draft.set_embed_and_head(*target.get_embed_and_head())
    runner = MiniRunner(draft, page_size=4)
    row = runner.new_request()
    # Entry p is made of token p + 1 and the target's state of position p.
    features = recorder.results["target"][0]
    expected = recorder.results["draft"][0]
    assert features.shape == expected.shape == (len(PROMPT), config.hidden_size)
    tokens = answer[1 : len(PROMPT) + 1]
    got = []
    for part in (slice(0, 4), slice(4, None)):
        output = runner.extend(
            [row],
            [tokens[part]],
            capture=CaptureHiddenMode.FULL,
            hidden_states=features[part],
        )
        assert output.hidden_states is not None
        got.append(output.hidden_states)
    torch.testing.assert_close(torch.cat(got), expected, atol=1e-4, rtol=0)
