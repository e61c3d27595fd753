"""A trainer that pushes a checkpoint's weights to a server of two ranks, one way a run.

    python -m sglang.test.two_rank_trainer bucket --url ... --weights FOLDER --device cuda

`bucket`: a flattened bucket a rank, on the GPU of that rank. `copies`: named tensors, each as a
serialized copy by rank. `broadcast`: a gloo group of three, since NCCL takes one member a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import LocalSerializedTensor
from sglang.test.rl_trainers import (
    NamedTensors,
    Rollout,
    Trainer,
    connect,
    push_by_broadcast,
    serialize_bucket,
    synchronize,
)

NUM_RANKS = 2
_GROUP = "two-ranks"


def payloads(way: str, by_rank: list[NamedTensors]) -> list[str]:
    """What `serialized_named_tensors` holds, an entry a rank."""
    if way == "bucket":
        return [serialize_bucket(named) for named in by_rank]
    serialize = MultiprocessingSerializer.serialize
    named: list[tuple[str, Any]] = [
        (copies[0][0], LocalSerializedTensor(values=[serialize(tensor) for _, tensor in copies]))
        for copies in zip(*by_rank, strict=True)
    ]
    return [str(serialize(named, output_str=True))] * NUM_RANKS


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("way", choices=["bucket", "copies", "broadcast"])
    parser.add_argument("--url", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args(arguments)
    rollout = Rollout(args.url)
    weights = list(load_file(Path(args.weights) / "model.safetensors").items())
    if args.way == "broadcast":
        trainer = Trainer(rollout, weights, args.weights, "1", torch.device("cpu"))
        group = connect(rollout, _GROUP, num_ranks=NUM_RANKS)
        push_by_broadcast(trainer, group, _GROUP)
        rollout.must("/destroy_weights_update_group", {"group_name": _GROUP})
        return
    monkey_patch_torch_reductions()
    devices = [torch.device(f"cuda:{rank}" if args.device == "cuda" else "cpu") for rank in (0, 1)]
    by_rank = [[(name, tensor.to(device)) for name, tensor in weights] for device in devices]
    for device in devices:
        synchronize(device)
    body = {
        "serialized_named_tensors": payloads(args.way, by_rank),
        "load_format": "flattened_bucket" if args.way == "bucket" else None,
    }
    # `by_rank` lives until the answer is here; a bucket's own buffer is kept by its handle.
    rollout.must("/update_weights_from_tensor", body)


if __name__ == "__main__":
    main()
