"""Formats, and refusal of checkpoints that do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import load_model, load_weights_into
from sglang.srt.model_loader.weight_utils import CheckpointError, open_checkpoint
from sglang.srt.models.base import LanguageModel, WeightLoadError
from sglang.test.fakes.tiny_models import make_tiny_checkpoint


def load(folder: Path, load_format: str = "auto") -> LanguageModel:
    return load_model(ModelConfig.from_path(str(folder)), load_format, show_progress=False)


def values(model: LanguageModel) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def edit(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace (or, with None, remove) tensors of model.safetensors; `__` stands for a dot."""
    path = folder / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, path)


def test_shards_with_and_without_index_load_the_same(tmp_path: Path) -> None:
    whole = values(load(make_tiny_checkpoint(tmp_path / "one")))
    sharded = make_tiny_checkpoint(tmp_path / "three", num_shards=3)
    assert_same(values(load(sharded, "safetensors")), whole)
    (sharded / "model.safetensors.index.json").unlink()
    assert_same(values(load(sharded)), whole)


def test_pt_files_load_the_same(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    whole = values(load(folder))
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    torch.save({n: weights[n] for n in names[::2]}, folder / "pytorch_model-1.bin")
    torch.save({n: weights[n] for n in names[1::2]}, folder / "pytorch_model-2.bin")
    assert_same(values(load(folder, "pt")), whole)
    (folder / "model.safetensors").unlink()
    assert_same(values(load(folder, "auto")), whole)


def test_pickled_code_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Path("x")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="more than plain tensors"):
        load(folder, "pt")


def test_half_precision_checkpoint_is_widened(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, dtype=torch.bfloat16)
    loaded = values(load(folder))
    assert all(tensor.dtype == torch.float32 for tensor in loaded.values())
    stored = load_file(folder / "model.safetensors")["model.norm.weight"]
    assert torch.equal(loaded["model.norm.weight"], stored.float())


def test_model_in_half_precision_computes(tmp_path: Path) -> None:
    config = ModelConfig.from_path(str(make_tiny_checkpoint(tmp_path)), dtype="bfloat16")
    model = load_model(config, show_progress=False)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_dummy_weights_are_reproducible_and_finite(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    first, second = values(load(folder, "dummy")), values(load(folder, "dummy"))
    assert_same(first, second)
    assert all(tensor.isfinite().all() for tensor in first.values())
    assert first["lm_head.weight"].std() > 0.01


def test_missing_extra_and_misshapen_tensors_are_named_in_one_message(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    edit(
        folder,
        model__layers__0__self_attn__v_proj__weight=None,
        model__layers__5__mlp__up_proj__weight=torch.zeros(3),
        model__norm__weight=torch.zeros(61),
    )
    with pytest.raises(WeightLoadError) as error:
        load(folder)
    message = str(error.value)
    assert "missing tensors (1): model.layers.0.self_attn.v_proj.weight" in message
    assert "unexpected tensors (1): model.layers.5.mlp.up_proj.weight" in message
    assert "model.norm.weight: expected (60,), got (61,)" in message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("load_format", ["safetensors", "pt"])
def test_quantised_tensors_are_refused_although_they_could_be_copied(
    tmp_path: Path, dtype: torch.dtype, load_format: str
) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    edit(folder, model__norm__weight=torch.ones(60).to(dtype))
    if load_format == "pt":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    with pytest.raises(WeightLoadError, match=f"cannot be used .*model.norm.weight.*got {dtype}"):
        load(folder, load_format)


def test_wider_and_narrower_floats_are_loaded(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        edit(folder, model__norm__weight=torch.full((60,), 0.5, dtype=dtype))
        assert values(load(folder))["model.norm.weight"].eq(0.5).all()


def test_refused_update_from_disk_writes_nothing(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path / "old"))
    before = values(model)
    bad = make_tiny_checkpoint(tmp_path / "new", seed=1)
    edit(bad, lm_head__weight=torch.zeros(263, 61))
    with pytest.raises(WeightLoadError, match="lm_head.weight"):
        load_weights_into(model, str(bad))
    assert_same(values(model), before)


def test_update_from_disk_is_in_place(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path / "old"))
    pointers = [p.data_ptr() for p in model.parameters()]
    new = make_tiny_checkpoint(tmp_path / "new", seed=1)
    load_weights_into(model, str(new))
    assert pointers == [p.data_ptr() for p in model.parameters()]
    assert_same(values(model), values(load(new)))


def test_known_extras_are_ignored(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    whole = values(load(folder))
    edit(
        folder,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(5),
        lm_head__weight=torch.zeros(263, 60),
    )
    assert_same(values(load(folder)), whole)


def test_untied_checkpoint_needs_its_head(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    edit(folder, lm_head__weight=None)
    with pytest.raises(WeightLoadError, match=r"missing tensors \(1\): lm_head.weight"):
        load(folder)


@pytest.mark.parametrize("load_format", ["auto", "pt", "gguf", "safetensors"])
def test_folder_without_weights_is_refused(tmp_path: Path, load_format: str) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no weight files"):
        load(folder, load_format)


def test_unknown_format_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="npcache.*safetensors"):
        load(make_tiny_checkpoint(tmp_path), "npcache")


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="model.safetensors"):
        load(folder)


def test_index_that_names_absent_shards_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00003"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weights": 1}))
    with pytest.raises(CheckpointError, match="no valid index"):
        load(folder)


@pytest.mark.parametrize(
    "entry", [3, {"inner": torch.zeros(1)}, torch.eye(2).to_sparse()], ids=["int", "dict", "sparse"]
)
def test_a_bin_file_with_other_things_beside_tensors_is_refused(
    tmp_path: Path, entry: object
) -> None:
    torch.save({"weight": torch.zeros(1), "other": entry}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="more than plain tensors: other"):
        list(open_checkpoint(str(tmp_path)).tensor_infos())


def test_an_index_of_numbers_is_refused(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": 3}}))
    with pytest.raises(CheckpointError, match="no valid index"):
        open_checkpoint(str(tmp_path))
