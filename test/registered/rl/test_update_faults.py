"""What goes wrong with weight updates is a clear 400; weights, requests and the server survive."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sglang.srt.utils.network import get_free_port
from sglang.srt.utils.process_group import init_custom_process_group
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.rl_trainers import PROMPTS
from sglang.test.small_server import SmallServer

from .conftest import GREEDY, Models, named_tensors, serialized

register_cpu_ci(est_time=30, suite="rl")

NORM = "model.norm.weight"


def checksum(server: SmallServer) -> Any:
    reply = server.post("/weights_checker")
    assert reply.status_code == 200, reply.text
    return reply.json()["per_engine_checksum"]


def bucket(**changes: Any) -> dict[str, Any]:
    """A bucket of one tensor whose metadata says something else."""
    made = FlattenedTensorBucket(named_tensors=[(NORM, torch.ones(60))])
    meta = made.get_metadata()[0]
    vars(meta).update(changes)
    return {"flattened_tensor": made.get_flattened_tensor(), "metadata": [meta]}


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/hispec-was-here",)


def tensors(payload: Any, **fields: Any) -> dict[str, Any]:
    return {"serialized_named_tensors": serialized(payload), **fields}


BAD_TENSORS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "shape": (lambda: tensors([(NORM, torch.ones(61))]), "expected (60,), got (61,)"),
    "name": (lambda: tensors([("model.nrom.weight", torch.ones(60))]), "model.nrom.weight"),
    "dtype": (lambda: tensors([(NORM, torch.ones(60, dtype=torch.int64))]), "torch.int64"),
    "second": (
        lambda: tensors([(NORM, torch.zeros(60)), ("model.x", torch.ones(1))]),
        "model.x",
    ),
    "truncated": (
        lambda: tensors(
            bucket() | {"flattened_tensor": torch.zeros(100, dtype=torch.uint8)},
            load_format="flattened_bucket",
        ),
        "does not fit",
    ),
    "overlong": (
        lambda: tensors(bucket(end_idx=10**12), load_format="flattened_bucket"),
        "does not fit",
    ),
    "no bucket": (lambda: tensors([1, 2], load_format="flattened_bucket"), "bucket"),
    "no pairs": (lambda: tensors([1, 2]), ""),
    "format": (lambda: tensors([], load_format="x.y"), "Unknown load_format=x.y"),
    "selector": (lambda: tensors([], selector="both"), "selector must be one of"),
    "no entry": (lambda: {"serialized_named_tensors": []}, "there is none for rank 0"),
    "no base64": (lambda: {"serialized_named_tensors": ["%%%"]}, "not base64"),
    "cut": (lambda: {"serialized_named_tensors": [serialized([1])[0][:8]]}, "cannot read"),
    "blocked": (
        lambda: {
            "serialized_named_tensors": [
                __import__("base64").b64encode(pickle.dumps(_Evil())).decode()
            ]
        },
        "Blocked unsafe global",
    ),
}


@pytest.fixture
def unharmed(server: SmallServer, models: Models) -> Any:
    before = checksum(server)
    yield
    assert checksum(server) == before
    answer = server.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert answer["output_ids"] == models.expected["old"][0]
    assert server.get("/model_info").json()["weight_version"] == "0"


@pytest.mark.usefixtures("unharmed")
def test_bad_tensors_are_refused_untouched(server: SmallServer) -> None:
    for case, (make, text) in BAD_TENSORS.items():
        reply = server.post("/update_weights_from_tensor", json={"weight_version": "9", **make()})
        assert reply.status_code == 400, case
        body = reply.json()
        assert body["success"] is False and text in body["message"], (case, body)
    assert not os.path.exists("/tmp/hispec-was-here")


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "does not exist"),
        ("/update_weights_from_ipc", {"zmq_handles": {"GPU-7": "ipc:///x"}}, "no handle"),
        ("/destroy_weights_update_group", {"group_name": "x"}, "does not exist."),
        ("/end_weight_update", {}, "begin_weight_update"),
        ("/begin_weight_update", {"selector": "both"}, "selector"),
        ("/weights_checker", {"action": "x"}, "Unsupported"),
        ("/weights_checker", {"action": "compare"}, "snapshot"),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "x"},
            "init_weights_update_group",
        ),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": [], "shapes": [[1]], "group_name": "x"},
            "do not match",
        ),
        (
            "/init_weights_update_group",
            {"master_address": "127.0.0.1", "master_port": "1", "rank_offset": 0, "world_size": 2},
            "outside of a group",
        ),
        (
            "/init_weights_update_group",
            {
                **{"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1},
                **{"world_size": 2, "group_name": "", "backend": "gloo"},
            },
            "must not be empty",
        ),
        (
            "/init_weights_update_group",
            {
                **{"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1},
                **{"world_size": 2, "group_name": "x", "backend": "foo"},
            },
            "backend must be one of gloo, nccl",
        ),
    ],
)
def test_bad_calls_are_refused(
    server: SmallServer, path: str, body: dict[str, Any], text: str
) -> None:
    reply = server.post(path, json=body)
    assert reply.status_code == 400
    assert reply.json()["success"] is False and text in reply.json()["message"], reply.text


@pytest.mark.usefixtures("unharmed")
def test_malformed_bodies_and_unknown_names(server: SmallServer) -> None:
    for path in ("/update_weights_from_tensor", "/update_weights_from_disk"):
        assert server.post(path, json={}).status_code == 400
        assert server.post(path, data="{").status_code == 400
    assert server.post("/update_weights_from_distributed", json={"names": 3}).status_code == 400
    reply = server.get("/get_weights_by_name", json={"name": "no.such"})
    assert reply.status_code == 400
    assert reply.json() == {"error": {"message": "Get parameter by name failed: no.such"}}
    rows = server.get("/get_weights_by_name", json={"name": NORM, "truncate_size": 3}).json()
    assert len(rows) == 3
    twice = server.post("/resume_memory_occupation", json={"tags": ["kv_cache"]})
    assert twice.status_code == 400 and "not currently released" in twice.json()["error"]["message"]
    assert server.post("/post_process_weights", json={}).json()["success"] is True


@pytest.mark.usefixtures("unharmed")
def test_a_session_is_opened_and_closed_once(server: SmallServer, models: Models) -> None:
    assert server.post("/begin_weight_update").json() == {"success": True, "message": "Success"}
    assert server.post("/begin_weight_update").status_code == 400
    assert server.post("/end_weight_update").status_code == 200
    assert server.post("/end_weight_update").status_code == 400


@pytest.mark.usefixtures("unharmed")
def test_a_trainer_that_dies_in_the_middle_of_a_broadcast(
    server: SmallServer, models: Models
) -> None:
    old = str(models.folders["old"])
    command = [sys.executable, "-m", "sglang.test.rl_trainers", "dying"]
    done = subprocess.run(
        [*command, "--url", server.url, "--weights", old], capture_output=True, timeout=60
    )
    assert done.returncode == 9, done.stderr[-2000:]
    body = {"names": [NORM], "dtypes": ["float32"], "shapes": [[60]], "group_name": "doomed"}
    start = time.monotonic()
    reply = server.post("/update_weights_from_distributed", json=body)
    assert time.monotonic() - start < 10
    assert reply.status_code == 400 and "init_weights_update_group" in reply.json()["message"]


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize(
    ("dtype", "text"),
    [("bfloat16", "more bytes"), ("float64", "fewer bytes"), ("float33", "unknown dtype")],
)
def test_broadcasts_that_are_not_as_declared(server: SmallServer, dtype: str, text: str) -> None:
    port = get_free_port()
    group = {"group_name": "odd", "backend": "gloo", "rank_offset": 1, "world_size": 2}
    place = {"master_address": "127.0.0.1", "master_port": port}
    with ThreadPoolExecutor(1) as pool:
        opened = pool.submit(server.post, "/init_weights_update_group", json={**group, **place})
        trainer = init_custom_process_group(
            "gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="odd"
        )
        assert opened.result().status_code == 200
        body = {"names": [NORM], "dtypes": [dtype], "shapes": [[60]], "group_name": "odd"}
        answer = pool.submit(server.post, "/update_weights_from_distributed", json=body)
        with contextlib.suppress(RuntimeError):
            dist.broadcast(torch.ones(60), src=0, group=trainer)
        dist.destroy_process_group(trainer)
        reply = answer.result()
    assert reply.status_code == 400
    message = reply.json()["message"]
    assert text in message and message.endswith("group odd was closed, open it again.")


def test_mixed_weights_are_not_ready_until_all_have_come(
    server: SmallServer, models: Models
) -> None:
    def check(**body: Any) -> Any:
        return server.post("/weights_checker", json=body)

    weights = named_tensors(models.folders["old"])
    assert check(action="snapshot").status_code == 200
    assert check(action="compare").status_code == 200
    assert check(action="reset_tensors", selector="target").status_code == 200
    assert check(action="compare").status_code == 400
    assert "max_abs_err" in check(action="compare").json()["message"]
    items = list(weights.items())
    for part, told in ((items[:9], len(items)), (items[9:], len(items) - 9)):
        health = server.get("/health_generate")
        assert health.status_code == 503
        assert f"the target lacks {told} of {len(items)} tensors (" in health.text
        reply = server.post("/update_weights_from_tensor", json=tensors(part))
        assert reply.status_code == 200
        assert ("are mixed" in reply.json()["message"]) is (part == items[:9])
    assert server.get("/health_generate").status_code == 200
    assert check(action="compare").json() == {"success": True, "message": "Success"}
    answer = server.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert answer["output_ids"] == models.expected["old"][0]
