"""What changes the digest of weights and what does not; the implementations agree."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers import shard_digest
from sglang.srt.layers.cpu import ops, reference
from sglang.srt.layers.shard_digest import shard_sums
from sglang.srt.layers.tensor_digest import digest_tensors
from sglang.srt.layers.weight_slot import WeightSlot
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.weight_fingerprint import WeightsFingerprint, persistent_tensors
from sglang.srt.models.base import LanguageModel
from sglang.test.fakes.tiny_models import make_tiny_checkpoint


def digest(tensor: torch.Tensor) -> bytes:
    return digest_tensors([tensor])[0]


def load(folder: Path) -> LanguageModel:
    return load_model(ModelConfig.from_path(str(folder)), show_progress=False)


@given(st.integers(0, 300), st.integers(0, 7), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_kernel_and_fall_back_agree(size: int, start: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (start + size,), dtype=torch.uint8, generator=generator)
    assert ops.word_sums(data[start:]) == reference.word_sums(data[start:])


def test_many_pieces_agree_for_any_number_of_threads() -> None:
    data = torch.arange((1 << 17) + 3, dtype=torch.int64).mul_(0x9E3779B9).view(torch.uint8)[:-5]
    expected = reference.word_sums(data)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert ops.word_sums(data) == expected
    finally:
        torch.set_num_threads(before)


def test_value_is_fixed() -> None:
    # In every process; storage of earlier runs is found again only while this holds.
    assert digest(torch.arange(5, dtype=torch.int16)).hex() == "cee1dbfce5b9223fc0b101892a36bbb6"
    assert digest(torch.empty(0)) == bytes(16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    data = torch.randint(0, 256, (52,), dtype=torch.uint8)
    seen = {digest(data.view(dtype))}
    for byte in range(data.numel()):
        for bit in range(8):
            data[byte] ^= 1 << bit
            seen.add(digest(data.view(dtype)))
            data[byte] ^= 1 << bit
    assert len(seen) == 1 + 52 * 8


def test_order_of_rows_and_elements_counts() -> None:
    weight = torch.randn(6, 7)
    variants = [
        weight,
        weight[[1, 0, 2, 3, 4, 5]],
        weight[[5, 0, 1, 2, 3, 4]],
        weight[:, [0, 2, 1, 3, 4, 5, 6]],
        weight.flip(0, 1),
        weight.t(),
        -weight,
    ]
    assert len({digest(each) for each in variants}) == len(variants)


def test_pairs_of_sign_flips_and_equal_steps_do_not_cancel() -> None:
    zeros = torch.zeros(64)
    seen = set()
    for i in range(64):
        for j in range(i + 1, 64):
            changed = zeros.clone()
            changed[i] = -0.0
            changed[j] = -0.0
            seen.add(digest(changed))
            changed[i], changed[j] = 1.0, -1.0
            seen.add(digest(changed))
    assert len(seen) == 2 * 64 * 63 // 2


def test_strided_tensors_count_by_their_values() -> None:
    weight = torch.randn(8, 12)
    assert digest(weight[:, ::2]) == digest(weight[:, ::2].contiguous())


class _Two(nn.Module):
    def __init__(self, a: torch.Tensor, b: torch.Tensor, tied: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(a.clone(), requires_grad=False)
        self.b = self.a if tied else nn.Parameter(b.clone(), requires_grad=False)
        self.register_buffer("table", torch.ones(3), persistent=False)


def test_names_shapes_and_dtypes_count() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    models = [
        _Two(x, y),
        _Two(y, x),
        _Two(x, x),
        _Two(x, y, tied=True),
        _Two(x.view(6, 4), y),
        _Two(x.view(torch.int32), y),
    ]
    assert len({WeightsFingerprint().full(model) for model in models}) == len(models)
    renamed = _Two(x, y)
    renamed.c = renamed.b
    del renamed.b
    assert WeightsFingerprint().full(renamed) != WeightsFingerprint().full(models[0])
    without_table = _Two(x, y)
    without_table.get_buffer("table").zero_()
    assert WeightsFingerprint().full(without_table) == WeightsFingerprint().full(models[0])


def test_update_reads_only_what_changed_and_equals_full(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path))
    fingerprint = WeightsFingerprint()
    first = fingerprint.full(model)
    assert first == fingerprint.digest() == WeightsFingerprint().full(model)
    weight = model.get_parameter("model.layers.1.mlp.gate_up_proj.weight")
    saved = weight.data.clone()
    weight.data[3, 5] += 1.0
    assert fingerprint.update(["model.layers.0.mlp.gate_up_proj.weight"]) == first  # not named
    second = fingerprint.update(["model.layers.1.mlp.gate_up_proj.weight"])
    assert fingerprint.num_bytes == weight.nbytes
    assert second == WeightsFingerprint().full(model) != first
    weight.data.copy_(saved)
    assert fingerprint.update(["model.layers.1.mlp.gate_up_proj.weight"]) == first
    with pytest.raises(ValueError, match="no.such"):
        fingerprint.update(["no.such"])


def test_tied_weights_count_once_under_any_name(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path, tie_word_embeddings=True))
    fingerprint = WeightsFingerprint()
    first = fingerprint.full(model)
    total = sum(parameter.nbytes for parameter in model.parameters())
    assert fingerprint.num_bytes == total
    model.get_parameter("model.embed_tokens.weight").data[0, 0] += 1.0
    assert fingerprint.update(["model.embed_tokens.weight"]) != first


def test_the_tensors_are_those_of_the_state_dict(tmp_path: Path) -> None:
    for model in (load(make_tiny_checkpoint(tmp_path)), _Two(torch.ones(1), torch.ones(1), True)):
        state = model.state_dict()
        found = persistent_tensors(model)
        assert found.keys() == state.keys()
        assert all(found[name].data_ptr() == state[name].data_ptr() for name in state)


def test_a_rebound_parameter_is_noticed(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path))
    fingerprint = WeightsFingerprint()
    first = fingerprint.full(model)
    head = model.get_parameter("lm_head.weight")
    model.lm_head.weight = nn.Parameter(head.data + 1.0, requires_grad=False)  # type: ignore
    assert fingerprint.update([]) == WeightsFingerprint().full(model) != first


def test_digest_before_full_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        WeightsFingerprint().digest()
    with pytest.raises(RuntimeError):
        WeightsFingerprint().update([])


def test_rate_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        WeightsFingerprint().full(_Two(torch.randn(3), torch.randn(3)))
    assert "GB/s" in caplog.text


def shares(whole: torch.Tensor, dim: int, num_parts: int) -> torch.Tensor:
    """Sum of what the shards of a tensor give, each with an end of its own memory unused."""
    total = torch.zeros(2, dtype=torch.int64)
    size = whole.shape[dim] // num_parts
    for part in range(num_parts):
        padded = torch.cat((whole.narrow(dim, part * size, size), whole.narrow(dim, 0, 1)), dim)
        slot = WeightSlot(
            target=padded,
            full_shape=tuple(whole.shape),
            shard_dim=dim,
            shard_start=part * size,
            num_valid=size,
        )
        total += shard_sums(slot)
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_shards_add_up_to_the_tensor(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.randint(0, 256, (12, 12 * dtype.itemsize), dtype=torch.uint8).view(dtype)
    expected = shard_sums(WeightSlot(target=whole, full_shape=tuple(whole.shape)))
    monkeypatch.setitem(shard_digest._CHUNKS, "cpu", 20)  # several steps, the last one short
    for dim in (0, 1):
        for num_parts in (1, 2, 3):
            assert torch.equal(shares(whole, dim, num_parts), expected), (dim, num_parts)


def test_every_element_and_its_place_count_in_shard_sums() -> None:
    whole = torch.randn(6, 5)
    slot = WeightSlot(target=whole, full_shape=(6, 5))
    seen = {tuple(shard_sums(slot).tolist())}
    for row, column in itertools.product(range(6), range(5)):
        whole[row, column] += 1e-3
        seen.add(tuple(shard_sums(slot).tolist()))
    whole[[0, 1]] = whole[[1, 0]]
    seen.add(tuple(shard_sums(slot).tolist()))
    assert len(seen) == 32
    # Storage of earlier runs is found again only while this holds.
    fixed = WeightSlot(target=torch.arange(6, dtype=torch.int16), full_shape=(6,))
    assert shard_sums(fixed).tolist() == [1461478653728551865, -2106114111169849885]


def test_portable_fingerprint_follows_updates(tmp_path: Path) -> None:
    model = load(make_tiny_checkpoint(tmp_path, "deepseek_v3"))
    fingerprint = WeightsFingerprint(portable=True)
    first = fingerprint.full(model)
    assert first == WeightsFingerprint(portable=True).full(model)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    model.get_parameter(name).data[3, 5, 7] += 1.0
    assert fingerprint.update([]) == first  # not named
    second = fingerprint.update([name])
    assert second == WeightsFingerprint(portable=True).full(model) != first
    model.get_parameter(name).data[3, 5, 7] -= 1.0
    head = model.get_parameter("lm_head.weight")
    model.lm_head.weight = nn.Parameter(head.data + 1.0, requires_grad=False)  # type: ignore
    third = fingerprint.update([])
    assert third not in (first, second)
