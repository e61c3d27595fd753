"""Send a trainer's tensors to an engine whose ranks are the trainer's own processes' neighbours.

Called by trainers, in every process of one device mesh; documented import names. The engine is
whatever has an async `update_weights_from_tensor`: ours, or a trainer's HTTP adapter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.utils.serialization import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import LocalSerializedTensor


class TensorReceiver(Protocol):
    """What `update_weights` needs of an engine."""

    async def update_weights_from_tensor(self, req: UpdateWeightsFromTensorReqInput) -> Any:
        """Load the tensors; whatever it returns is handed back."""


async def update_weights(
    engine: TensorReceiver,
    params_batch: Iterable[tuple[str, torch.Tensor]],
    device_mesh_key: str,
    device_mesh: DeviceMesh,
    load_format: str | None = None,
) -> Any:
    """Load one batch of parameters in the engine; collective over the named mesh dimension.

    Each process serializes its own copy of the full tensors, so that every rank of the engine
    reads memory of its own GPU. The first process of the mesh calls the engine and returns its
    answer; the others return None. The tensors must stay alive until all processes returned.
    """
    mesh = device_mesh[device_mesh_key]
    num_ranks, rank = mesh.size(), mesh.get_local_rank()
    group = mesh.get_group()
    monkey_patch_torch_reductions()
    mine = [
        (name, MultiprocessingSerializer.serialize(_preprocess_tensor_for_update_weights(tensor)))
        for name, tensor in params_batch
    ]
    gathered: list[Any] | None = [None] * num_ranks if rank == 0 else None
    dist.gather_object(mine, gathered, dst=int(mesh.mesh.flatten()[0]), group=group)
    if gathered is None:
        return None
    named = [
        (copies[0][0], LocalSerializedTensor(values=[data for _, data in copies]))
        for copies in zip(*gathered, strict=True)
    ]
    payload = MultiprocessingSerializer.serialize(named)
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[payload] * num_ranks, load_format=load_format
    )
    return await engine.update_weights_from_tensor(request)


def _preprocess_tensor_for_update_weights(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, detached; collective where it is split over processes."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach()
