"""CUDA tensors between processes that number their GPUs differently.

torch puts the sender's device ordinal in the handle of a shared tensor. A trainer and a server
with different CUDA_VISIBLE_DEVICES mean different GPUs by the same ordinal, so after
`monkey_patch_torch_reductions` the handle carries the GPU's UUID instead. Both sides call it,
once, before tensors are pickled. Module and function names are part of the pickled form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing import reductions

from sglang.srt.platforms import cuda

# Position of the device in the arguments of torch's `rebuild_cuda_tensor`.
DEVICE_ARGUMENT = 6

_torch_reduce_tensor: Callable[[torch.Tensor], tuple[Any, ...]] = reductions.reduce_tensor


def monkey_patch_torch_reductions() -> None:
    """Send GPU UUIDs instead of ordinals from now on, in this process. Harmless when repeated."""
    if reductions.reduce_tensor is _reduce_tensor_modified:
        return
    reductions.reduce_tensor = _reduce_tensor_modified
    # The table of pickling functions holds the functions themselves: fill it anew.
    reductions.init_reductions()


def _reduce_tensor_modified(tensor: torch.Tensor) -> tuple[Any, ...]:
    rebuild, arguments, *rest = _torch_reduce_tensor(tensor)
    if rebuild is not reductions.rebuild_cuda_tensor:
        return (rebuild, arguments, *rest)
    changed = list(arguments)
    changed[DEVICE_ARGUMENT] = cuda.uuid_of_device(changed[DEVICE_ARGUMENT])
    return (_rebuild_cuda_tensor_modified, tuple(changed), *rest)


def _rebuild_cuda_tensor_modified(*arguments: Any) -> torch.Tensor:
    """Called by unpickling. Raises ValueError where this process does not see the GPU."""
    changed = list(arguments)
    device = changed[DEVICE_ARGUMENT]
    if isinstance(device, str):
        changed[DEVICE_ARGUMENT] = cuda.device_of_uuid(device)
    tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*changed)
    return tensor
