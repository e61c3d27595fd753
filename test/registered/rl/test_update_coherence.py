"""After a weight update no tier serves KV of the old weights, and old pages are found again later.

One scheduler with everything that holds state about tokens: a tiny target, a tiny EAGLE3 draft,
host tier, storage in files whose writes are slow, so that backups are queued at each update. A
negative control shows what happens where the cache does not learn of the new weights.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from safetensors.torch import load_file

from sglang.srt.managers.io_struct import (
    CheckWeightsReqInput,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromIPCReqInput,
    UpdateWeightsFromTensorReqInput,
    WeightUpdateReqOutput,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.serialization import _rebuild_cpu_tensor
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import Answer, ServedScheduler
from sglang.test.fakes.slow_file_store import SlowFileStore, extra_config
from sglang.test.fakes.tiny_drafts import make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

register_cpu_ci(est_time=45, suite="rl")

PAGE = 8
NUM_NEW_TOKENS = 12
DELAY_S = 0.4
LOADER = "sglang.srt.model_executor.model_runner._model_load_weights_direct"


def prompt(number: int) -> list[int]:
    return [(11 * i + 17 * number + 5) % 250 for i in range(6 * PAGE + 3)]


class World:
    """Checkpoints, one scheduler, and what fresh schedulers answer with each set of weights."""

    def __init__(self, root: Path) -> None:
        self.folders = {
            name: make_tiny_checkpoint(root / name, seed=seed, num_hidden_layers=6)
            for seed, name in enumerate(("old", "new"))
        }
        self.drafts = {
            name: make_tiny_draft(root / f"draft-{name}", seed=seed)
            for seed, name in enumerate(("old", "new"))
        }
        self.storage = root / "l3"
        self.parameters: dict[str, list[tuple[str, torch.Tensor]]] = {}
        self.expected = {name: self._fresh_answers(name) for name in self.folders}
        self.scheduler = self.start()

    def weights(self, name: str) -> list[tuple[str, torch.Tensor]]:
        return list(load_file(self.folders[name] / "model.safetensors").items())

    def _fresh_answers(self, name: str) -> list[list[int]]:
        """Of a scheduler that was started with these weights; keeps its parameters as well."""
        with ServedScheduler(
            self.folders[name],
            *("--max-total-tokens", 1024, "--page-size", PAGE, "--enable-hierarchical-cache"),
        ) as fresh:
            model = fresh.scheduler.weight_updater._target.runner.model
            self.parameters[name] = [(n, p.detach().clone()) for n, p in model.named_parameters()]
            return [fresh.answer(prompt(n), NUM_NEW_TOKENS).tokens for n in range(4)]

    def start(self, *flags: str | int | float) -> ServedScheduler:
        config = extra_config(self.storage, 0.0, prefetch_threshold=PAGE)
        return ServedScheduler(
            self.folders["old"],
            *("--max-total-tokens", 2048, "--page-size", PAGE, "--enable-memory-saver"),
            *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", 3),
            *("--speculative-draft-model-path", str(self.drafts["old"])),
            *("--speculative-eagle-topk", 1, "--speculative-num-draft-tokens", 4),
            *("--enable-hierarchical-cache", "--hicache-ratio", 2),
            *("--hicache-storage-backend", "dynamic", "--custom-weight-loader", LOADER),
            *("--hicache-storage-prefetch-policy", "wait_complete"),
            *("--hicache-storage-backend-extra-config", config),
            *flags,
        )

    # -- one call an API ------------------------------------------------------------------------

    def update(self, how: str, name: str, **fields: Any) -> WeightUpdateReqOutput:
        reply = getattr(self, f"_by_{how}")(name, fields)
        assert isinstance(reply, WeightUpdateReqOutput)
        return reply

    def _by_tensor(self, name: str, fields: dict[str, Any]) -> Any:
        return self.push(self.weights(name), **fields)

    def _by_direct(self, name: str, fields: dict[str, Any]) -> Any:
        """Fused parameters, as the engine names them."""
        named = self.parameters[name]
        return self.push(named, load_format="direct", selector="target", **fields)

    def _by_custom(self, name: str, fields: dict[str, Any]) -> Any:
        """The same through a function that the command line names."""
        named = self.parameters[name]
        return self.push(named, load_format=LOADER, selector="target", **fields)

    def _by_bucket(self, name: str, fields: dict[str, Any]) -> Any:
        bucket = FlattenedTensorBucket(named_tensors=self.weights(name))
        data = {
            "flattened_tensor": bucket.get_flattened_tensor(),
            "metadata": bucket.get_metadata(),
        }
        return self.push(data, load_format="flattened_bucket", **fields)

    def _by_disk(self, name: str, fields: dict[str, Any]) -> Any:
        return self.scheduler.control(
            UpdateWeightFromDiskReqInput(model_path=str(self.folders[name]), **fields)
        )

    def _by_ipc(self, name: str, fields: dict[str, Any]) -> Any:
        context = zmq.Context()
        socket = context.socket(zmq.REQ)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        thread = threading.Thread(target=_serve_ipc, args=(socket, self.weights(name)))
        thread.start()
        reply = self.scheduler.control(
            UpdateWeightsFromIPCReqInput(zmq_handles={"cpu-0": f"tcp://127.0.0.1:{port}"}, **fields)
        )
        thread.join(10)
        socket.close()
        context.term()
        return reply

    def push(self, payload: Any, **fields: Any) -> Any:
        data = MultiprocessingSerializer.serialize(payload, output_str=True)
        return self.scheduler.control(
            UpdateWeightsFromTensorReqInput(serialized_named_tensors=[data], **fields)
        )

    # -- looking --------------------------------------------------------------------------------

    def ask(self, number: int) -> Answer:
        return self.scheduler.answer(prompt(number), NUM_NEW_TOKENS)

    def queue_backups(self) -> None:
        """Answer prompts while writes are slow: some are queued behind one that is under way."""
        store = self.scheduler.tree.cache_controller.storage_backend
        assert isinstance(store, SlowFileStore)
        store.delay_s = DELAY_S
        for number in range(1, 4):
            self.ask(number)
        self.scheduler.run_until(lambda: not self.scheduler.tree.has_pending_copies(), 5)
        assert len(self.scheduler.tree.ongoing_backup) >= 2
        store.delay_s = 0.0

    def checksums(self) -> tuple[dict[str, str], dict[str, str]]:
        """(of the target, of the draft)."""
        sums = self.scheduler.control(CheckWeightsReqInput()).checksum["ranks"][0]["checksums"]
        draft = {name: value for name, value in sums.items() if name.startswith("draft.")}
        return {name: value for name, value in sums.items() if name not in draft}, draft


def _serve_ipc(socket: zmq.Socket[bytes], weights: list[tuple[str, torch.Tensor]]) -> None:
    data, entries = b"", []
    for name, tensor in weights:
        entries.append(
            {"name": name, "dtype": tensor.dtype, "shape": tensor.shape, "offset": len(data)}
        )
        data += tensor.contiguous().numpy().tobytes()
    handle = (_rebuild_cpu_tensor, (data, torch.uint8, (len(data),)))
    for message in (handle, entries, None):
        socket.send(MultiprocessingSerializer.serialize(message))
        assert socket.recv() == b""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("world"))
    yield made
    made.scheduler.close()


@pytest.fixture
def world(shared: World) -> World:
    """Old weights, empty device and host; storage holds prompt 0 of the old weights."""
    assert shared.update("disk", "old").success
    shared.push(
        list(load_file(shared.drafts["old"] / "model.safetensors").items()), selector="draft"
    )
    shared.scheduler.settle()
    assert shared.scheduler.tree.clear_storage_backend()
    shared.ask(0)
    shared.scheduler.settle()
    shared.scheduler.flush()
    return shared


APIS = ("tensor", "direct", "bucket", "custom", "disk", "ipc")


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("how", APIS)
def test_new_weights_never_meet_old_kv(world: World, how: str, flush: bool) -> None:
    assert world.ask(0).sources["storage"] > 0  # from L3, and on the device and host from now on
    world.queue_backups()
    reply = world.update(how, "new", flush_cache=flush, weight_version=f"{how}-{flush}")
    assert reply.success, reply.message
    assert reply.message.endswith(f"Weight version updated to {how}-{flush}.")
    for number in range(4):
        answer = world.ask(number)
        assert answer.tokens == world.expected["new"][number]
        assert answer.cached_tokens == 0, answer.sources
    world.scheduler.settle()

    # Back: the pages that were written under the old weights are theirs again.
    assert world.update("disk", "old").success
    answer = world.ask(0)
    assert answer.tokens == world.expected["old"][0]
    assert answer.sources["storage"] >= 5 * PAGE
    world.scheduler.settle()


@pytest.mark.parametrize("flush", [True, False])
def test_without_a_new_fingerprint_old_kv_would_be_served(
    world: World, flush: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of the test above."""
    for role in world.scheduler.scheduler.weight_updater._roles:
        fingerprint = role.runner.fingerprint
        monkeypatch.setattr(fingerprint, "digest", partial(str, fingerprint.digest()))
    world.ask(0)
    assert world.update("tensor", "new", flush_cache=flush).success
    answer = world.ask(0)
    assert answer.cached_tokens > 0
    assert answer.tokens != world.expected["new"][0]
    monkeypatch.undo()


def test_a_flush_that_cannot_be_is_refused_before_the_weights_change(world: World) -> None:
    before = world.checksums()
    rid = world.scheduler.submit(prompt(0), 40)
    world.scheduler.run_until(lambda: len(world.scheduler.scheduler.running_batch) > 0)
    world.scheduler.control(PauseGenerationReqInput(mode="in_place"))
    reply = world.update("tensor", "new", flush_cache=True, weight_version="never")
    assert not reply.success and "#running-req: 1" in reply.message
    assert world.checksums() == before
    assert world.scheduler.scheduler.weight_version != "never"
    assert world.update("tensor", "new", flush_cache=False, weight_version="now").success
    assert world.checksums() != before
    world.scheduler.control(ContinueGenerationReqInput())
    world.scheduler.run_until(lambda: world.scheduler.finish(rid) is not None)
    spans = world.scheduler.outputs[rid][-1].weight_versions
    assert [span[0] for span in spans][-1] == "now" and len(spans) == 2
    assert spans[0][2] == spans[1][1] and spans[-1][2] == 40
    # Its KV is of two versions: none of it may be matched.
    answer = world.ask(0)
    assert answer.cached_tokens == 0 and answer.tokens == world.expected["new"][0]


def test_isolation_can_be_given_up(world: World) -> None:
    """Old KV stays in use after an update without a flush, but never reaches storage."""
    with world.start("--disable-weight-version-kv-isolation") as scheduler:
        own = copy.copy(world)
        own.scheduler = scheduler
        own.ask(1)
        scheduler.settle()
        num_stored = len(list(world.storage.glob("*.bin")))
        assert own.update("tensor", "new", flush_cache=False).success
        stale = own.ask(1)
        assert stale.cached_tokens > 0
        assert stale.tokens != world.expected["new"][1]
        own.ask(2)
        scheduler.settle()
        assert len(list(world.storage.glob("*.bin"))) == num_stored
        scheduler.flush()
        fresh = own.ask(1)
        assert fresh.tokens == world.expected["new"][1] and fresh.cached_tokens == 0
        scheduler.settle()
        assert len(list(world.storage.glob("*.bin"))) > num_stored


def test_draft_weights_are_updated_when_they_are_meant(world: World) -> None:
    """And only then; other draft weights make the draft's KV stale."""
    target, draft = world.checksums()
    assert world.update("tensor", "new", selector="target").success
    changed, kept = world.checksums()
    shared = {name for name in draft if "embed" in name or "lm_head" in name}
    assert changed != target
    assert {k: v for k, v in kept.items() if k not in shared} == {
        k: v for k, v in draft.items() if k not in shared
    }
    assert world.update("disk", "old").success
    world.ask(0)
    fingerprint = world.scheduler.tree.weights_fingerprint
    new_draft = list(load_file(world.drafts["new"] / "model.safetensors").items())
    assert world.push(new_draft, selector="draft", flush_cache=False).success
    same_target, new = world.checksums()
    assert same_target == target and new != draft
    assert world.scheduler.tree.weights_fingerprint != fingerprint
    answer = world.ask(0)
    assert answer.tokens == world.expected["old"][0]
    assert answer.cached_tokens == 0  # neither tier, and storage lacks the new draft's pages


def test_released_memory(world: World) -> None:
    """The sequence of colocated trainers, in one scheduler."""
    world.queue_backups()
    control = world.scheduler.control
    assert control(ReleaseMemoryOccupationReqInput()).success
    twice = control(ReleaseMemoryOccupationReqInput(tags=["kv_cache"]))
    assert not twice.success and "already released" in twice.message
    assert not world.update("tensor", "new").success  # no memory to write to
    reply = control(ResumeMemoryOccupationReqInput(tags=["weights"]))
    assert (
        reply.success and reply.weights_mixed and reply.released_tags == ["cuda_graph", "kv_cache"]
    )
    assert world.update("bucket", "new", flush_cache=True).success
    draft = list(load_file(world.drafts["new"] / "model.safetensors").items())
    reply = world.push(draft, selector="draft", flush_cache=False)
    assert reply.success and not reply.weights_mixed
    rid = world.scheduler.submit(prompt(1), NUM_NEW_TOKENS)
    world.scheduler.step(5)
    assert world.scheduler.finish(rid) is None  # waits: there is no KV to write to
    assert control(ResumeMemoryOccupationReqInput(tags=["kv_cache", "cuda_graph"])).success
    world.scheduler.run_until(lambda: world.scheduler.finish(rid) is not None)
    assert world.scheduler.answer_of(rid).tokens == world.expected["new"][1]
    wrong = control(ResumeMemoryOccupationReqInput())
    assert not wrong.success and "not currently released" in wrong.message
    unknown = control(ReleaseMemoryOccupationReqInput(tags=["everything"]))
    assert not unknown.success and "unknown tag" in unknown.message
