"""Functions of users that write weights: what they may not do to a model is undone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.model_executor.weight_updater import WeightUpdater
from sglang.srt.model_loader.weight_fingerprint import WeightsFingerprint

from .test_weight_updater import (
    GATE_UP,
    UP,
    Runner,
    assert_holds,
    assert_refused,
    make_runner,
    pack,
    weights,
)

DIRECT = "sglang.srt.model_executor.model_runner._model_load_weights_direct"
NORM = "model.norm.weight"
Named = list[tuple[str, torch.Tensor]]
Loader = Callable[[nn.Module, Named], None]


def own_name(loader: Loader) -> str:
    return f"{__name__}.{loader.__name__}"


def other_memory(model: nn.Module, named: Named) -> None:
    model.get_parameter(GATE_UP).data = dict(named)[GATE_UP]


def other_form(model: nn.Module, named: Named) -> None:
    parameter = model.get_parameter(GATE_UP)
    parameter.data = parameter.data.t()


def other_dtype(model: nn.Module, named: Named) -> None:
    parameter = model.get_parameter(GATE_UP)
    parameter.data = parameter.data.double()


def other_parameter(model: nn.Module, named: Named) -> None:
    module = model.get_submodule(GATE_UP.removesuffix(".weight"))
    module.weight = nn.Parameter(dict(named)[GATE_UP], requires_grad=False)


def plain_tensor(model: nn.Module, named: Named) -> None:
    """What stands in the parameter's place is no parameter, and Python finds it first."""
    module = model.get_submodule(GATE_UP.removesuffix(".weight"))
    doubled = dict(named)[GATE_UP] * 2
    del module.weight
    module.weight = doubled


def hidden_by_an_attribute(model: nn.Module, named: Named) -> None:
    module = model.get_submodule(GATE_UP.removesuffix(".weight"))
    module.__dict__["weight"] = dict(named)[GATE_UP]


def frees_memory(model: nn.Module, named: Named) -> None:
    model.get_parameter(GATE_UP).data.untyped_storage().resize_(0)


def exits(model: nn.Module, named: Named) -> None:
    raise SystemExit(3)


def other_module(model: nn.Module, named: Named) -> None:
    fresh = ReplicatedLinear(24, 20)
    nn.init.ones_(fresh.weight)
    model.get_submodule("model.layers.1.mlp").gate_up_proj = fresh


def no_parameter(model: nn.Module, named: Named) -> None:
    del model.get_submodule("model.norm").weight


def one_more(model: nn.Module, named: Named) -> None:
    model.register_parameter("more", nn.Parameter(torch.ones(2), requires_grad=False))


def other_table(model: nn.Module, named: Named) -> None:
    model.get_submodule("model.rotary_emb").cos_sin = torch.ones(3)


def moves_and_raises(model: nn.Module, named: Named) -> None:
    other_memory(model, named)
    raise RuntimeError("in place or not: no more tensors")


def writes_and_moves(model: nn.Module, named: Named) -> None:
    model.get_parameter(NORM).data.fill_(7.0)
    other_memory(model, named)


def writes_and_raises(model: nn.Module, named: Named) -> None:
    model.get_parameter(NORM).data.fill_(7.0)
    raise RuntimeError("no more tensors")


MOVERS: list[Loader] = [
    plain_tensor,
    hidden_by_an_attribute,
    *(other_memory, other_form, other_dtype, other_parameter, other_module, no_parameter, one_more),
    *(other_table, moves_and_raises),
]
ALL = [exits, frees_memory, *MOVERS, writes_and_moves, writes_and_raises]


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    return make_runner(tmp_path)


@pytest.fixture
def updater(runner: Runner, tmp_path: Path) -> WeightUpdater:
    names = [own_name(loader) for loader in ALL]
    return WeightUpdater(runner, model_path=str(tmp_path), custom_weight_loaders=[DIRECT, *names])


def places(model: nn.Module) -> dict[str, tuple[object, ...]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {n: (t.data_ptr(), t.shape, t.stride(), t.dtype) for n, t in tensors}


@pytest.mark.parametrize("loader", MOVERS, ids=lambda loader: loader.__name__)
def test_what_a_loader_moves_is_put_back(
    loader: Loader, runner: Runner, updater: WeightUpdater
) -> None:
    before, objects = places(runner.model), dict(runner.model.named_parameters())
    held = runner.model.get_parameter(GATE_UP).data  # as a captured step holds it
    fused = torch.randn(20, 24)
    result = updater.update_from_tensor(pack([(GATE_UP, fused)]), own_name(loader))
    assert_refused(result, runner, "in place", "The weights are as before.")
    assert places(runner.model) == before
    assert all(runner.model.get_parameter(name) is each for name, each in objects.items())
    assert runner.decode_runner.calls == 0
    module = runner.model.get_submodule(GATE_UP.removesuffix(".weight"))
    assert module.weight is runner.model.get_parameter(GATE_UP)

    assert updater.update_from_tensor(pack([(GATE_UP, fused)]), DIRECT).success
    assert torch.equal(held, fused), "who holds the memory sees the next update"


@pytest.mark.parametrize("loader", [writes_and_moves, writes_and_raises])
def test_what_a_loader_has_written_when_it_fails_leaves_the_weights_mixed(
    loader: Loader, runner: Runner, updater: WeightUpdater
) -> None:
    before = places(runner.model)
    fused = torch.randn(20, 24)
    result = updater.update_from_tensor(pack([(GATE_UP, fused)]), own_name(loader))
    assert not result.success and result.weights_mixed and result.changed
    assert "discard the whole weights" in result.message
    assert places(runner.model) == before
    assert runner.fingerprint.digest() == WeightsFingerprint().full(runner.model)
    assert not updater.update_from_tensor(pack(list(weights(1).items()))).weights_mixed
    assert_holds(runner, weights(1))


def test_a_loader_cannot_end_the_server(runner: Runner, updater: WeightUpdater) -> None:
    before = places(runner.model)
    result = updater.update_from_tensor(pack([(GATE_UP, torch.zeros(20, 24))]), own_name(exits))
    assert_refused(result, runner, "SystemExit(3)", "The weights are as before.")
    assert places(runner.model) == before
    result = updater.update_from_tensor(
        pack([(GATE_UP, torch.zeros(20, 24))]), own_name(frees_memory)
    )
    assert not result.success and result.weights_mixed and "made smaller" in result.message
    assert not updater.update_from_tensor(pack(list(weights(1).items()))).weights_mixed
    fused = torch.cat([weights(1)[UP.replace("up_", "gate_")], weights(1)[UP]])
    assert torch.equal(runner.model.get_parameter(GATE_UP), fused)


def test_parameters_under_their_own_names_complete_mixed_weights(
    runner: Runner, updater: WeightUpdater
) -> None:
    assert updater.check_weights("reset_tensors").weights_mixed
    own = list(Runner(runner.model).model.named_parameters())
    half = updater.update_from_tensor(pack(own[:-1]), DIRECT)
    assert half.success and half.mixed_tensors.startswith("the target lacks 1 of ")
    assert not updater.update_from_tensor(pack(own[-1:]), DIRECT).weights_mixed


def test_a_loaders_part_of_a_session_counts(runner: Runner, updater: WeightUpdater) -> None:
    fused = torch.cat([weights(1)[UP.replace("up_", "gate_")], weights(1)[UP]])
    assert updater.begin().success
    assert updater.update_from_tensor(pack([(GATE_UP, fused)]), DIRECT).success
    result = updater.update_from_tensor(pack([("no.such", torch.ones(1))]))
    assert result.weights_mixed, "an earlier call of the session has written"
    rest = [(name, each) for name, each in weights(1).items() if "layers.1.mlp.up" not in name]
    rest = [(name, each) for name, each in rest if "layers.1.mlp.gate" not in name]
    assert not updater.update_from_tensor(pack(rest)).weights_mixed
    assert_holds(runner, weights(1))
