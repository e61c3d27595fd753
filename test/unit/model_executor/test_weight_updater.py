"""Updates of running models on one rank: what is written, what is refused, what is left behind."""

from __future__ import annotations

import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import TPGroup
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.model_executor import model_runner as documented
from sglang.srt.model_executor import weight_updater as module
from sglang.srt.model_executor.memory_saver import MemorySaver
from sglang.srt.model_executor.weight_groups import UpdateTimeouts
from sglang.srt.model_executor.weight_updater import WeightUpdater, WeightUpdateResult
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.weight_fingerprint import WeightsFingerprint
from sglang.srt.model_loader.weight_utils import CheckpointError, SafetensorsCheckpoint
from sglang.srt.models.base import LanguageModel
from sglang.srt.utils.serialization import MultiprocessingSerializer, _rebuild_cpu_tensor
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, LocalSerializedTensor
from sglang.test.fakes.tiny_models import make_tiny_checkpoint, tiny_config, tiny_weights
from sglang.test.fakes.trainer_group import Opening

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 10,
    "vocab_size": 37,
}
UP = "model.layers.1.mlp.up_proj.weight"
GATE_UP = "model.layers.1.mlp.gate_up_proj.weight"


class CountingDecodeRunner:
    num_steps = 0
    calls = 0

    def stage(self, step: Any) -> None:
        return None

    def can_run(self, batch: Any) -> bool:
        return False

    def run(self, batch: Any) -> Any:
        raise AssertionError

    def weights_changed(self) -> None:
        self.calls += 1


@dataclass
class Runner:
    model: LanguageModel
    tp: TPGroup = field(default_factory=lambda: TPGroup(size=1, rank=0))
    device: torch.device = torch.device("cpu")
    decode_runner: CountingDecodeRunner = field(default_factory=CountingDecodeRunner)

    def __post_init__(self) -> None:
        self.fingerprint = WeightsFingerprint(self.tp.cpu_group)
        self.fingerprint.full(self.model)
        self.places = {n: p.data_ptr() for n, p in self.model.named_parameters()}


def make_runner(folder: Path, **config: Any) -> Runner:
    make_tiny_checkpoint(folder, **{**SMALL, **config})
    return Runner(load_model(ModelConfig.from_path(str(folder)), show_progress=False))


def weights(seed: int, **config: Any) -> dict[str, torch.Tensor]:
    return tiny_weights(tiny_config("llama", **{**SMALL, **config}), seed)


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return make_runner(tmp_path / "old")


@pytest.fixture
def updater(runner: Runner, tmp_path: Path) -> WeightUpdater:
    return WeightUpdater(
        runner,
        model_path=str(tmp_path / "old"),
        custom_weight_loaders=[
            f"{__name__}.halve",
            f"{__name__}.insist",
            "sglang.srt.model_executor.model_runner._model_load_weights_direct",
        ],
        timeouts=UpdateTimeouts(join_s=2, receive_s=2),
    )


def pack(obj: Any) -> list[str | bytes]:
    return [MultiprocessingSerializer.serialize(obj, output_str=True)]


def bucket(named: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    made = FlattenedTensorBucket(named_tensors=named)
    return {"flattened_tensor": made.get_flattened_tensor(), "metadata": made.get_metadata()}


def assert_holds(runner: Runner, expected: dict[str, torch.Tensor]) -> None:
    """Exactly these weights, in the memory they always had, with an honest fingerprint."""
    for name, slot in runner.model.weight_table().items():
        assert torch.equal(slot.view(), expected[name]), name
    assert {n: p.data_ptr() for n, p in runner.model.named_parameters()} == runner.places
    assert runner.fingerprint.digest() == WeightsFingerprint().full(runner.model)


def assert_refused(result: WeightUpdateResult, runner: Runner, *texts: str) -> None:
    assert not result.success and not result.weights_mixed and not result.changed
    for text in texts:
        assert text in result.message
    assert_holds(runner, weights(0))


# -- tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["list", "bucket", "local"])
def test_checkpoint_names(form: str, runner: Runner, updater: WeightUpdater) -> None:
    new = weights(1)
    some = [(name, new[name]) for name in new if "mlp" in name or "norm" in name or "q_" in name]
    if form == "bucket":
        result = updater.update_from_tensor(pack(bucket(some)), "flattened_bucket")
    elif form == "local":
        local = [
            (name, LocalSerializedTensor(values=[MultiprocessingSerializer.serialize(tensor)]))
            for name, tensor in some
        ]
        result = updater.update_from_tensor(pack(local))
    else:
        result = updater.update_from_tensor(pack(some))
    assert result.success and result.message == "Success" and not result.weights_mixed
    assert_holds(runner, weights(0) | dict(some))
    assert "model.layers.0.self_attn.qkv_proj.weight" in result.changed["target"]
    assert "model.embed_tokens.weight" not in result.changed["target"]
    assert set(result.changed) == {"target"}
    assert runner.decode_runner.calls == 1


def test_own_parameters(runner: Runner, updater: WeightUpdater) -> None:
    fused = torch.randn(20, 24)
    before = runner.fingerprint.digest()
    for load_format in (
        "direct",
        "sglang.srt.model_executor.model_runner._model_load_weights_direct",
    ):
        fused += 1.0
        result = updater.update_from_tensor(pack([(GATE_UP, fused)]), load_format)
        assert result.success, result.message
        expected = weights(0) | {UP: fused[10:], UP.replace("up_", "gate_"): fused[:10]}
        assert_holds(runner, expected)
        assert runner.fingerprint.digest() != before


def halve(model: nn.Module, named: list[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in named:
        model.get_parameter(name).data.copy_(tensor / 2)


def insist(model: nn.Module, named: list[tuple[str, torch.Tensor]]) -> None:
    assert not named, "no such tensor"


def test_whatever_a_loader_raises_is_an_answer(updater: WeightUpdater) -> None:
    result = updater.update_from_tensor(pack([("a", torch.zeros(1))]), f"{__name__}.insist")
    assert not result.success and "no such tensor" in result.message


def test_a_name_that_is_no_text_is_told_as_far_as_it_can_be(
    runner: Runner, updater: WeightUpdater
) -> None:
    result = updater.update_from_tensor(pack([("lone \ud800", torch.zeros(1))]))
    result.message.encode()
    assert_refused(result, runner, "lone ?")


def test_checks_that_find_no_memory_are_answers(
    runner: Runner, updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*args: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    for name, action in (("snapshot", "snapshot"), ("reset_tensors", "reset_tensors")):
        monkeypatch.setattr(updater._checker, name, no_memory)
        result = updater.check_weights(action)
        assert not result.success and "no memory" in result.message
    assert updater.weights_mixed, "some may have been reset"


def test_custom_loaders(runner: Runner, updater: WeightUpdater) -> None:
    fused = torch.randn(20, 24)
    assert updater.update_from_tensor(pack([(GATE_UP, fused)]), f"{__name__}.halve").success
    assert torch.equal(runner.model.get_parameter(GATE_UP), fused / 2)
    assert runner.fingerprint.digest() == WeightsFingerprint().full(runner.model)


def test_custom_loaders_are_imported_at_start(runner: Runner) -> None:
    for name in ("no.such.function", f"{__name__}.absent", "nameless"):
        with pytest.raises(ValueError, match=f"--custom-weight-loader {name} cannot be imported"):
            WeightUpdater(runner, model_path="x", custom_weight_loaders=[name])


def test_the_table_of_names_is_built_once(
    runner: Runner, updater: WeightUpdater, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[LanguageModel] = []
    intact = LanguageModel.weight_table

    def weight_table(self: LanguageModel) -> Any:
        built.append(self)
        return intact(self)

    monkeypatch.setattr(LanguageModel, "weight_table", weight_table)
    assert updater.update_from_tensor(pack([GOOD])).success
    assert len(built) == 1


def test_padding_without_tensors_is_a_success(runner: Runner, updater: WeightUpdater) -> None:
    empty = {"flattened_tensor": torch.empty(0, dtype=torch.uint8), "metadata": []}
    result = updater.update_from_tensor(pack(empty), "flattened_bucket")
    assert result.success and not result.changed
    assert_holds(runner, weights(0))


class _Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def _short_bucket() -> dict[str, Any]:
    made = bucket([(UP, torch.ones(10, 24))])
    return {**made, "flattened_tensor": made["flattened_tensor"][:-4]}


GOOD = (UP.replace("1", "0"), torch.ones(10, 24))
REFUSED: dict[str, tuple[Callable[[], list[Any]], str | None, str]] = {
    "unknown name": (lambda: pack([GOOD, ("no.such", torch.ones(1))]), None, "no.such"),
    "shape": (lambda: pack([GOOD, (UP, torch.ones(10, 25))]), None, f"{UP}: expected (10, 24)"),
    "dtype": (lambda: pack([GOOD, (UP, torch.ones(10, 24).int())]), None, "torch.int32"),
    "direct name": (lambda: pack([(GATE_UP, torch.ones(20, 24)), GOOD]), "direct", GOOD[0]),
    "direct shape": (lambda: pack([(GATE_UP, torch.ones(20, 2))]), "direct", "(20, 24)"),
    "short bucket": (lambda: pack(_short_bucket()), "flattened_bucket", UP),
    "no bucket": (lambda: pack([GOOD]), "flattened_bucket", "bucket"),
    "not metadata": (
        lambda: pack({"flattened_tensor": torch.ones(1), "metadata": ["x"]}),
        "flattened_bucket",
        "FlattenedTensorMetadata",
    ),
    "not pairs": (lambda: pack([(UP, "text")]), None, "pairs of name and tensor"),
    "not a list": (lambda: pack(7), None, "int"),
    "hostile": (lambda: [pickle.dumps([GOOD[0], _Hostile()])], None, "Blocked unsafe global"),
    "truncated": (lambda: [pack([GOOD])[0][:-40]], None, "cannot read serialized"),
    "no entry": (lambda: [], None, "none for rank 0"),
    "twice": (lambda: pack([GOOD, GOOD]), None, f"more than once (1): {GOOD[0]}"),
    "load format": (lambda: pack([GOOD]), "os.system", "Unknown load_format=os.system"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_does_not_fit_changes_nothing(
    kind: str, runner: Runner, updater: WeightUpdater, caplog: pytest.LogCaptureFixture
) -> None:
    make, load_format, text = REFUSED[kind]
    assert_refused(updater.update_from_tensor(make(), load_format), runner, text)
    assert runner.decode_runner.calls == 0
    if kind in ("hostile", "load format"):
        assert not any(record.exc_info for record in caplog.records), "a line says all"


# -- files --------------------------------------------------------------------------------------


def test_disk(runner: Runner, updater: WeightUpdater, tmp_path: Path) -> None:
    new = make_tiny_checkpoint(tmp_path / "new", seed=1, num_shards=2, **SMALL)
    result = updater.update_from_disk(str(new))
    assert result.success and result.message == "Succeeded to update model weights."
    assert updater.model_path == str(new)
    assert_holds(runner, weights(1))
    assert updater.update_from_disk(str(tmp_path / "old")).success
    assert_holds(runner, weights(0))


def test_unfit_files_are_refused(runner: Runner, updater: WeightUpdater, tmp_path: Path) -> None:
    result = updater.update_from_disk(str(tmp_path / "absent"))
    assert_refused(result, runner, "Failed to get weights iterator", "absent")
    other = make_tiny_checkpoint(tmp_path / "other", seed=1, **{**SMALL, "intermediate_size": 12})
    result = updater.update_from_disk(str(other))
    assert_refused(result, runner, "Failed to update weights:", "Rolling back", "(10, 24)")
    assert updater.model_path == str(tmp_path / "old")


def _breaks_after(
    count: int, only: str
) -> Callable[[Any, Callable[[str], bool]], Iterator[tuple[str, torch.Tensor]]]:
    intact = SafetensorsCheckpoint.tensors

    def tensors(
        self: SafetensorsCheckpoint, is_wanted: Callable[[str], bool]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for index, pair in enumerate(intact(self, is_wanted)):
            if only in str(self.path) and index == count:
                raise CheckpointError("damaged half-way")
            yield pair

    return tensors


def test_damaged_files_bring_the_old_ones_back(
    runner: Runner, updater: WeightUpdater, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = make_tiny_checkpoint(tmp_path / "new", seed=1, **SMALL)
    monkeypatch.setattr(SafetensorsCheckpoint, "tensors", _breaks_after(5, "new"))
    result = updater.update_from_disk(str(new))
    assert not result.success and not result.weights_mixed
    assert "damaged half-way" in result.message and "Rolling back" in result.message
    assert result.changed, "the weights were written, twice"
    assert_holds(runner, weights(0))
    assert updater.model_path == str(tmp_path / "old")


def test_files_that_fail_before_anything_is_written_cost_nothing(
    runner: Runner, updater: WeightUpdater, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even what was received after the old files."""
    new = make_tiny_checkpoint(tmp_path / "new", seed=1, **SMALL)
    assert updater.update_from_tensor(pack(list(weights(2).items()))).success
    calls = runner.decode_runner.calls
    monkeypatch.setattr(SafetensorsCheckpoint, "tensors", _breaks_after(0, "new"))
    result = updater.update_from_disk(str(new))
    assert not result.success and not result.weights_mixed and not result.changed
    assert "damaged half-way" in result.message and "Restored" not in result.message
    assert_holds(runner, weights(2))
    assert runner.decode_runner.calls == calls
    monkeypatch.undo()  # it is remembered that the files are not what is there
    monkeypatch.setattr(SafetensorsCheckpoint, "tensors", _breaks_after(5, "new"))
    assert "are lost" in updater.update_from_disk(str(new)).message
    assert_holds(runner, weights(0))


def test_mixed_until_a_complete_update(
    runner: Runner, updater: WeightUpdater, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = make_tiny_checkpoint(tmp_path / "new", seed=1, **SMALL)
    monkeypatch.setattr(SafetensorsCheckpoint, "tensors", _breaks_after(5, ""))
    assert updater.update_from_disk(str(new)).weights_mixed
    assert runner.fingerprint.digest() == WeightsFingerprint().full(runner.model)
    monkeypatch.undo()
    named = list(weights(2).items())
    partial = updater.update_from_tensor(pack(named[:-1]))
    assert partial.weights_mixed
    assert (
        partial.mixed_tensors
        == (f"the target lacks 1 of {len(named)} tensors ({named[-1][0]})")
        == updater.describe_mixed()
    )
    whole = updater.update_from_tensor(pack(named[-1:]))
    assert not whole.weights_mixed and whole.mixed_tensors == ""
    assert_holds(runner, weights(2))


def test_parameters_of_one_region_are_outdated_one_by_one(tmp_path: Path) -> None:
    """Under the memory saver many parameters share a storage."""
    runner = make_runner(tmp_path / "old")
    MemorySaver(enabled=True).adopt_weights(runner.model, keeps_content=False)
    updater = WeightUpdater(runner, model_path=str(tmp_path / "old"))
    updater.weights_lost(lambda model: False)
    everything = set(runner.model.weight_table())
    fused = runner.model.get_parameter(GATE_UP).detach().clone()
    result = updater.update_from_tensor(pack([(GATE_UP, fused)]), "direct")
    assert result.success and result.weights_mixed
    (role,) = updater._roles
    gone = everything - role.outdated
    assert len(gone) == 2 and all("gate_proj" in name or "up_proj" in name for name in gone)


# -- sessions -----------------------------------------------------------------------------------


def test_sessions(runner: Runner, updater: WeightUpdater) -> None:
    assert not updater.end().success
    assert updater.begin().success and not updater.begin().success
    named = list(weights(1).items())
    assert updater.update_from_tensor(pack(named[:3])).success
    result = updater.update_from_tensor(pack([("no.such", torch.ones(1))]))
    assert not result.success and result.weights_mixed, "earlier calls of the session have written"
    result = updater.update_from_tensor(pack(named[3:]))
    assert result.success and not result.weights_mixed
    assert updater.end().success and not updater.end().success
    assert_holds(runner, weights(1))
    assert not updater.begin("nobody").success


# -- drafts -------------------------------------------------------------------------------------


class _Draft(LanguageModel):
    """Like an EAGLE draft: its names are the target's without a prefix; it borrows the head."""

    def __init__(self, config: ModelConfig, head: nn.Parameter) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].input_layernorm = _norm()
        self.fc = ReplicatedLinear(2, 3)
        nn.init.zeros_(self.fc.weight)
        self.head = head

    def forward(self, *_: Any) -> Any:
        raise AssertionError("only its weights are looked at")

    def split_weight(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        yield name.removeprefix("model."), tensor


def _norm() -> nn.Module:
    norm = RMSNorm(24, 1e-5)
    nn.init.zeros_(norm.weight)
    return norm


def test_a_draft_is_changed_only_by_its_own_tensors(
    runner: Runner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft_model = _Draft(runner.model.config, runner.model.get_parameter("lm_head.weight"))
    draft = Runner(draft_model)
    updater = WeightUpdater(runner, [draft], model_path=str(tmp_path / "old"))
    clean = draft.fingerprint.digest()
    norm = draft_model.get_parameter("layers.0.input_layernorm.weight")

    everything = [(n, t) for n, t in weights(1).items() if n != "lm_head.weight"]
    result = updater.update_from_tensor(pack(everything))  # its names fit the draft, too
    assert result.success and set(result.changed) == {"target"}
    assert draft.fingerprint.digest() == clean and not norm.any()

    result = updater.update_from_tensor(pack([("lm_head.weight", weights(1)["lm_head.weight"])]))
    assert result.changed["draft"] == {"head"}, "the head is shared"
    assert draft.fingerprint.digest() == WeightsFingerprint().full(draft_model) != clean

    name = "model.layers.0.input_layernorm.weight"
    result = updater.update_from_tensor(pack([(name, torch.ones(24))]), selector="draft")
    assert list(result.changed) == ["draft"] and bool((norm == 1).all())
    with caplog.at_level("INFO"):
        foreign = [(name, torch.ones(24)), GOOD]
        assert updater.update_from_tensor(pack(foreign), selector="draft").success
    assert f"1 of 2 tensors sent for the draft are not its own and were left out ({GOOD[0]})" in (
        caplog.text
    )
    result = updater.update_from_tensor(pack([("fc.weight", torch.ones(3, 2))]))
    assert list(result.changed) == ["draft"], "a name that the target has no use for"
    assert_holds(runner, weights(1))
    for named, selector in (([("fc.weight", torch.ones(3, 2))], "target"), ([GOOD], "nobody")):
        assert not updater.update_from_tensor(pack(named), selector=selector).success


def test_a_draft_of_the_same_form_follows(runner: Runner, tmp_path: Path) -> None:
    twin = make_runner(tmp_path / "twin")
    updater = WeightUpdater(runner, [twin], model_path=str(tmp_path / "old"))
    new = make_tiny_checkpoint(tmp_path / "new", seed=1, **SMALL)
    assert set(updater.update_from_disk(str(new)).changed) == {"target", "draft"}
    assert_holds(twin, weights(1))
    named = list(weights(2).items())
    only_target = updater.update_from_tensor(pack(named), selector="target")
    assert set(only_target.changed) == {"target"}
    assert_holds(twin, weights(1))
    assert updater.update_from_tensor(pack(named)).success
    assert_holds(twin, weights(2))
    alone = WeightUpdater(runner, model_path="x")
    assert "no draft" in alone.update_from_tensor(pack(named), selector="draft").message


# -- reading and checking -----------------------------------------------------------------------


def test_weights_by_name(runner: Runner, updater: WeightUpdater) -> None:
    assert updater.get_weights_by_name(UP, 3) == weights(0)[UP][:3].tolist()
    down = "model.layers.0.mlp.down_proj.weight"
    assert updater.get_weights_by_name(down) == weights(0)[down].tolist()
    assert updater.get_weights_by_name("no.such") is None


def test_checker(runner: Runner, updater: WeightUpdater) -> None:
    def sums() -> dict[str, str]:
        checksum = updater.check_weights("checksum").checksum
        assert checksum is not None
        [rank] = checksum["ranks"]
        assert len(rank["per_gpu_checksum"]) == len(checksum["per_engine_checksum"]) == 64
        assert rank["parallelism_info"][0]["tp_size"] == 1
        return rank["checksums"]

    assert not updater.check_weights("compare").success  # nothing to compare with
    before = sums()
    assert all(len(value) == 16 for value in before.values()) and GATE_UP in before
    assert updater.check_weights("snapshot").success and updater.check_weights("compare").success
    updater.update_from_tensor(pack([(UP, weights(0)[UP] + 0.25)]))
    after = sums()
    assert {name for name in before if before[name] != after[name]} == {GATE_UP}
    result = updater.check_weights("compare")
    assert GATE_UP in result.message and "max_abs_err=0.25" in result.message
    assert updater.check_weights("compare", skip_tensor_list=["gate_up"]).success
    assert "Unsupported" in updater.check_weights("explode").message

    reset = updater.check_weights("reset_tensors")
    assert reset.weights_mixed and not updater.check_weights("compare").success
    assert not updater.update_from_tensor(pack(list(weights(0).items()))).weights_mixed
    assert updater.check_weights("compare").success
    assert_holds(runner, weights(0))


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ({UP: torch.ones(10, 24)}, "expected a list of pairs of name and tensor .* got dict"),
        ([(UP, torch.ones(10, 24), 1)], "expected a list of pairs .* got list with other entries"),
        ([torch.ones(2)], "got list with other entries"),
        ([(UP, 3.0)], "got one of str and float"),
        ([(3, torch.ones(10, 24))], "got one of int and Tensor"),
    ],
)
def test_what_is_no_list_of_named_tensors_is_told_so(
    runner: Runner, updater: WeightUpdater, payload: Any, text: str
) -> None:
    entry = MultiprocessingSerializer.serialize(payload)
    result = updater.update_from_tensor([entry])
    assert not result.success and re.search(text, result.message), result.message
    assert not result.weights_mixed
    assert_holds(runner, weights(0))


def test_the_end_of_a_session_says_what_is_missing(runner: Runner, updater: WeightUpdater) -> None:
    assert updater.begin().success
    assert updater.update_from_tensor(pack([(UP, weights(1)[UP])])).success
    assert updater.update_from_tensor(pack([("x", torch.ones(2))])).weights_mixed
    ended = updater.end()
    assert ended.success and ended.message.startswith("Success, but for what failed: the target")
    assert not updater.update_from_tensor(pack(list(weights(1).items()))).weights_mixed
    assert updater.begin().message == updater.end().message == "Success"


def test_the_checker_looks_at_the_selected_models(runner: Runner, tmp_path: Path) -> None:
    head = runner.model.get_parameter("lm_head.weight")
    draft = Runner(_Draft(runner.model.config, head))
    updater = WeightUpdater(runner, [draft], model_path=str(tmp_path / "old"))

    def names(selector: str) -> set[str]:
        checksum = updater.check_weights("checksum", selector=selector).checksum
        assert checksum is not None
        [rank] = checksum["ranks"]
        assert {part["role"] for part in rank["parallelism_info"]} == (
            {"target", "draft"} if selector == "all" else {selector}
        )
        return set(rank["checksums"])

    of_draft = {"draft.layers.0.input_layernorm.weight", "draft.fc.weight", "draft.head"}
    assert names("draft") == of_draft
    assert names("all") == names("target") | of_draft and not names("target") & of_draft

    assert updater.check_weights("snapshot", selector="draft").success
    updater.update_from_tensor(pack([(UP, weights(0)[UP] + 0.25)]), selector="target")
    assert updater.check_weights("compare", selector="draft").success

    before = head.clone()
    result = updater.check_weights("reset_tensors", selector="draft")
    assert result.weights_mixed and "the draft lacks" in result.mixed_tensors
    assert torch.equal(head, before), "what the draft borrows is the target's"
    assert not updater.check_weights("compare", selector="draft").success
    assert updater.check_weights("reset_tensors").weights_mixed and not torch.equal(head, before)


# -- checkpoint engine --------------------------------------------------------------------------


def _engine(socket: zmq.Socket[bytes], messages: list[Any], answers: list[bytes]) -> None:
    for message in messages:
        socket.send(pickle.dumps(message))
        answers.append(socket.recv())
        if answers[-1]:
            return


@pytest.mark.parametrize("bad", [False, True])
def test_checkpoint_engine(
    bad: bool, runner: Runner, updater: WeightUpdater, tmp_path: Path
) -> None:
    new = weights(1)
    made = FlattenedTensorBucket(named_tensors=list(new.items()))
    handle = (
        _rebuild_cpu_tensor,
        (made.get_flattened_tensor().numpy().tobytes(), torch.uint8, (-1,)),
    )
    entries = [
        {"name": meta.name, "dtype": meta.dtype, "shape": meta.shape, "offset": meta.start_idx}
        for meta in made.get_metadata()
    ]
    last = [{**entries[-1], "shape": torch.Size([1])}] if bad else entries[-1:]
    address = f"ipc://{tmp_path}/engine"
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.bind(address)
    answers: list[bytes] = []
    thread = threading.Thread(
        target=_engine, args=(socket, [handle, entries[:-1], last, None], answers)
    )
    thread.start()
    result = updater.update_from_ipc({"cpu-0": address})
    thread.join(10)
    socket.close()
    context.term()
    assert result.success is not bad and result.weights_mixed is bad
    if bad:
        assert b"expected" in answers[-1] and len(answers) == 3
    else:
        assert answers == [b""] * 4
        assert_holds(runner, new)


def test_a_checkpoint_engine_that_is_silent_costs_a_timeout(runner: Runner, tmp_path: Path) -> None:
    updater = WeightUpdater(
        runner, model_path="x", timeouts=UpdateTimeouts(join_s=1, receive_s=0.1)
    )
    assert_refused(updater.update_from_ipc({"GPU-1": "ipc:///x"}), runner, "no handle for cpu-0")
    result = updater.update_from_ipc({"cpu-0": f"ipc://{tmp_path}/nobody"})
    assert_refused(result, runner, "no answer")


# -- groups -------------------------------------------------------------------------------------


def test_groups_that_cannot_be(runner: Runner, updater: WeightUpdater) -> None:
    assert "does not exist" in updater.destroy_group("g").message
    for arguments in (
        ("127.0.0.1", 1, 1, 2, "", "gloo"),
        ("127.0.0.1", 1, 0, 2, "g", "gloo"),
        ("127.0.0.1", 1, 2, 2, "g", "gloo"),
        ("127.0.0.1", 1, 1, 2, "g", "nccl"),
        ("127.0.0.1", "x", 1, 2, "g", "gloo"),
    ):
        [result] = Opening(updater, *arguments).results
        assert not result.success and not result.message.endswith("..")
    start = time.monotonic()
    [result] = Opening(updater, "127.0.0.1", 1, 1, 2, "g", "foo").results
    assert "backend must be one of gloo, nccl, got 'foo'." in result.message
    assert time.monotonic() - start < 1
    result = updater.update_from_distributed([UP], ["float32"], [[10, 24]], "g")
    assert_refused(result, runner, "Failed to receive weights", "init_weights_update_group")


def test_documented_names() -> None:
    assert documented.LocalSerializedTensor is LocalSerializedTensor
    assert documented.FlattenedTensorBucket is FlattenedTensorBucket
    assert module.WeightUpdater is WeightUpdater
