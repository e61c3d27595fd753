"""The EAGLE-3 trainer end to end with a tiny random target: learning, files, resumption, decoding.

What the trainer saves is run by the server's draft class and by the plain reference loop, which
share no code with the trainer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sglang.srt.configs.draft_config import read_draft_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_loader.loader import load_model
from sglang.srt.models.eagle_draft import EagleDraftModel
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.eagle3_reference import ReferenceDraft, ReferenceTarget, run_chain
from sglang.test.fakes.mini_runner import MiniRunner
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.training.eagle3.attention import attention_function
from sglang.training.eagle3.dataset import DatasetBuilder
from sglang.training.eagle3.draft import Eagle3Draft
from sglang.training.eagle3.evaluation import decode_chain, simulate
from sglang.training.eagle3.folders import DraftFolderError, read_draft
from sglang.training.eagle3.options import OptionsError, TrainOptions
from sglang.training.eagle3.run import prepare, run_training
from sglang.training.eagle3.samples import make_sample
from sglang.training.eagle3.target import FrozenTarget, TargetError
from sglang.training.eagle3.texts import Texts
from sglang.training.eagle3.trainer import Trainer

register_cpu_ci(est_time=40, suite="training")

ROOT = Path(__file__).resolve().parents[3]
NUM_STEPS = 3
CHATS = [
    ("name a fruit", "an apple is a fruit. a pear is a fruit."),
    ("count", "one two three four five six seven eight nine ten"),
    ("say it again", "again and again and again and again and again."),
    ("what is a tree", "a tree is a plant. a plant is green. green is a colour."),
]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    lines: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in CHATS
    ]
    lines += [{"text": " ".join(answer for _, answer in CHATS)}] * 2
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def _options(target: Path, data: Path, output: Path, **changes: Any) -> TrainOptions:
    values: dict[str, Any] = {
        "model": str(target), "data": [str(data)], "output": str(output), "device": "cpu",
        "num_steps": NUM_STEPS, "draft_vocab_size": 150, "draft_dtype": "float32",
        "max_length": 120, "repetition_share": 0.3, "repetition_min": 40,
        "batch_tokens": 400, "lr": 1e-2, "warmup_steps": 2, "max_steps": 60,
        "log_every": 5, "eval_every": 0, "checkpoint_every": 4, "keep_checkpoints": 20,
        "eval_prompts": 2, "eval_repeated": 1, "eval_tokens": 24, "eval_loops": 1, **changes,
    }  # fmt: skip
    options = TrainOptions(**values)
    options.check()
    return options


@pytest.fixture(scope="module")
def trained(
    target_folder: Path, data_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainer]:
    output = tmp_path_factory.mktemp("trained")
    yield run_training(_options(target_folder, data_file, output, optimizer="muon"))


@pytest.fixture(scope="module")
def draft_folder(trained: Trainer) -> Path:
    return Path(trained._options.output) / "draft"


def test_the_loss_falls_and_the_log_says_so(trained: Trainer, draft_folder: Path) -> None:
    assert len(trained.losses) == 60
    first, last = sum(trained.losses[:5]) / 5, sum(trained.losses[-5:]) / 5
    assert last < 0.8 * first
    lines = [json.loads(line) for line in (draft_folder.parent / "log.jsonl").open()]
    logged = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(logged) == 12 and logged[-1] == pytest.approx(last)
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluations] == [0, 60]
    assert {"chat_simulated", "chat_decoded", "repeated_simulated"} <= set(evaluations[-1])


def _random_text(seed: int, length: int = 30) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def test_the_server_s_draft_gives_the_trainer_s_logits_at_every_step(
    trained: Trainer, draft_folder: Path, target_folder: Path
) -> None:
    target, draft = trained._target, trained._draft
    token_ids = _random_text(1)
    padded = torch.tensor([token_ids])
    length = len(token_ids) - NUM_STEPS
    features = target.states(padded[:, :length]).features
    attention = attention_function("merged")
    with torch.no_grad():
        steps = list(draft.unroll(target.embed(padded), features, NUM_STEPS, attention))
        expected = torch.stack([draft.logits(states[0]) for states in steps])

    target_config = ModelConfig.from_path(str(target_folder))
    config = read_draft_config(str(draft_folder), target_config)
    own = load_model(config, show_progress=False)
    assert isinstance(own, EagleDraftModel)
    own.set_embed(torch.nn.Parameter(target.embedding))
    runner = MiniRunner(own)
    row = runner.new_request()
    for position in (0, 4, length - 1):
        runner.rewind(row, 0)
        output = runner.extend(
            [row],
            [token_ids[1 : position + 2]],
            capture=CaptureHiddenMode.LAST,
            hidden_states=features[0, : position + 1],
        )
        torch.testing.assert_close(
            output.next_token_logits[0], expected[0, position], atol=1e-3, rtol=1e-3
        )
        for step in range(1, NUM_STEPS):
            output = runner.decode(
                [row],
                [token_ids[position + 1 + step]],
                capture=CaptureHiddenMode.LAST,
                hidden_states=output.hidden_states,
            )
            torch.testing.assert_close(
                output.next_token_logits[0], expected[step, position], atol=1e-3, rtol=1e-3
            )
    assert own.hot_token_id is not None
    assert torch.equal(own.hot_token_id, draft.token_ids)


def test_decoding_is_that_of_the_reference_and_of_the_simulation(
    trained: Trainer, draft_folder: Path, target_folder: Path
) -> None:
    target, draft = trained._target, trained._draft
    reference = ReferenceTarget(target_folder)
    reference_draft = ReferenceDraft(draft_folder, reference.embedding)
    accepted = []
    for prompt in (_random_text(2, 12), list(b"again and again and again")):
        run = decode_chain(target, draft, prompt, NUM_STEPS, 40)
        expected = run_chain(
            reference, reference_draft, prompt, num_steps=NUM_STEPS, max_new_tokens=40
        )
        assert run.output_ids[:40] == expected.output_ids
        assert run.accept_lens == expected.accept_lens
        accepted += run.accept_lens
        sample = make_sample(prompt, run.output_ids)
        simulated = simulate(target, draft, [sample], NUM_STEPS, attention_function("merged"), 500)
        # Chains that would reach beyond the answer's end cannot be simulated.
        known = [
            index
            for index in range(len(run.accept_lens))
            if sum(run.accept_lens[:index]) + NUM_STEPS < len(run.output_ids)
        ]
        assert simulated == run.accept_lens[: len(known)]
    assert len(set(accepted)) > 1, "the draft never proposed anything right"


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "adamw", "accumulate": 2},
        {"optimizer": "muon", "chain_weight": 0.3, "acceptance": "sampled", "loss_rows": 64},
    ],
)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(
    target_folder: Path,
    data_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
) -> None:
    def options(name: str, **more: Any) -> TrainOptions:
        return _options(
            target_folder, data_file, tmp_path / name, max_steps=12, **{**changes, **more}
        )

    whole = run_training(options("whole"))
    interrupted = prepare(options("parts"))
    step = interrupted._step

    def stop_after_seven() -> Any:
        interrupted.stop_requested = interrupted.progress.step == 6
        return step()

    monkeypatch.setattr(interrupted, "_step", stop_after_seven)
    interrupted.train()
    resumed = run_training(options("parts", resume=True))
    assert len(interrupted.losses) == 7
    assert interrupted.losses + resumed.losses == whole.losses
    parts = [load_file(tmp_path / n / "draft" / "model.safetensors") for n in ("whole", "parts")]
    assert parts[0].keys() == parts[1].keys()
    assert all(torch.equal(parts[0][name], parts[1][name]) for name in parts[0])


def test_a_run_is_not_resumed_with_other_options_nor_overwritten(
    trained: Trainer, target_folder: Path, data_file: Path
) -> None:
    output = Path(trained._options.output)
    with pytest.raises(OptionsError, match="optimizer was 'muon'"):
        prepare(_options(target_folder, data_file, output, resume=True))
    with pytest.raises(OptionsError, match="--resume"):
        prepare(_options(target_folder, data_file, output))


def test_every_prompt_is_answered_though_nothing_is_invented(target_folder: Path) -> None:
    """A random target ends hardly any of the user turns that it is to invent."""
    target = FrozenTarget(target_folder, torch.device("cpu"), torch.float32)
    options = TrainOptions(
        model=str(target_folder), builtin_prompts=12, self_prompts=4, write_batch=2,
        answer_tokens=4, max_length=400, eval_prompts=0, eval_repeated=0, repetition_share=0,
    )  # fmt: skip
    builder = DatasetBuilder(options, target, Texts(target_folder, target.end_ids))
    known = builder._known_prompts()
    assert len(known) >= 10
    written = [sample.token_ids.tolist() for sample in builder._write_answers(known)]
    assert all(any(w[: len(p)] == p for w in written) for p in known)


def test_published_names_and_types(draft_folder: Path, trained: Trainer) -> None:
    tensors = load_file(draft_folder / "model.safetensors")
    layer = [
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight",
    ]  # fmt: skip
    expected = {f"midlayer.{name}" for name in layer}
    expected |= {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(tensors) == expected
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    token_ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], token_ids)
    assert set(trained._target.end_ids) <= set(token_ids.tolist())


def test_a_draft_is_enlarged_without_training(
    target_folder: Path, data_file: Path, draft_folder: Path, tmp_path: Path
) -> None:
    trainer = run_training(
        _options(
            target_folder, data_file, tmp_path / "larger", max_steps=0, eval_prompts=0,
            init_draft=str(draft_folder), draft_vocab_size=200,
        )
    )  # fmt: skip
    old, new = read_draft(draft_folder), read_draft(tmp_path / "larger" / "draft")
    assert trainer.progress.step == 0 and new.vocabulary.size == 200
    kept = new.vocabulary.draft_ids[old.vocabulary.token_ids]
    assert bool((kept >= 0).all())
    assert torch.equal(new.weights["lm_head.weight"][kept], old.weights["lm_head.weight"])
    for name in set(old.weights) - {"lm_head.weight"}:
        assert torch.equal(old.weights[name], new.weights[name])
    added = new.weights["lm_head.weight"][~old.vocabulary.t2d[new.vocabulary.token_ids]]
    assert len(added) == 50 and bool(added.isfinite().all())


def test_fine_tuning_goes_on_from_the_saved_draft(
    trained: Trainer, target_folder: Path, data_file: Path, draft_folder: Path, tmp_path: Path
) -> None:
    again = run_training(
        _options(
            target_folder, data_file, tmp_path / "again", init_draft=str(draft_folder),
            max_steps=5, lr=1e-4, draft_vocab_size=0,
        )
    )  # fmt: skip
    assert again.losses[0] < 0.75 * trained.losses[0]
    assert torch.equal(again._draft.token_ids, trained._draft.token_ids)


def test_captured_layers_are_chosen_and_written_as_the_layers_before(
    target_folder: Path, data_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "layers"
    run_training(_options(target_folder, data_file, output, max_steps=1, capture_layers=[1, 4, 6]))
    raw = json.loads((output / "draft" / "config.json").read_text())
    assert raw["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 3, 5]}
    assert read_draft(output / "draft").capture_layers == (1, 4, 6)


def test_features_are_the_streams_that_enter_the_layers(target_folder: Path) -> None:
    target = FrozenTarget(target_folder, torch.device("cpu"), torch.float32, [0, 2, 6])
    token_ids = torch.tensor([_random_text(3, 9)])
    output = target.model(token_ids, output_hidden_states=True)
    # What transformers lists as the last one is normed; layer 6 of 6 is the norm's input.
    streams = output.hidden_states
    features = target.states(token_ids).features.chunk(3, dim=-1)
    torch.testing.assert_close(features[0], streams[0])
    torch.testing.assert_close(features[1], streams[2])
    torch.testing.assert_close(target.model.model.norm(features[2]), streams[6])
    with pytest.raises(TargetError, match="--capture-layers"):
        FrozenTarget(target_folder, torch.device("cpu"), torch.float32, [0, 2, 7])


def test_kinds_of_drafts_that_are_not_trained_are_refused(
    draft_folder: Path, tmp_path: Path
) -> None:
    raw = json.loads((draft_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "norm_output": True}))
    with pytest.raises(DraftFolderError, match="normed output"):
        read_draft(tmp_path)


def test_a_start_from_the_target_s_head(trained: Trainer) -> None:
    draft = Eagle3Draft(trained._draft.shape, read_draft_vocabulary(trained))
    rows = trained._target.head_rows[draft.token_ids]
    draft.init_weights(0, rows)
    assert torch.equal(draft.lm_head.weight, rows)


def read_draft_vocabulary(trained: Trainer) -> Any:
    return read_draft(Path(trained._options.output) / "draft").vocabulary


def test_the_command_line_in_its_tiny_form(target_folder: Path, tmp_path: Path) -> None:
    script = ROOT / "scripts" / "train_eagle3.py"
    command = [sys.executable, str(script), "--model", str(target_folder), "--device", "cpu"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "run"), "--self-prompts", "4", "--tiny"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "accept lengths" in done.stderr
    assert read_draft(tmp_path / "run" / "draft").vocabulary.size == 128
    refused = subprocess.run(
        [*command, "--output", str(tmp_path / "x")], capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    assert "when to stop" in refused.stderr
