"""EAGLE draft models: arithmetic, published names, refusals, what they share with the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from sglang.srt.configs.draft_config import (
    DRAFT_ARCHITECTURES,
    EAGLE3_ARCHITECTURE,
    EAGLE_ARCHITECTURE,
)
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.model_loader.loader import load_model, load_weights_into
from sglang.srt.models.base import WeightLoadError
from sglang.srt.models.eagle_draft import EagleDraftModel
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import VOCAB_SIZE, write_weights

TOKENS = [(7 * i + 3) % 250 for i in range(9)]
HIDDEN = 60
TOLERANCE = 1e-4


def load(folder: Path, seed: int = 5, target_hidden: int = HIDDEN) -> EagleDraftModel:
    """A draft with a random target's embedding and head."""
    model = load_model(ModelConfig.from_path(str(folder)), show_progress=False)
    assert isinstance(model, EagleDraftModel)
    model.set_embed_and_head(*target_parameters(seed, target_hidden))
    return model


def target_parameters(seed: int, width: int) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    embed, head = torch.randn(2, VOCAB_SIZE, width, generator=generator)
    return (
        torch.nn.Parameter(embed, requires_grad=False),
        torch.nn.Parameter(head, requires_grad=False),
    )


@pytest.mark.parametrize("architecture", DRAFT_ARCHITECTURES)
def test_every_kind_has_a_tiny_folder_that_loads_and_runs(
    tmp_path: Path, architecture: str
) -> None:
    model = load(make_tiny_draft(tmp_path, architecture))
    output = step(model, features(3, model.draft_config.input_width))
    assert output.hidden_states is not None
    assert output.hidden_states.shape == (3, HIDDEN)
    assert output.next_token_logits.isfinite().all()


def features(num_tokens: int, width: int = 3 * HIDDEN, seed: int = 9) -> torch.Tensor:
    return torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(seed))


def step(
    model: EagleDraftModel, states: torch.Tensor, tokens: list[int] | None = None
) -> LogitsProcessorOutput:
    """One extend of a new request, logits and states of every token."""
    tokens = tokens or TOKENS[: len(states)]
    runner = MiniRunner(model)
    return runner.extend(
        [runner.new_request()],
        [tokens],
        capture=CaptureHiddenMode.FULL,
        mode=ForwardMode.DRAFT_EXTEND,
        hidden_states=states,
        logits_rows=list(range(len(tokens))),
    )


def states_of(output: LogitsProcessorOutput) -> torch.Tensor:
    assert output.hidden_states is not None
    return output.hidden_states


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


class SingleToken:
    """Both kinds of drafts for a sequence of one token, whose attention is its own value."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.weights = load_file(folder / "model.safetensors")
        self.config = config

    def of(self, prefix: str, name: str) -> torch.Tensor:
        return self.weights[f"{prefix}{name}.weight"]

    def layer(self, prefix: str, stream: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        values = functional.linear(attended, self.of(prefix, "self_attn.v_proj"))
        heads = values.unflatten(-1, (-1, self.config.head_dim)).repeat_interleave(group, 1)
        stream = stream + functional.linear(heads.flatten(1), self.of(prefix, "self_attn.o_proj"))
        normed = rms_norm(stream, self.of(prefix, "post_attention_layernorm"))
        gate = functional.silu(functional.linear(normed, self.of(prefix, "mlp.gate_proj")))
        up = functional.linear(normed, self.of(prefix, "mlp.up_proj"))
        return stream + functional.linear(gate * up, self.of(prefix, "mlp.down_proj"))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_eagle3_single_token(tmp_path: Path, num_layers: int) -> None:
    model = load(make_tiny_draft(tmp_path, num_hidden_layers=num_layers))
    plain = SingleToken(tmp_path, model.config)
    first = "midlayer." if num_layers == 1 else "layers.0."
    states = features(1)
    output = step(model, states)
    stream = functional.linear(states, plain.weights["fc.weight"])
    embedded = rms_norm(
        model.get_embed_and_head()[0][TOKENS[:1]], plain.of(first, "input_layernorm")
    )
    both = torch.cat((embedded, rms_norm(stream, plain.of(first, "hidden_norm"))), dim=-1)
    stream = plain.layer(first, stream, both)
    for layer_id in range(1, num_layers):
        prefix = f"layers.{layer_id}."
        stream = plain.layer(prefix, stream, rms_norm(stream, plain.of(prefix, "hidden_norm")))
    logits = functional.linear(rms_norm(stream, plain.of("", "norm")), plain.of("", "lm_head"))
    torch.testing.assert_close(states_of(output), stream, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(output.next_token_logits, logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_eagle_single_token(tmp_path: Path, num_layers: int) -> None:
    model = load(make_tiny_draft(tmp_path, EAGLE_ARCHITECTURE, num_hidden_layers=num_layers))
    plain = SingleToken(tmp_path, model.config)
    embed, head = model.get_embed_and_head()
    states = features(1, HIDDEN)
    output = step(model, states)
    stream = functional.linear(
        torch.cat((embed[TOKENS[:1]], states), dim=-1),
        plain.weights["fc.weight"],
        plain.weights["fc.bias"],
    )
    stream = plain.layer("layers.0.", stream, stream)
    for layer_id in range(1, num_layers):
        prefix = f"layers.{layer_id}."
        stream = plain.layer(prefix, stream, rms_norm(stream, plain.of(prefix, "input_layernorm")))
    torch.testing.assert_close(states_of(output), stream, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(
        output.next_token_logits, functional.linear(stream, head), atol=TOLERANCE, rtol=1e-5
    )


@pytest.mark.parametrize("architecture", [EAGLE_ARCHITECTURE, EAGLE3_ARCHITECTURE])
def test_tokens_one_by_one_are_the_same_as_at_once(tmp_path: Path, architecture: str) -> None:
    model = load(make_tiny_draft(tmp_path, architecture))
    states = features(len(TOKENS), model.draft_config.input_width)
    at_once = step(model, states)
    runner = MiniRunner(model, page_size=4)
    row = runner.new_request()
    for index, token in enumerate(TOKENS):
        output = runner.decode(
            [row], [token], CaptureHiddenMode.LAST, hidden_states=states[index : index + 1]
        )
        wanted = at_once.next_token_logits[index]
        torch.testing.assert_close(output.next_token_logits[0], wanted, atol=TOLERANCE, rtol=1e-5)
        torch.testing.assert_close(
            states_of(output)[0], states_of(at_once)[index], atol=TOLERANCE, rtol=1e-5
        )


def test_only_the_rows_asked_for_come_back(tmp_path: Path) -> None:
    model = load(make_tiny_draft(tmp_path))
    states = features(9)
    everything = step(model, states)
    runner = MiniRunner(model)
    rows = [runner.new_request(), runner.new_request()]
    output = runner.extend(
        rows,
        [TOKENS, TOKENS],
        capture=CaptureHiddenMode.LAST,
        mode=ForwardMode.DRAFT_EXTEND,
        hidden_states=torch.cat((states, states)),
        logits_rows=[3, 9 + 8],
    )
    for got, row in zip(range(2), (3, 8)):
        torch.testing.assert_close(
            output.next_token_logits[got], everything.next_token_logits[row], atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            states_of(output)[got], states_of(everything)[row], atol=1e-5, rtol=0
        )


def test_own_states_skip_the_fusion_and_are_not_written_to(tmp_path: Path) -> None:
    model = load(make_tiny_draft(tmp_path))
    wide = features(3)
    fused = functional.linear(wide, load_file(tmp_path / "model.safetensors")["fc.weight"])
    before = fused.clone()
    from_own = step(model, fused)
    assert torch.equal(fused, before)
    torch.testing.assert_close(
        from_own.next_token_logits, step(model, wide).next_token_logits, atol=1e-4, rtol=0
    )


# -- variants -----------------------------------------------------------------------------------


def variant(tmp_path: Path, **overrides: Any) -> tuple[EagleDraftModel, EagleDraftModel]:
    """A draft with a feature, and the plain one with the same weights otherwise."""
    model = load(make_tiny_draft(tmp_path / "variant", **overrides))
    plain = load(make_tiny_draft(tmp_path / "plain"))
    return model, plain


def test_norm_over_all_features(tmp_path: Path) -> None:
    model, plain = variant(tmp_path, norm_before_fc=True)
    weight = load_file(tmp_path / "variant" / "model.safetensors")["input_norm.weight"]
    states = features(3)
    expected = step(plain, rms_norm(states, weight))
    torch.testing.assert_close(
        step(model, states).next_token_logits, expected.next_token_logits, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("old_names", [False, True])
def test_norm_of_each_feature(tmp_path: Path, old_names: bool) -> None:
    folder = make_tiny_draft(tmp_path / "variant", fc_norm=True)
    weights = load_file(folder / "model.safetensors")
    for index, old in enumerate(("low", "mid", "high")):
        # No name ends like a norm's, so make them differ from each other on purpose.
        weights[f"fc_norm.{index}.weight"] = torch.full((HIDDEN,), 0.5 + index)
        if old_names:
            weights[f"aux_norm_{old}.weight"] = weights.pop(f"fc_norm.{index}.weight")
    write_weights(folder, weights)
    model, plain = load(folder), load(make_tiny_draft(tmp_path / "plain"))
    states = features(3)
    parts = [
        rms_norm(part, torch.full((HIDDEN,), 0.5 + index))
        for index, part in enumerate(states.chunk(3, dim=-1))
    ]
    expected = step(plain, torch.cat(parts, dim=-1))
    torch.testing.assert_close(
        step(model, states).next_token_logits, expected.next_token_logits, atol=1e-4, rtol=0
    )


def test_normed_output(tmp_path: Path) -> None:
    model, plain = variant(tmp_path, norm_output=True)
    weight = load_file(tmp_path / "plain" / "model.safetensors")["norm.weight"]
    output, expected = step(model, features(3)), step(plain, features(3))
    assert torch.equal(output.next_token_logits, expected.next_token_logits)
    torch.testing.assert_close(
        states_of(output), rms_norm(states_of(expected), weight), atol=1e-5, rtol=0
    )


def test_target_of_another_width_brings_an_own_embedding(tmp_path: Path) -> None:
    folder = make_tiny_draft(tmp_path, target_hidden_size=44)
    model = load(folder, target_hidden=44)
    stored = load_file(folder / "model.safetensors")
    assert stored["fc.weight"].shape == (HIDDEN, 3 * 44)
    assert torch.equal(model.get_embed_and_head()[0], stored["embed_tokens.weight"])
    assert step(model, features(3, 3 * 44)).next_token_logits.shape == (3, 101)


def test_final_states_as_the_only_feature_need_no_fusion(tmp_path: Path) -> None:
    folder = make_tiny_draft(tmp_path, eagle_config={"use_aux_hidden_state": False})
    assert "fc.weight" not in load_file(folder / "model.safetensors")
    assert step(load(folder), features(3, HIDDEN)).next_token_logits.shape == (3, 101)


@pytest.mark.parametrize("tied", [False, True])
def test_without_own_head_the_targets_parameters_are_used(tmp_path: Path, tied: bool) -> None:
    model = load(make_tiny_draft(tmp_path, draft_vocab_size=None, tie_word_embeddings=tied))
    embed, head = target_parameters(5, HIDDEN)
    model.set_embed_and_head(embed, head)
    assert model.get_embed_and_head()[1] is (embed if tied else head)
    assert model.hot_token_id is None
    ids = torch.tensor([1, 2])
    assert model.to_target_ids(ids) is ids
    before = step(model, features(1)).next_token_logits
    assert before.shape == (1, VOCAB_SIZE)
    # The storage is the target's: an update there is seen here.
    (embed if tied else head).data.zero_()
    assert not step(model, features(1)).next_token_logits.any()


# -- checkpoints --------------------------------------------------------------------------------


def test_other_published_names_give_the_same_model(tmp_path: Path) -> None:
    folder = make_tiny_draft(tmp_path)
    weights = load_file(folder / "model.safetensors")
    expected = step(load(folder), features(3)).next_token_logits
    renamed = {
        "model." + name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in weights.items()
    }
    (folder / "model.safetensors").unlink()
    torch.save(renamed, folder / "pytorch_model.bin")
    assert torch.equal(step(load(folder), features(3)).next_token_logits, expected)


def test_token_map_is_offsets_and_follows_updates_in_place(tmp_path: Path) -> None:
    model = load(make_tiny_draft(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    tokens = model.hot_token_id
    assert tokens is not None
    assert torch.equal(tokens, weights["t2d"].nonzero().squeeze(1))
    assert model.to_target_ids(torch.tensor([[100]])).tolist() == [[int(tokens[100])]]
    assert model.load_weights([("d2t", torch.full((101,), 7))]) == {"d2t"}
    assert tokens.tolist() == list(range(7, 108))


def test_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    folder = make_tiny_draft(tmp_path, draft_vocab_size=VOCAB_SIZE)
    weights = load_file(folder / "model.safetensors")
    del weights["d2t"], weights["t2d"]
    write_weights(folder, weights)
    tokens = load(folder).hot_token_id
    assert tokens is not None and tokens.tolist() == list(range(VOCAB_SIZE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc.weight": None}, r"missing tensors \(1\): fc.weight"),
        ({"d2t": None}, r"missing tensors \(1\): d2t"),
        ({"midlayer.hidden_norm.weight": None}, "missing.*layers.0.hidden_norm.weight"),
        ({"fc.weight": torch.zeros(60, 179)}, r"fc.weight: expected \(60, 180\), got \(60, 179\)"),
        ({"lm_head.weight": torch.zeros(100, 60)}, r"lm_head.weight: expected \(101, 60\)"),
        ({"fc.bias": torch.zeros(60)}, r"unexpected tensors \(1\): fc.bias"),
        ({"midlayer.self_attn.q_norm.weight": torch.zeros(10)}, "unexpected.*q_norm"),
        ({"d2t": torch.full((101,), 200)}, "tokens 200..300, the vocabulary has 263"),
        ({"d2t": -torch.arange(101)}, "several draft ids to one token"),
        ({"d2t": torch.zeros(101)}, "d2t: expected values like torch.int64"),
    ],
)
def test_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, torch.Tensor | None], message: str
) -> None:
    folder = make_tiny_draft(tmp_path)
    weights: dict[str, Any] = {**load_file(folder / "model.safetensors"), **change}
    write_weights(folder, {name: tensor for name, tensor in weights.items() if tensor is not None})
    with pytest.raises(WeightLoadError, match=message):
        load(folder)


@pytest.mark.parametrize("offset", [200, -1])
def test_a_map_out_of_the_vocabulary_is_seen_before_anything_is_written(
    tmp_path: Path, offset: int
) -> None:
    model = load(make_tiny_draft(tmp_path))
    good, bad = torch.full((101,), 7), torch.full((101,), offset)
    model.check_weights([("d2t", good)], complete=False).raise_if_any("the update")
    model.check_weights([("d2t", bad.to("meta"))], complete=False).raise_if_any("the files' list")
    with pytest.raises(WeightLoadError, match="the update .* values that cannot be .*d2t leads to"):
        model.check_weights([("d2t", bad)], complete=False).raise_if_any("the update")


def test_bias_of_an_old_draft_is_optional_where_the_config_is_silent(tmp_path: Path) -> None:
    folder = make_tiny_draft(tmp_path / "silent", EAGLE_ARCHITECTURE)
    weights = load_file(folder / "model.safetensors")
    del weights["fc.bias"]
    write_weights(folder, weights)
    model = load(folder)
    assert model.get_weights_by_name("fc.bias") == [0.0] * HIDDEN
    stated = make_tiny_draft(tmp_path / "stated", EAGLE_ARCHITECTURE, bias=True)
    write_weights(stated, weights)
    with pytest.raises(WeightLoadError, match="fc.bias"):
        load(stated)


def test_stored_copy_of_the_embedding_is_not_used_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_draft(tmp_path, EAGLE_ARCHITECTURE)
    weights = load_file(folder / "model.safetensors")
    weights["embed_tokens.weight"] = torch.zeros(VOCAB_SIZE, HIDDEN)
    write_weights(folder, weights)
    with caplog.at_level("INFO"):
        model = load(folder)
    assert "embed_tokens.weight" in caplog.text
    assert torch.equal(model.get_embed_and_head()[0], target_parameters(5, HIDDEN)[0])
    assert id(model.embed_tokens.weight) not in {id(p) for p in model.own_parameters()}
    assert load_weights_into(model, str(folder)) == set(weights) - {"embed_tokens.weight"}


def test_weights_can_be_read_back_under_published_names(tmp_path: Path) -> None:
    model = load(make_tiny_draft(tmp_path))
    weights = load_file(tmp_path / "model.safetensors")
    for name in weights.keys() - {"t2d"}:
        assert model.get_weights_by_name(name, 3) == weights[name][:3].tolist(), name


# -- callers' mistakes --------------------------------------------------------------------------


def test_draft_without_the_targets_embedding_does_not_run(tmp_path: Path) -> None:
    config = ModelConfig.from_path(str(make_tiny_draft(tmp_path)))
    model = load_model(config, show_progress=False)
    assert isinstance(model, EagleDraftModel)
    with pytest.raises(RuntimeError, match="set_embed_and_head"):
        step(model, features(1))


def test_target_parameters_of_another_shape_are_refused(tmp_path: Path) -> None:
    model = load(make_tiny_draft(tmp_path, draft_vocab_size=None))
    embed, _ = target_parameters(1, HIDDEN)
    with pytest.raises(ValueError, match=r"head has shape \(263, 44\)"):
        model.set_embed_and_head(embed, target_parameters(1, 44)[1])


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (None, "needs input_hidden_states"),
        (torch.zeros(2, 180), "1 draft tokens.*of 2"),
        (torch.zeros(1, 120), "width 180.*or 60.*got 120"),
    ],
)
def test_states_that_do_not_match_are_refused(
    tmp_path: Path, states: torch.Tensor | None, message: str
) -> None:
    runner = MiniRunner(load(make_tiny_draft(tmp_path)))
    with pytest.raises(RuntimeError, match=message):
        runner.decode([runner.new_request()], [1], hidden_states=states)


def test_idle_batch_passes_through(tmp_path: Path) -> None:
    model = load(make_tiny_draft(tmp_path))
    output = MiniRunner(model).extend(
        [], [], mode=ForwardMode.IDLE, hidden_states=torch.zeros(0, 180)
    )
    assert output.next_token_logits.shape == (0, 101)
