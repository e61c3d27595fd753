"""A trainer of two processes hands its tensors to an engine of two ranks."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
import torch.distributed as dist

from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils.network import get_free_port
from sglang.srt.utils.serialization import MultiprocessingSerializer
from sglang.srt.weight_sync.utils import update_weights
from sglang.test.forked import run_in_forks


class _Engine:
    async def update_weights_from_tensor(self, req: UpdateWeightsFromTensorReqInput) -> Any:
        """What each rank of an engine would see."""
        return [
            [
                (name, local.get(rank).tolist())
                for name, local in MultiprocessingSerializer.deserialize(payload)
            ]
            for rank, payload in enumerate(req.serialized_named_tensors)
        ]


def _train(rank: int, port: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    split = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    batch = [("full", torch.full((2,), float(rank))), ("split", split)]
    return asyncio.run(update_weights(_Engine(), batch, "tp", mesh))


def test_each_rank_gets_its_own_copy_and_split_tensors_whole() -> None:
    # Takes seconds: once, before the fork, and only in the worker that runs this.
    import torch.distributed.tensor  # noqa: F401

    port = get_free_port()
    seen = run_in_forks((_train, (0, port)), (_train, (1, port)))
    whole = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert seen[0] == [
        [("full", [0.0, 0.0]), ("split", whole)],
        [("full", [1.0, 1.0]), ("split", whole)],
    ]
    assert seen[1] is None
