"""Stand-ins for RL trainers: the calls, payloads and habits of each, against a running server.

`python -m sglang.test.rl_trainers <name> --url ... --weights <folder> --version <v>` is a process
of its own, as a trainer is. It reads the weights to push from a checkpoint folder, generates
before and after like a rollout worker, and writes one JSON line with what it saw. Group creation
is written out here as trainers carry it themselves, not imported from the server.

`--device cuda:1` keeps the tensors on that GPU: handles instead of bytes travel then, and groups
are NCCL's. Without it everything is on the CPU, over gloo.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import requests
import torch
import torch.distributed as dist
import zmq
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing import reductions

from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.platforms.cuda import uuid_of_device
from sglang.srt.utils import MultiprocessingSerializer, get_free_port
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.utils.serialization import _rebuild_cpu_tensor
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from sglang.srt.weight_sync.utils import update_weights

PROMPTS = [[(7 * i + 31 * number + 3) % 250 for i in range(43)] for number in range(4)]
NUM_NEW_TOKENS = 12
NamedTensors = list[tuple[str, torch.Tensor]]


class Rollout:
    """HTTP client of a trainer. Without a key it sends what trainers send then."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._headers = {"Authorization": "Bearer None"}

    def post(self, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        body = {} if body is None else body
        return requests.post(self.url + path, json=body, headers=self._headers, timeout=60)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, headers=self._headers, timeout=120)

    def must(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """A call whose failure ends the trainer, as `raise_for_status` does in theirs."""
        reply = self.post(path, body)
        if reply.status_code != 200:
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text}")
        content = reply.json()
        if isinstance(content, dict) and content.get("success") is False:
            raise RuntimeError(f"{path}: {content}")
        return content

    def flush(self) -> None:
        """GET until the cache is empty, up to a minute."""
        for _ in range(60):
            if self.get("/flush_cache").status_code == 200:
                return
            time.sleep(1)
        raise TimeoutError("the cache was never flushed")

    def wait_healthy(self) -> None:
        for _ in range(60):
            if self.get("/health_generate").status_code == 200:
                return
            time.sleep(0.5)
        raise TimeoutError("the server never became healthy")

    def generate(self, prompt: list[int]) -> dict[str, Any]:
        """A greedy rollout with logprobs."""
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": NUM_NEW_TOKENS,
                "ignore_eos": True,
                "no_stop_trim": True,
                "spaces_between_special_tokens": False,
            },
            "image_data": None,
            "return_logprob": True,
            "stream": False,
        }
        reply = self.post("/generate", body)
        reply.raise_for_status()
        assert reply.headers["content-type"].startswith("application/json")
        answer: dict[str, Any] = reply.json()
        logprobs = answer["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in logprobs] == answer["output_ids"]
        return answer


@dataclass(frozen=True)
class Trainer:
    """What every stand-in works with."""

    rollout: Rollout
    weights: NamedTensors
    folder: str
    version: str
    device: torch.device

    @property
    def backend(self) -> str:
        """Of its groups."""
        return "nccl" if self.device.type == "cuda" else "gloo"

    def buckets(self, size: int = 7) -> Iterator[NamedTensors]:
        for start in range(0, len(self.weights), size):
            yield self.weights[start : start + size]


# ------------------------------------------------------------------------------------------------
# Groups, as trainers make them
# ------------------------------------------------------------------------------------------------


def join_as_rank_zero(
    port: int, world_size: int, group_name: str, backend: str = "gloo"
) -> dist.ProcessGroup:
    """The routine that trainers copy from each other: rendezvous, prefix, helper, registration."""
    timeout = timedelta(seconds=60)
    url = f"tcp://127.0.0.1:{port}"
    store, rank, world_size = next(c10d.rendezvous(url, 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(group_name, store),
        group_name=c10d.GroupName(group_name),
        backend_options=None,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def connect(
    rollout: Rollout,
    group_name: str,
    *,
    backend: str = "gloo",
    num_ranks: int = 1,
    port_as_text: bool = False,
    **oddities: Any,
) -> dist.ProcessGroup:
    """Ask a server of so many ranks to join, and join meanwhile: it answers when all are there."""
    port = get_free_port()
    body = {
        "master_address": "127.0.0.1",
        "master_port": str(port) if port_as_text else port,
        "rank_offset": 1,
        "world_size": 1 + num_ranks,
        "group_name": group_name,
        "backend": backend,
        **oddities,
    }
    with ThreadPoolExecutor(1) as pool:
        asked: Future[Any] = pool.submit(rollout.must, "/init_weights_update_group", body)
        group = join_as_rank_zero(port, 1 + num_ranks, group_name, backend)
        asked.result(60)
    return group


def push_by_broadcast(
    trainer: Trainer, group: dist.ProcessGroup, group_name: str, **fields: Any
) -> None:
    """Per bucket: the HTTP call first, the broadcasts while it waits, then its answer."""
    for bucket in trainer.buckets():
        body = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": group_name,
            **fields,
        }
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(trainer.rollout.must, "/update_weights_from_distributed", body)
            works = [dist.broadcast(t, src=0, group=group, async_op=True) for _, t in bucket]
            for work in works:
                work.wait()
            asked.result(60)


def synchronize(device: torch.device) -> None:
    """Wait until what was queued on the device is done."""
    if device.type == "cuda":
        torch.accelerator.synchronize(device)


def serialize_bucket(bucket: NamedTensors) -> str:
    """A flattened bucket as base64."""
    flat = FlattenedTensorBucket(named_tensors=bucket)
    data = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
    return str(MultiprocessingSerializer.serialize(data, output_str=True))


# ------------------------------------------------------------------------------------------------
# The trainers
# ------------------------------------------------------------------------------------------------


def slime_nccl(trainer: Trainer) -> None:
    """Broadcasts over a group per pipeline stage; explicit flush, none in the updates."""
    rollout, name = trainer.rollout, "slime-pp_0"
    rollout.wait_healthy()
    rollout.post("/destroy_weights_update_group", {"group_name": name})  # its error is ignored
    group = connect(rollout, name, backend=trainer.backend)
    rollout.must("/pause_generation", {})
    rollout.flush()
    push_by_broadcast(trainer, group, name, flush_cache=False, weight_version=trainer.version)
    rollout.must("/continue_generation", {})
    rollout.must("/destroy_weights_update_group", {"group_name": name})


def slime_colocated(trainer: Trainer) -> None:
    """Offloads the engine, brings weights back, pushes mixed-dtype buckets, then the rest."""
    rollout = trainer.rollout
    rollout.flush()
    assert rollout.post("/release_memory_occupation", {}).json() is None
    rollout.must("/resume_memory_occupation", {"tags": ["weights"]})
    rollout.must("/pause_generation", {})
    rollout.flush()
    monkey_patch_torch_reductions()
    empty = torch.empty(0, dtype=torch.uint8, device=trainer.device)
    nothing = {"flattened_tensor": empty, "metadata": []}
    payloads = [serialize_bucket(bucket) for bucket in trainer.buckets()]
    for payload in [MultiprocessingSerializer.serialize(nothing, output_str=True), *payloads]:
        rollout.must(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": [payload],
                "load_format": "flattened_bucket",
                "flush_cache": False,
                "weight_version": trainer.version,
            },
        )
    rollout.must("/continue_generation", {})
    rollout.must("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})


def miles(trainer: Trainer) -> None:
    """Sessions, retraction of what runs, and the version stamped at the end."""
    rollout, name = trainer.rollout, "miles-pp_0"
    rollout.wait_healthy()
    rollout.flush()
    group = connect(rollout, name, backend=trainer.backend)
    rollout.must("/pause_generation", {"mode": "retract"})
    rollout.flush()
    rollout.must("/begin_weight_update", {"selector": "target"})
    push_by_broadcast(trainer, group, name, flush_cache=False, selector="target")
    rollout.must(
        "/update_weight_version", {"new_version": trainer.version, "abort_all_requests": False}
    )
    rollout.must("/end_weight_update", {})
    rollout.must("/continue_generation", {})
    rollout.must("/destroy_weights_update_group", {"group_name": name})
    assert rollout.get("/model_info").json()["weight_version"] == trainer.version


class HttpAdapter:
    """verl's: what its weight sync calls instead of an engine in the same process."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    async def update_weights_from_tensor(self, req: UpdateWeightsFromTensorReqInput) -> Any:
        entries = [base64.b64encode(entry).decode() for entry in req.serialized_named_tensors]
        return self._trainer.rollout.must(
            "/update_weights_from_tensor",
            {
                "serialized_named_tensors": entries,
                "load_format": req.load_format,
                "flush_cache": req.flush_cache,
                "weight_version": self._trainer.version,
            },
        )


def verl(trainer: Trainer) -> None:
    """Per-rank serialized tensors, gathered over a device mesh, pushed while KV is released."""
    rollout = trainer.rollout
    rollout.must("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    rollout.must("/resume_memory_occupation", {"tags": ["weights"]})
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{get_free_port()}", rank=0, world_size=1
    )
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("infer_tp",))
    for bucket in trainer.buckets():
        asyncio.run(update_weights(HttpAdapter(trainer), bucket, "infer_tp", mesh))
    dist.destroy_process_group()
    rollout.flush()
    rollout.must("/resume_memory_occupation", {"tags": ["kv_cache"]})


def areal(trainer: Trainer) -> None:
    """The port as text, an address in brackets, aborts with each update, flush by default."""
    rollout, name = trainer.rollout, "update_weight_group_0"
    rollout.must("/pause_generation", {})
    group = connect(
        rollout,
        name,
        backend=trainer.backend,
        port_as_text=True,
        master_address="[127.0.0.1]",
        pp_rank=0,
    )
    push_by_broadcast(trainer, group, name, abort_all_requests=True, weight_version=trainer.version)
    rollout.must("/continue_generation", {})
    rollout.must("/destroy_weights_update_group", {"group_name": name})


def areal_disk(trainer: Trainer) -> None:
    """The same by files."""
    trainer.rollout.must("/pause_generation", {})
    trainer.rollout.must(
        "/update_weights_from_disk",
        {
            "model_path": trainer.folder,
            "abort_all_requests": True,
            "weight_version": trainer.version,
        },
    )
    trainer.rollout.must("/continue_generation", {})


def nemo_rl(trainer: Trainer) -> None:
    """Sleeps in two calls; one dtype a bucket, in classes of its own with the same fields."""
    rollout = trainer.rollout
    rollout.flush()
    rollout.must("/release_memory_occupation", {"tags": ["weights"]})
    rollout.must("/release_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    rollout.must("/resume_memory_occupation", {"tags": ["weights"]})
    monkey_patch_torch_reductions()
    private = _private_metadata_class()
    for bucket in trainer.buckets():
        for dtype in {tensor.dtype for _, tensor in bucket}:
            part = [(name, tensor) for name, tensor in bucket if tensor.dtype is dtype]
            flat = FlattenedTensorBucket(named_tensors=part)
            data = {
                "flattened_tensor": flat.get_flattened_tensor(),
                "metadata": [private(**vars(meta)) for meta in flat.get_metadata()],
            }
            answer = rollout.post(
                "/update_weights_from_tensor",
                {
                    "serialized_named_tensors": [
                        MultiprocessingSerializer.serialize(data, output_str=True)
                    ],
                    "load_format": "flattened_bucket",
                    "flush_cache": False,
                    "weight_version": trainer.version,
                },
            ).json()
            assert answer["success"], answer
    rollout.flush()
    rollout.must("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})


def _private_metadata_class() -> Callable[..., Any]:
    """A class of the fields of `FlattenedTensorMetadata`, pickled under NeMo-RL's module."""
    name = "nemo_rl.models.generation.sglang.utils.train_utils"
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules[".".join(parts[:end])] = types.ModuleType(parts[end - 1])
    module = sys.modules[name]

    class FlattenedTensorMetadata:
        def __init__(self, **fields: Any) -> None:
            vars(self).update(fields)

    FlattenedTensorMetadata.__module__ = name
    FlattenedTensorMetadata.__qualname__ = "FlattenedTensorMetadata"
    module.FlattenedTensorMetadata = FlattenedTensorMetadata  # type: ignore[attr-defined]
    return FlattenedTensorMetadata


def roll(trainer: Trainer) -> None:
    """Plain lists of pairs, POST flush, memory resumed lazily."""
    rollout = trainer.rollout
    assert rollout.post("/flush_cache").status_code == 200
    rollout.must("/release_memory_occupation", {"tags": ["weights", "kv_cache", "cuda_graph"]})
    rollout.must("/resume_memory_occupation", {"tags": ["weights"]})
    monkey_patch_torch_reductions()
    rollout.must(
        "/update_weights_from_tensor",
        {
            "serialized_named_tensors": [
                MultiprocessingSerializer.serialize(trainer.weights, output_str=True)
            ],
            "flush_cache": False,
            "weight_version": trainer.version,
        },
    )
    rollout.must("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert rollout.post("/flush_cache").status_code == 200
    samples = rollout.post(
        "/generate",
        {
            "rid": None,
            "input_ids": [1, 2, 3],
            "sampling_params": {"n": 2, "max_new_tokens": 2, "temperature": 1.0},
        },
    ).json()
    assert len(samples) == 2


def checkpoint_engine(trainer: Trainer) -> None:
    """A buffer shared over zmq: the sender's half of MoonshotAI's protocol."""
    total = sum(tensor.nbytes for _, tensor in trainer.weights)
    buffer = torch.empty(total, dtype=torch.uint8, device=trainer.device)
    entries, offset = [], 0
    for name, tensor in trainer.weights:
        end = offset + tensor.nbytes
        buffer[offset:end] = tensor.contiguous().view(-1).view(torch.uint8)
        entries.append(
            {"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": offset}
        )
        offset = end
    synchronize(trainer.device)
    handle: tuple[Any, ...]
    if trainer.device.type == "cuda":
        key = f"GPU-{uuid_of_device(trainer.device.index or 0)}"
        handle = reductions.reduce_tensor(buffer)
    else:
        key = "cpu-0"
        handle = (_rebuild_cpu_tensor, (buffer.numpy().tobytes(), torch.uint8, tuple(buffer.shape)))
    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    body = {
        "zmq_handles": {key: f"tcp://127.0.0.1:{port}"},
        "weight_version": trainer.version,
    }
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(trainer.rollout.must, "/update_weights_from_ipc", body)
        for message in (handle, entries, None):
            socket.send(MultiprocessingSerializer.serialize(message))
            answer = socket.recv()
            assert answer == b"", answer
        asked.result(60)
    socket.close()
    context.term()


def dying(trainer: Trainer) -> None:
    """Ends without a word when the server waits for the second of two tensors."""
    rollout, name = trainer.rollout, "doomed"
    group = connect(rollout, name, backend=trainer.backend)
    bucket = trainer.weights[:2]
    body = {
        "names": [key for key, _ in bucket],
        "dtypes": ["float32", "torch.float32"],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
        "group_name": name,
    }
    threading.Thread(
        target=rollout.post, args=("/update_weights_from_distributed", body), daemon=True
    ).start()
    dist.broadcast(bucket[0][1], src=0, group=group)
    synchronize(trainer.device)
    os._exit(9)


def run_trainer(
    name: str, url: str, weights: Path, version: str = "1", device: str = "cpu"
) -> dict[str, Any]:
    """Run a trainer in a process of its own; what it saw before and after its update."""
    command = [sys.executable, "-m", "sglang.test.rl_trainers", name, "--url", url]
    command += ["--weights", str(weights), "--version", version, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    if done.returncode != 0:
        raise AssertionError(f"{name} ended with {done.returncode}: {done.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


TRAINERS: dict[str, Callable[[Trainer], None]] = {
    trainer.__name__: trainer
    for trainer in (
        slime_nccl,
        slime_colocated,
        miles,
        verl,
        areal,
        areal_disk,
        nemo_rl,
        roll,
        checkpoint_engine,
    )
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainer", choices=[*sorted(TRAINERS), dying.__name__])
    parser.add_argument("--url", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--version", default="1")
    parser.add_argument("--device", default="cpu", help="of the tensors, e.g. cuda:1")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.accelerator.set_device_index(device.index or 0)
    files = sorted(Path(options.weights).glob("*.safetensors"))
    weights = [item for file in files for item in load_file(file, options.device).items()]
    trainer = Trainer(Rollout(options.url), weights, options.weights, options.version, device)
    before = [trainer.rollout.generate(prompt) for prompt in PROMPTS]
    {**TRAINERS, dying.__name__: dying}[options.trainer](trainer)
    after = [trainer.rollout.generate(prompt) for prompt in PROMPTS]
    sys.stdout.write(json.dumps({"before": before, "after": after}) + "\n")


if __name__ == "__main__":
    main()
