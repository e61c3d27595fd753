"""A whole speculative decode step runs without the values of its tensors: it can be captured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang.srt import platforms
from sglang.srt.configs.draft_config import mtp_layer_config, read_draft_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.dispatch import TorchOps
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.forward_context import use_attention_backend
from sglang.srt.model_executor.kv_pools import KVPoolShape, make_kv_pool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models.registry import resolve_model_class
from sglang.srt.speculative import base_spec_worker, step_ops
from sglang.srt.speculative.base_spec_worker import AcceptanceRule
from sglang.srt.speculative.draft_runner import (
    Drafting,
    EagleDrafting,
    StandaloneDrafting,
)
from sglang.srt.speculative.eagle_info import StepPlaces
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.multi_layer_drafting import MultiLayerDrafting
from sglang.srt.speculative.spec_graph_runner import GraphKind
from sglang.srt.speculative.spec_info import DraftShape
from sglang.test.fakes.eager_graphs import use_eager_graphs
from sglang.test.fakes.tiny_drafts import add_tiny_nextn_layer, make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

pytestmark = pytest.mark.usefixtures("own_fixed_tensors")

ROWS, CONTEXT = 6, 64
CHAIN = DraftShape(num_steps=3, topk=1, num_draft_tokens=4)
TREE = DraftShape(num_steps=3, topk=2, num_draft_tokens=6)


class _NoAttention:
    """Any result of the right shape; that kernels read no values is for tests on a GPU."""

    def can_rotate(self, forward_batch: ForwardBatch) -> bool:
        return False

    def forward(
        self, q: torch.Tensor, k: Any, v: Any, layer: RadixAttention, batch: ForwardBatch, *_: Any
    ) -> torch.Tensor:
        mask = batch.spec_info.custom_mask if batch.spec_info is not None else None
        assert mask is None or mask.shape[:2].numel() == batch.num_tokens
        return q.new_empty(q.shape[0], layer.num_heads * layer.v_head_dim)


class _Runner:
    """The part of a `ModelRunner` that speculation uses, over tensors without values."""

    def __init__(self, config: ModelConfig, rows: ReqToTokenPool | None = None) -> None:
        self.model_config = config
        self.device, self.dtype = torch.device("cpu"), torch.bfloat16
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)  # plain PyTorch does the work then
        self.model = resolve_model_class(config.architectures)(config)
        torch.set_default_dtype(before)
        self.req_to_token_pool = rows or ReqToTokenPool(ROWS, CONTEXT, "cpu")
        shape = KVPoolShape(num_tokens=99, page_size=1, dtype=self.dtype, tp_size=1)
        self.token_to_kv_pool = make_kv_pool(config, shape, "cpu")

    def forward(self, batch: ForwardBatch) -> Any:
        with use_attention_backend(cast(Any, _NoAttention())):
            return self.model(batch.input_ids, batch.positions, batch)


class _Worker(EAGLEWorkerV2):
    """Without the host's knowledge of lengths, which is free on a CPU."""

    def _bounds(self, places: StepPlaces, bounds: list[int] | None) -> list[int]:
        return [0] * places.lens.shape[1]


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(platforms, "_current", None)
    platforms.init_platform("cpu")
    use_eager_graphs(monkeypatch)
    monkeypatch.setattr(base_spec_worker, "checked_argmax", TorchOps().checked_argmax)
    monkeypatch.setattr(step_ops, "checked_argmax", TorchOps().checked_argmax)
    monkeypatch.setattr(step_ops, "argmax", TorchOps().argmax)
    yield


def make_configs(folder: Path, algorithm: str) -> tuple[ModelConfig, ModelConfig]:
    """Of target and draft; with as few layers as the states that EAGLE3 reads allow."""
    num_layers = 4 if algorithm == "EAGLE3" else 1
    target = ModelConfig.from_path(
        str(make_tiny_checkpoint(folder / "target", num_hidden_layers=num_layers))
    )
    if algorithm != "EAGLE3":
        return target, target
    return target, read_draft_config(str(make_tiny_draft(folder / "draft")), target)


def target_worker(target: _Runner) -> SimpleNamespace:
    """The part of a target's worker that speculation uses."""
    return SimpleNamespace(
        model_runner=target,
        model_config=target.model_config,
        device=target.device,
        last_token_ids=torch.zeros(target.req_to_token_pool.num_rows, dtype=torch.int64),
    )


def make_worker(
    configs: tuple[ModelConfig, ModelConfig], algorithm: str, shape: DraftShape
) -> _Worker:
    target_config, draft_config = configs
    target = _Runner(target_config)
    draft = _Runner(draft_config, target.req_to_token_pool)
    drafting: Drafting
    if algorithm == "EAGLE3":
        model = cast(Any, draft.model)
        layers = model.draft_config.layers_to_capture(target_config.num_hidden_layers)
        target.model.set_eagle3_layers_to_capture(layers)
        model.set_embed_and_head(*target.model.get_embed_and_head())
        drafting = EagleDrafting(cast(ModelRunner, draft), shape)
    else:
        drafting = StandaloneDrafting(cast(ModelRunner, draft), shape)
    mode = CaptureHiddenMode.FULL if algorithm == "EAGLE3" else CaptureHiddenMode.NULL
    return _Worker(cast(TpModelWorker, target_worker(target)), drafting, AcceptanceRule(), mode)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_all_graphs_are_captured_without_values(
    tmp_path: Path, algorithm: str, shape: DraftShape
) -> None:
    configs = make_configs(tmp_path, algorithm)
    with FakeTensorMode():
        worker = make_worker(configs, algorithm, shape)
        worker.capture_graphs([1, 4], pad=True, show_progress=False)
        graphs = worker.graphs
        assert graphs is not None
        packed = graphs._graphs[4].outputs[GraphKind.WHOLE]
        assert packed.shape == (4, shape.max_accept_len + 2)
        front = graphs._graphs[4].outputs[GraphKind.FRONT]
        assert front.tree.token_ids.shape == (4, shape.num_draft_tokens)
        assert GraphKind.COMMIT in graphs._graphs[1].outputs


def test_drafts_of_several_layers_are_captured_without_values(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, "deepseek_v3", first_k_dense_replace=9)
    add_tiny_nextn_layer(folder, num_layers=CHAIN.num_steps)
    config = ModelConfig.from_path(str(folder))
    first = read_draft_config(str(folder), config)
    layers = [mtp_layer_config(first, layer) for layer in range(CHAIN.num_steps)]
    with FakeTensorMode():
        target = _Runner(config)
        drafts = [_Runner(layer, target.req_to_token_pool) for layer in layers]
        for draft in drafts:
            cast(Any, draft.model).set_embed_and_head(*target.model.get_embed_and_head())
        drafting = MultiLayerDrafting(cast(list[ModelRunner], drafts), CHAIN, CONTEXT - 1)
        worker = _Worker(
            cast(TpModelWorker, target_worker(target)),
            drafting,
            AcceptanceRule(),
            CaptureHiddenMode.FULL,
        )
        worker.capture_graphs([1, 4], pad=True, show_progress=False)
        assert worker.graphs is not None
        packed = worker.graphs._graphs[4].outputs[GraphKind.WHOLE]
        assert packed.shape == (4, CHAIN.max_accept_len + 2)
        assert GraphKind.COMMIT in worker.graphs._graphs[1].outputs


def test_a_step_that_reads_lengths_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Worker, "_bounds", EAGLEWorkerV2._bounds)
    configs = make_configs(tmp_path, "STANDALONE")
    with FakeTensorMode(), pytest.raises(RuntimeError):
        worker = make_worker(configs, "STANDALONE", CHAIN)
        worker.capture_graphs([1], pad=True, show_progress=False)
