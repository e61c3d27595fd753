"""Updates with two tensor-parallel ranks and a trainer, each a process, over gloo.

The processes are forks of this one, so that torch need not be loaded again.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import (
    destroy_distributed,
    get_tp_group,
    init_distributed,
)
from sglang.srt.model_executor.weight_group_join import GroupJoin
from sglang.srt.model_executor.weight_groups import UpdateTimeouts
from sglang.srt.model_executor.weight_updater import WeightUpdater
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.weight_fingerprint import WeightsFingerprint
from sglang.srt.utils.network import get_free_ports
from sglang.srt.utils.process_group import init_custom_process_group
from sglang.srt.utils.serialization import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from sglang.test.fakes.tiny_models import make_tiny_checkpoint, tiny_config, tiny_weights
from sglang.test.fakes.trainer_group import Opening, ThreadTrainer
from sglang.test.forked import run_in_forks

SMALL: dict[str, Any] = {
    "num_hidden_layers": 1,
    "hidden_size": 24,
    "intermediate_size": 10,
    "vocab_size": 37,
}
GROUP = "weight_update_group"
RECEIVE_S = 1.0


def weights(seed: int) -> dict[str, torch.Tensor]:
    return tiny_weights(tiny_config("llama", **SMALL), seed)


class _Runner:
    def __init__(self, folder: str) -> None:
        self.model = load_model(ModelConfig.from_path(folder), show_progress=False)
        self.device = torch.device("cpu")
        self.tp = get_tp_group()
        self.decode_runner = None
        self.fingerprint = WeightsFingerprint(self.tp.cpu_group)
        self.fingerprint.full(self.model)

    def holds(self, expected: dict[str, torch.Tensor]) -> bool:
        return all(
            torch.equal(slot.view(), slot.shard_of(expected[name]))
            for name, slot in self.model.weight_table().items()
        )


def _describe(named: dict[str, torch.Tensor]) -> tuple[list[str], list[str], list[list[int]]]:
    dtypes = [str(tensor.dtype) for tensor in named.values()]
    return list(named), dtypes, [list(tensor.shape) for tensor in named.values()]


def _engine(rank: int, folder: str, ports: list[int]) -> dict[str, Any]:
    init_distributed(2, rank, f"tcp://127.0.0.1:{ports[0]}", timeout_s=30)
    runner = _Runner(folder)
    updater = WeightUpdater(
        runner, model_path=folder, timeouts=UpdateTimeouts(join_s=20, receive_s=RECEIVE_S)
    )
    seen: dict[str, Any] = {"start": runner.fingerprint.digest()}
    joined = Opening(updater, "127.0.0.1", str(ports[1]), 1, 3, GROUP, "gloo").wait()
    assert joined.success, joined.message
    facts = _describe(weights(1))
    assert updater.update_from_distributed(*facts, GROUP).success
    assert runner.holds(weights(1))
    seen["first"] = runner.fingerprint.digest()
    result = updater.update_from_distributed(*facts, GROUP, load_format="flattened_bucket")
    assert result.success and runner.holds(weights(2))

    o_proj, q_proj = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "oq")
    assert updater.get_weights_by_name(o_proj, 5) == weights(2)[o_proj][:5].tolist()
    rows = updater.get_weights_by_name(q_proj, 1000)
    assert rank == 1 or rows == weights(2)[q_proj][:12].tolist()
    checksum = updater.check_weights("checksum").checksum
    assert checksum is not None
    seen["checksum"] = checksum

    # One rank's data is damaged: nobody writes, and both give the same reason.
    good = MultiprocessingSerializer.serialize(list(weights(3).items()))
    refused = updater.update_from_tensor([good, good[:100]])
    seen["refused"] = refused.message
    assert not refused.success and not refused.weights_mixed and runner.holds(weights(2))
    # Each rank's data is right by itself, but for other tensors than the other rank's.
    norm, other = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
    pair = [MultiprocessingSerializer.serialize([(n, weights(3)[n])]) for n in (norm, other)]
    refused = updater.update_from_tensor(pair)
    assert "the ranks were sent tensors of different names" in refused.message
    assert not refused.success and not refused.weights_mixed and runner.holds(weights(2))
    assert updater.update_from_tensor([good, good]).success and runner.holds(weights(3))

    # The trainer is gone by now.
    lost = updater.update_from_distributed(*facts, GROUP)
    assert not lost.success and "Failed to receive weights" in lost.message, lost
    assert not lost.weights_mixed and runner.holds(weights(3))
    assert "init_weights_update_group" in updater.update_from_distributed(*facts, GROUP).message
    assert updater.update_from_disk(folder).success and runner.holds(weights(0))
    seen["end"] = runner.fingerprint.digest()
    destroy_distributed()
    return seen


def _trainer(ports: list[int]) -> None:
    group = init_custom_process_group(
        "gloo", f"tcp://127.0.0.1:{ports[1]}", world_size=3, rank=0, group_name=GROUP
    )
    works = [
        dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in weights(1).values()
    ]
    for work in works:
        work.wait()
    bucket = FlattenedTensorBucket(named_tensors=list(weights(2).items()))
    dist.broadcast(bucket.get_flattened_tensor(), src=0, group=group)
    os._exit(0)  # without saying goodbye


def test_two_ranks_and_a_trainer(tmp_path: Path) -> None:
    folder = str(make_tiny_checkpoint(tmp_path, **SMALL))
    ports = get_free_ports(2)
    engines = [(_engine, (rank, folder, ports)) for rank in range(2)]
    first, second = run_in_forks(*engines, (_trainer, (ports,)), num_awaited=2)
    assert first == second, "every rank says the same"
    assert first["start"] == first["end"] != first["first"]
    assert "cannot read serialized" in first["refused"]
    ranks = first["checksum"]["ranks"]
    assert [rank["parallelism_info"][0]["tp_rank"] for rank in ranks] == [0, 1]
    assert ranks[0]["checksums"] != ranks[1]["checksums"]


def one_rank_moves(model: nn.Module, named: list[tuple[str, torch.Tensor]]) -> None:
    parameter = model.get_parameter(named[0][0])
    if get_tp_group().rank == 1:
        parameter.data = named[0][1]
    elif named[0][1].any():
        parameter.data.copy_(named[0][1])


def _loader_user(rank: int, folder: str, ports: list[int]) -> list[Any]:
    init_distributed(2, rank, f"tcp://127.0.0.1:{ports[0]}", timeout_s=30)
    runner, loader = _Runner(folder), f"{__name__}.one_rank_moves"
    updater = WeightUpdater(runner, model_path=folder, custom_weight_loaders=[loader])
    norm, place = "model.norm.weight", runner.model.get_parameter("model.norm.weight").data_ptr()
    said = []
    for value in (0.0, 2.0):
        entry = MultiprocessingSerializer.serialize([(norm, torch.full((24,), value))])
        result = updater.update_from_tensor([entry, entry], loader)
        assert not result.success
        said.append((result.message, result.weights_mixed, runner.fingerprint.digest()))
        assert runner.holds(weights(0)) is (value == 0 or rank == 1)
    assert runner.model.get_parameter(norm).data_ptr() == place
    entry = MultiprocessingSerializer.serialize(list(weights(1).items()))
    assert not updater.update_from_tensor([entry, entry]).weights_mixed and runner.holds(weights(1))
    destroy_distributed()
    return said


def test_a_loader_that_fails_on_one_rank_leaves_no_rank_behind(tmp_path: Path) -> None:
    folder = str(make_tiny_checkpoint(tmp_path, **SMALL))
    ports = get_free_ports(1)
    users = [(_loader_user, (rank, folder, ports)) for rank in range(2)]
    first, second = run_in_forks(*users)
    assert first == second
    unwritten, half = first
    assert "model.norm.weight into other memory" in unwritten[0] and not unwritten[1]
    assert half[1] and half[2] != unwritten[2], "rank 0 has written"


def _joiner(rank: int, folder: str, ports: list[int]) -> list[str]:
    init_distributed(2, rank, f"tcp://127.0.0.1:{ports[0]}", timeout_s=30)
    updater = WeightUpdater(_Runner(folder), model_path=folder, timeouts=UpdateTimeouts(join_s=20))
    place = ("127.0.0.1", ports[1], 1, 3, GROUP, "gloo")
    start = time.monotonic()
    said = []

    def opened(*place: Any) -> None:
        said.append(Opening(updater, *place).wait(10).message)

    # What rank 0 could do, and rank 1 cannot.
    opened(*place[:3], 2, *place[4:])
    # Rank 1 fails once both are at it: rank 0 does not wait for the end of its time.
    goes_wrong = patch.object(GroupJoin, "_wait_for_trainer", side_effect=RuntimeError("no net"))
    with goes_wrong if rank == 1 else nullcontext():
        opened(*place)
    # Both wait; destroyed on both.
    opening = Opening(updater, *place)
    for _ in range(20):
        updater.poll_groups()
    said.append(updater.destroy_group(GROUP).message)
    said.append(opening.wait(1).message)
    assert time.monotonic() - start < 5
    # Rank 1 is there later than rank 0: neither answers before both are.
    trainer = ThreadTrainer(GROUP, 3, ports[1]) if rank == 0 else None
    if trainer is not None:
        trainer.join()
    else:
        time.sleep(0.5)
    opened(*place)
    destroy_distributed()
    return said


def test_ranks_agree_on_joining(tmp_path: Path) -> None:
    folder = str(make_tiny_checkpoint(tmp_path, **SMALL))
    ports = get_free_ports(2)
    first, second = run_in_forks((_joiner, (0, folder, ports)), (_joiner, (1, folder, ports)))
    assert first == second
    assert "rank 2 is outside of a group of 2" in first[0] and "no net" in first[1]
    assert "Succeeded to destroy" in first[2] and "was destroyed before" in first[3]
    assert "Succeeded to initialize" in first[4]
