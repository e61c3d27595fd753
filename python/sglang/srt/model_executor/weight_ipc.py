"""Receive weights from a checkpoint engine on this host: a shared buffer, announced over zmq.

The engine's side binds a REQ socket per GPU; this side connects a REP socket. First comes the
handle of a uint8 buffer, then lists of tensors that lie in it, each answered with an empty
message when they have been read, at last None. An error is answered with its text.
Source: the worker protocol in the documentation of MoonshotAI's checkpoint-engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import zmq
from torch.multiprocessing import reductions

from sglang.srt.platforms import cuda
from sglang.srt.utils.patch_torch import DEVICE_ARGUMENT
from sglang.srt.utils.serialization import MultiprocessingSerializer

NamedTensors = list[tuple[str, torch.Tensor]]


def own_address(zmq_handles: Mapping[str, str], device: torch.device, tp_rank: int) -> str:
    """The address for this rank: that of its GPU's UUID ("cpu-<rank>" without a GPU).

    Raises ValueError where there is none.
    """
    keys = [f"cpu-{tp_rank}"]
    if device.type == "cuda":
        uuid = cuda.uuid_of_device(device.index or 0)
        keys = [f"GPU-{uuid}", uuid]
    for key in keys:
        if key in zmq_handles:
            return zmq_handles[key]
    raise ValueError(f"no handle for {keys[0]} among {sorted(zmq_handles)}")


def receive_over_ipc(
    address: str,
    device: torch.device,
    load: Callable[[NamedTensors], None],
    timeout_s: float,
) -> None:
    """Read every list of tensors and hand it to `load`, which must be done with it on return.

    Raises RuntimeError where the other side is silent for `timeout_s` seconds, ValueError for
    messages that do not fit, and what `load` raises; the other side has been told by then.
    """
    context = zmq.Context()
    socket = context.socket(zmq.REP)
    socket.setsockopt(zmq.LINGER, 1000)  # ms: an error text should still leave
    socket.setsockopt(zmq.RCVTIMEO, int(timeout_s * 1000))
    socket.setsockopt(zmq.SNDTIMEO, int(timeout_s * 1000))
    try:
        socket.connect(address)
        _serve(socket, device, load)
    except zmq.ZMQError as error:
        raise RuntimeError(f"no answer from the checkpoint engine at {address}: {error}") from error
    finally:
        socket.close()
        context.term()


def _serve(
    socket: zmq.Socket[bytes], device: torch.device, load: Callable[[NamedTensors], None]
) -> None:
    buffer: torch.Tensor | None = None
    while True:
        message = socket.recv()
        try:
            payload = MultiprocessingSerializer.deserialize(message)
            if isinstance(payload, tuple):
                buffer = _open_buffer(payload, device)
            elif payload is None:
                buffer = None  # on this answer the other side frees the memory
                socket.send(b"")
                return
            elif buffer is None:
                raise ValueError("tensors were announced before the buffer that holds them")
            else:
                load([_read(buffer, entry) for entry in payload])
        except Exception as error:  # the other side waits for an answer
            socket.send_string(f"{type(error).__name__}: {error}")
            raise
        socket.send(b"")


def _open_buffer(handle: tuple[Any, ...], device: torch.device) -> torch.Tensor:
    rebuild, arguments = handle
    if rebuild is reductions.rebuild_cuda_tensor:
        # The sender's ordinal means nothing here; the handle is for this rank's own GPU.
        arguments = list(arguments)
        arguments[DEVICE_ARGUMENT] = device.index or 0
    buffer = rebuild(*arguments)
    if not isinstance(buffer, torch.Tensor) or buffer.dtype is not torch.uint8:
        raise ValueError("the shared buffer must be a uint8 tensor")
    return buffer.flatten()


def _read(buffer: torch.Tensor, entry: Mapping[str, Any]) -> tuple[str, torch.Tensor]:
    name, dtype, shape = entry["name"], entry["dtype"], torch.Size(entry["shape"])
    start = entry["offset"]
    end = start + shape.numel() * dtype.itemsize
    if not 0 <= start <= end <= buffer.numel():
        raise ValueError(f"{name}: bytes {start}..{end} are outside of {buffer.numel()}")
    return name, buffer[start:end].view(dtype).view(shape)
