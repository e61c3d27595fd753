"""The trainer's side of `bench_weight_update.py`, a process of its own.

    trainer.py push --url URL --shape FOLDER --device cuda:1 --repeats 7 ROW [ROW ...]
    trainer.py broadcast --rank 0 --port N --bytes B --device cuda:1 --repeats 7

`push` holds tensors of every weight of a model and times whole updates, pause to continue, one row
of figures a ROW: `bucket:G` (tensors over IPC, flattened into buckets of up to G GB), `list:G` (the
same as named tensors), `broadcast:G` (one broadcast a tensor), `broadcast-flat:G` (one a bucket).
`broadcast` is one of two processes that send a single buffer: what the link gives. Each prints one
JSON line. A few values are changed before each update and read back after it, so that an update
that did nothing is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import requests
import torch
import torch.distributed as dist

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.registry import resolve_model_class
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from sglang.test.rl_trainers import NamedTensors, Rollout, connect, synchronize
from sglang.test.small_server import sum_series

GROUP = "bench"
_TIMEOUT_S = 120
_STD = 0.02
# Values that bfloat16 holds exactly, far from what is drawn.
_MARK_STEP = 0.125


class Bucket:
    """Tensors of one call, and room for them in one buffer where they are sent flattened."""

    def __init__(self, tensors: NamedTensors, is_flat: bool) -> None:
        self.tensors = tensors
        self.flat: FlattenedTensorBucket | None = None
        if is_flat:
            self.flat = FlattenedTensorBucket.empty(
                [name for name, _ in tensors],
                [tensor.dtype for _, tensor in tensors],
                [tensor.shape for _, tensor in tensors],
                tensors[0][1].device,
            )
            self._parts = [part for _, part in self.flat.reconstruct_tensors()]

    def fill(self) -> torch.Tensor:
        """The buffer, with the tensors' present values."""
        assert self.flat is not None
        torch._foreach_copy_(self._parts, [tensor for _, tensor in self.tensors])
        return self.flat.get_flattened_tensor()


class Pusher:
    """Tensors of all weights of a model, and the calls that send them."""

    def __init__(self, url: str, shape: str, device: torch.device) -> None:
        self.url = url
        self.device = device
        self.session = requests.Session()
        self.weights = make_weights(shape, device)
        self.num_bytes = sum(tensor.nbytes for _, tensor in self.weights)
        self.threads = ThreadPoolExecutor(1)
        self.group: dist.ProcessGroup | None = None
        self._mark = 0.0

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """A call over the connection that stays open. Raises RuntimeError where it fails."""
        reply = self.session.post(self.url + path, json=body, timeout=_TIMEOUT_S)
        if reply.status_code != 200:
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text}")
        return reply.json()

    def buckets(self, max_bytes: float) -> list[NamedTensors]:
        """The weights in order, in runs of up to `max_bytes` (of one tensor at least)."""
        found: list[NamedTensors] = [[]]
        size = 0
        for name, tensor in self.weights:
            if found[-1] and size + tensor.nbytes > max_bytes:
                found.append([])
                size = 0
            found[-1].append((name, tensor))
            size += tensor.nbytes
        return found

    def mark(self) -> None:
        """Change the first value of the first and of the last tensor."""
        self._mark += _MARK_STEP
        for _, tensor in (self.weights[0], self.weights[-1]):
            tensor.view(-1)[0] = self._mark
        synchronize(self.device)

    def check_mark(self) -> None:
        """Raise RuntimeError unless the server has the changed values."""
        for name, _ in (self.weights[0], self.weights[-1]):
            rows = self.post("/get_weights_by_name", {"name": name, "truncate_size": 1})
            value = rows[0][0] if isinstance(rows[0], list) else rows[0]
            if value != self._mark:
                raise RuntimeError(f"{name} begins with {value} after an update to {self._mark}")

    def engine_s(self, source: str) -> float:
        """Seconds that the engine's last update took: reading, writing, digest."""
        text = self.session.get(self.url + "/metrics", timeout=_TIMEOUT_S).text
        return sum_series(text, "sglang:weight_load_duration_seconds", source=source)


def make_weights(shape: str, device: torch.device) -> NamedTensors:
    """Random tensors of the model's dtype under the names of its checkpoint."""
    config = ModelConfig.from_path(shape, device=device.type)
    with torch.device("meta"):
        model = resolve_model_class(config.architectures)(config)
    dtype = getattr(torch, config.dtype)
    return [
        (name, torch.empty(slot.full_shape, dtype=dtype, device=device).normal_(0, _STD))
        for name, slot in model.weight_table().items()
    ]


def push_tensors(pusher: Pusher, buckets: list[Bucket]) -> dict[str, float]:
    """One update over IPC: {prepare_s, whole_s, update_s, engine_s, ...}."""
    start = time.perf_counter()
    bodies = []
    for number, bucket in enumerate(buckets, start=1):
        payload: Any = bucket.tensors
        if bucket.flat is not None:
            payload = {"flattened_tensor": bucket.fill(), "metadata": bucket.flat.get_metadata()}
        bodies.append(
            {
                "serialized_named_tensors": [
                    MultiprocessingSerializer.serialize(payload, output_str=True)
                ],
                "load_format": None if bucket.flat is None else "flattened_bucket",
                "flush_cache": number == len(buckets),
            }
        )
    synchronize(pusher.device)
    prepared = time.perf_counter()

    def send() -> None:
        for body in bodies:
            pusher.post("/update_weights_from_tensor", body)

    return {"prepare_s": prepared - start, **timed_update(pusher, send)}


def push_broadcasts(pusher: Pusher, buckets: list[Bucket]) -> dict[str, float]:
    """One update over the group; flat buffers are filled before the pause."""
    if pusher.group is None:
        backend = "nccl" if pusher.device.type == "cuda" else "gloo"
        pusher.group = connect(Rollout(pusher.url), GROUP, backend=backend)
    start = time.perf_counter()
    sent = [
        [tensor for _, tensor in bucket.tensors] if bucket.flat is None else [bucket.fill()]
        for bucket in buckets
    ]
    synchronize(pusher.device)
    prepared = time.perf_counter()

    def send() -> None:
        for number, (bucket, tensors) in enumerate(zip(buckets, sent), start=1):
            body = {
                "names": [name for name, _ in bucket.tensors],
                "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in bucket.tensors],
                "shapes": [list(t.shape) for _, t in bucket.tensors],
                "group_name": GROUP,
                "load_format": None if bucket.flat is None else "flattened_bucket",
                "flush_cache": number == len(buckets),
            }
            asked = pusher.threads.submit(pusher.post, "/update_weights_from_distributed", body)
            works = [dist.broadcast(t, src=0, group=pusher.group, async_op=True) for t in tensors]
            for work in works:
                work.wait()
            asked.result(_TIMEOUT_S)

    return {"prepare_s": prepared - start, **timed_update(pusher, send)}


def timed_update(pusher: Pusher, send: Callable[[], None]) -> dict[str, float]:
    """Seconds of the calls alone, and from the pause to the answer of continue."""
    start = time.perf_counter()
    pusher.post("/pause_generation", {})
    paused = time.perf_counter()
    send()
    sent = time.perf_counter()
    # What was received into stays with the server: by default it is given back, and the next update
    # takes as long again to get it.
    pusher.post("/continue_generation", {"torch_empty_cache": False})
    return {"update_s": sent - paused, "whole_s": time.perf_counter() - start}


# Form -> (how it is sent, whether flattened, label of the engine's metric).
FORMS = {
    "bucket": (push_tensors, True, "tensor"),
    "list": (push_tensors, False, "tensor"),
    "broadcast": (push_broadcasts, False, "distributed"),
    "broadcast-flat": (push_broadcasts, True, "distributed"),
}


def push_row(pusher: Pusher, row: str, repeats: int) -> dict[str, Any]:
    """Medians of `repeats` updates, after one that does not count."""
    form, _, size = row.partition(":")
    push_once, is_flat, source = FORMS[form]
    # The same buffers each time: memory that another process has opened is freed late.
    buckets = [Bucket(tensors, is_flat) for tensors in pusher.buckets(float(size) * 1e9)]
    runs = []
    for _ in range(repeats + 1):
        pusher.mark()
        run = push_once(pusher, buckets)
        if len(buckets) == 1:  # the gauge is of the last call alone
            run["engine_s"] = pusher.engine_s(source)
        runs.append(run)
        pusher.check_mark()
    medians = {name: statistics.median(run[name] for run in runs[1:]) for name in runs[0]}
    return {
        "row": row,
        "bytes": pusher.num_bytes,
        "calls": len(buckets),
        "repeats": repeats,
        **medians,
        "best_whole_s": min(run["whole_s"] for run in runs[1:]),
        "worst_whole_s": max(run["whole_s"] for run in runs[1:]),
        "first_whole_s": runs[0]["whole_s"],
        "bytes_s": pusher.num_bytes / medians["whole_s"],
    }


def plain_copy_s(pusher: Pusher) -> float:
    """Seconds of copying so many bytes on the trainer's own device, once: the limit of a copy."""
    source = torch.empty(pusher.num_bytes, dtype=torch.uint8, device=pusher.device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        synchronize(pusher.device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(pusher.device)
        best = min(best, time.perf_counter() - start)
    return best


def push(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """All rows; a row that fails is told in its place and ends the run."""
    monkey_patch_torch_reductions()
    pusher = Pusher(args.url, args.shape, device)
    result: dict[str, Any] = {"plain_copy_s": plain_copy_s(pusher), "rows": []}
    if device.type == "cuda":
        torch.accelerator.empty_cache()
    for row in args.rows:
        result["rows"].append(push_row(pusher, row, args.repeats))
        if device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.accelerator.empty_cache()
    if pusher.group is not None:
        pusher.post("/destroy_weights_update_group", {"group_name": GROUP})
    return result


def broadcast(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Send or receive one buffer again and again."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"tcp://127.0.0.1:{args.port}",
        rank=args.rank,
        world_size=2,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    buffer = torch.zeros(args.bytes, dtype=torch.uint8, device=device)
    token = torch.zeros(1, device=device)
    times = []
    for _ in range(args.repeats + 1):
        dist.all_reduce(token)
        synchronize(device)
        start = time.perf_counter()
        dist.broadcast(buffer, src=0)
        synchronize(device)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[1:])
    return {"bytes": args.bytes, "seconds": seconds, "bytes_s": args.bytes / seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    modes = parser.add_subparsers(dest="mode", required=True)
    one = modes.add_parser("push")
    one.add_argument("--url", required=True)
    one.add_argument("--shape", required=True)
    one.add_argument("rows", nargs="+", metavar="FORM:GB")
    two = modes.add_parser("broadcast")
    two.add_argument("--rank", type=int, required=True)
    two.add_argument("--port", type=int, required=True)
    two.add_argument("--bytes", type=int, required=True)
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.accelerator.set_device_index(device.index or 0)
    result = push(args, device) if args.mode == "push" else broadcast(args, device)
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    # Groups whose other side is gone or busy must not hold up the end.
    os._exit(0)


if __name__ == "__main__":
    main()
