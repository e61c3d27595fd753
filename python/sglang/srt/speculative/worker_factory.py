"""From settings to the worker of a speculative algorithm; fills `spec_info`'s registry.

Owns what must be known before the target is built (how much memory a draft will take) and the
assembly of target, draft and worker. Called once per scheduler at start-up.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang.srt.configs.draft_config import (
    DRAFT_ARCHITECTURES,
    check_draft_kind,
    check_own_draft,
    is_mtp_draft,
    mtp_layer_configs,
    read_draft_config,
    read_eagle_config,
    stacked_mtp_config,
)
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.cuda_graph_runner import capture_batch_sizes
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.kv_pools import KVPoolShape, make_kv_pool
from sglang.srt.model_executor.model_runner import (
    DEFAULT_GRAPH_MAX_BS,
    ModelRunner,
    RunnerConfig,
    SharedMemoryPool,
    kv_bytes_per_token,
)
from sglang.srt.models.base import LanguageModel
from sglang.srt.models.eagle_draft import EagleDraftModel
from sglang.srt.models.registry import resolve_model_class
from sglang.srt.platforms import current_platform
from sglang.srt.speculative.base_spec_worker import AcceptanceRule, BaseSpecWorker
from sglang.srt.speculative.draft_runner import Drafting, EagleDrafting, StandaloneDrafting
from sglang.srt.speculative.eagle_worker import DraftModelWorker, EAGLEWorker, StandaloneWorker
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.multi_layer_drafting import MultiLayerDrafting
from sglang.srt.speculative.ngram_cache import NgramCache, NgramOptions, read_corpus
from sglang.srt.speculative.ngram_worker import NGRAMWorker
from sglang.srt.speculative.spec_graph_runner import DEFAULT_MAX_TOKENS
from sglang.srt.speculative.spec_info import (
    DraftFeatures,
    DraftShape,
    SpeculativeAlgorithm,
    register_worker,
)

logger = logging.getLogger(__name__)

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramCorpus:
    """Texts that NGRAM drafts from beside what it has seen; see `ngram_cache.read_corpus`."""

    path: str
    encode: Callable[[str], list[int]] | None  # None: the file holds token ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecSettings:
    """The part of the server's arguments that speculation reads."""

    algorithm: SpeculativeAlgorithm
    shape: DraftShape
    rule: AcceptanceRule
    draft_model_path: str | None = None
    draft_load_format: str = "auto"
    overlap: bool = False  # the host reads outcomes one step late
    multi_layer: bool = False  # each step of a chain by a layer of its own
    ngram: NgramOptions | None = None  # NGRAM only
    ngram_corpus: NgramCorpus | None = None

    @property
    def has_several_layers(self) -> bool:
        """Whether steps differ in their layer. A single step drafts as with any other draft."""
        return self.multi_layer and self.shape.num_steps > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """A draft model that is to be loaded beside a target. Sizes are of one rank."""

    configs: tuple[ModelConfig, ...]  # one a runner: several where each layer is a model
    token_bytes: int
    weight_bytes: int

    @property
    def config(self) -> ModelConfig:
        """That of the first runner."""
        return self.configs[0]


def plan_draft(
    settings: SpecSettings, target: ModelConfig, kv_dtype: torch.dtype
) -> DraftPlan | None:
    """Read the draft's configuration; None where the algorithm has no draft model.

    Raises ModelConfigError with the reason where draft and target do not fit.
    """
    traits = settings.algorithm.traits
    if not traits.has_draft_model:
        return None
    path = settings.draft_model_path
    if path is None:
        raise ModelConfigError(
            f"--speculative-algorithm {settings.algorithm.name} needs "
            "--speculative-draft-model-path"
        )
    tp_size = get_tp_group().size
    if traits.features is DraftFeatures.NONE:
        config = _read_standalone_config(path, target)
    else:
        config = read_draft_config(path, target, tp_size=tp_size)
        check_draft_kind(config, settings.algorithm.name)
        if path == target.model_path:
            check_own_draft(config)
    num_drafted = config.vocab_size
    if traits.features is not DraftFeatures.NONE:
        num_drafted = read_eagle_config(config).draft_vocab_size
    if settings.shape.topk > num_drafted:
        raise ModelConfigError(
            f"--speculative-eagle-topk {settings.shape.topk}: the draft {path} knows {num_drafted} "
            "tokens"
        )
    configs: tuple[ModelConfig, ...] = (config,)
    if settings.multi_layer:
        configs = mtp_layer_configs(config, settings.shape.num_steps)
    return DraftPlan(
        configs=configs,
        token_bytes=sum(kv_bytes_per_token(each, tp_size, kv_dtype) for each in configs),
        weight_bytes=sum(_weight_bytes(path, each) for each in configs),
    )


def _read_standalone_config(path: str, target: ModelConfig) -> ModelConfig:
    config = ModelConfig.from_path(path, dtype=target.dtype)
    if any(name in DRAFT_ARCHITECTURES for name in config.architectures):
        raise ModelConfigError(
            f"the draft {path} cannot be used: it is {', '.join(config.architectures)}, which "
            "reads its target's hidden states; STANDALONE needs a language model"
        )
    if config.vocab_size != target.vocab_size:
        raise ModelConfigError(
            f"the draft {path} cannot be used: its vocabulary has {config.vocab_size} tokens, "
            f"the target's has {target.vocab_size}"
        )
    if config.context_len < target.context_len:
        raise ModelConfigError(
            f"the draft {path} cannot be used: it has positions for {config.context_len} tokens, "
            f"the target's context is {target.context_len}"
        )
    if config.linear_attention is not None:
        raise ModelConfigError(
            f"the draft {path} cannot be used: it has recurrent states, which cannot go back to "
            "where the target has rejected it"
        )
    return dataclasses.replace(config, context_len=target.context_len)


def _weight_bytes(path: str, config: ModelConfig) -> int:
    """What the weights will take, by the files: half-precision files may be widened."""
    itemsize = getattr(torch, config.dtype).itemsize
    if is_mtp_draft(config):
        return _own_parameters(config) * itemsize  # the files are the target's as well
    folder = Path(path)
    files = list(folder.iterdir()) if folder.is_dir() else [folder]
    on_disk = sum(file.stat().st_size for file in files if file.suffix in _WEIGHT_SUFFIXES)
    return on_disk * itemsize // 2


def _own_parameters(config: ModelConfig) -> int:
    """Parameters of this rank's part of a draft, without those that it shares."""
    with torch.device("meta"):
        model = resolve_model_class(config.architectures)(config)
    parameters = model.own_parameters() if isinstance(model, EagleDraftModel) else ()
    return sum(parameter.numel() for parameter in parameters)


def draft_positions(settings: SpecSettings) -> int:
    """Columns that proposals may touch behind the context, with one step in flight."""
    shape = settings.shape
    slots = max(shape.num_draft_tokens, 1 + shape.topk * (shape.num_steps - 1))
    if settings.has_several_layers:
        slots = shape.max_accept_len + shape.num_steps
    return shape.max_accept_len + slots


def create_draft_worker(
    settings: SpecSettings,
    plan: DraftPlan | None,
    target_worker: TpModelWorker,
    runner_config: RunnerConfig,
) -> BaseSpecWorker:
    """Load the draft, if there is one, and build the algorithm's worker around the target's."""
    worker: BaseSpecWorker = settings.algorithm.create_worker(
        settings=settings, plan=plan, target_worker=target_worker, runner_config=runner_config
    )
    _capture_graphs(worker, runner_config)
    return worker


def _make_draft_model_worker(
    *,
    settings: SpecSettings,
    plan: DraftPlan | None,
    target_worker: TpModelWorker,
    runner_config: RunnerConfig,
) -> BaseSpecWorker:
    if plan is None:
        raise ModelConfigError(f"{settings.algorithm.name} needs a draft model")
    target = target_worker.model_runner
    runners = _draft_runners(settings, plan, target, runner_config)
    traits = settings.algorithm.traits
    drafting: Drafting
    if traits.features is DraftFeatures.NONE:
        drafting = StandaloneDrafting(runners[0], settings.shape)
        return _worker_class(settings)(
            target_worker, drafting, settings.rule, CaptureHiddenMode.NULL
        )
    layers = read_eagle_config(plan.config).layers_to_capture(target.model_config.num_hidden_layers)
    if layers is not None:
        target_model: LanguageModel = target.model
        target_model.set_eagle3_layers_to_capture(layers)
    if settings.has_several_layers:
        max_position = target.model_config.context_len - 1
        drafting = MultiLayerDrafting(runners, settings.shape, max_position)
    else:
        drafting = EagleDrafting(
            runners[0], settings.shape, draws=settings.rule.use_rejection_sampling
        )
    return _worker_class(settings)(target_worker, drafting, settings.rule, CaptureHiddenMode.FULL)


def _draft_runners(
    settings: SpecSettings, plan: DraftPlan, target: ModelRunner, runner_config: RunnerConfig
) -> list[ModelRunner]:
    """One for each configuration. KV of several lies in one pool, which travels as one."""
    config = dataclasses.replace(
        runner_config,
        load_format=settings.draft_load_format,
        # Draft steps are part of the worker's own graphs and read hidden states.
        disable_cuda_graph=True,
        use_decode_runner=settings.algorithm is SpeculativeAlgorithm.STANDALONE,
        prefill_graph_tokens=(),
        warm_up_tokens=0,
        keep_released_weights=runner_config.keep_released_draft_weights,
        draft_token_bytes=0,
        draft_weight_bytes=0,
        draft_positions=0,
    )
    pools: list[KVCache | None] = [None]
    if len(plan.configs) > 1:
        stack = _stacked_kv_pool(plan, target, runner_config)
        pools = [stack.layer_view(layer) for layer in range(stack.layer_num)]
    return [
        ModelRunner(
            layer_config,
            config,
            SharedMemoryPool(
                req_to_token_pool=target.req_to_token_pool,
                token_to_kv_pool_allocator=target.token_to_kv_pool_allocator,
                kv_pool=pool,
            ),
            after_load=lambda model: _share_with_target(model, target.model),
        )
        for layer_config, pool in zip(plan.configs, pools, strict=True)
    ]


def _stacked_kv_pool(plan: DraftPlan, target: ModelRunner, runner_config: RunnerConfig) -> KVCache:
    saver = runner_config.memory_saver
    shape = KVPoolShape(
        num_tokens=target.max_total_num_tokens,
        page_size=runner_config.page_size,
        dtype=target.kv_dtype,
        tp_size=target.tp.size,
    )
    config = stacked_mtp_config(plan.config, len(plan.configs))
    allocate = saver.kv_allocator() if saver is not None else None
    return make_kv_pool(config, shape, target.device, allocate)


def _make_ngram_worker(
    *,
    settings: SpecSettings,
    plan: DraftPlan | None,
    target_worker: TpModelWorker,
    runner_config: RunnerConfig,
) -> BaseSpecWorker:
    options = settings.ngram or NgramOptions(num_draft_tokens=settings.shape.num_draft_tokens)
    corpus = None
    if settings.ngram_corpus is not None:
        start = time.perf_counter()
        corpus = read_corpus(settings.ngram_corpus.path, options, settings.ngram_corpus.encode)
        logger.info(
            "N-gram corpus %s: %d nodes, %.1f s",
            settings.ngram_corpus.path,
            corpus.num_nodes,
            time.perf_counter() - start,
        )
    cache = NgramCache(options, corpus)
    return NGRAMWorker(target_worker, settings.shape, settings.rule, cache)


def _capture_graphs(worker: BaseSpecWorker, config: RunnerConfig) -> None:
    """Capture the worker's steps, where this platform can and nobody has forbidden it."""
    target = worker.target_runner
    if current_platform().graph_capture_supported and not config.disable_cuda_graph:
        _capture_decode(worker, config)
    if target.prefill_runner is None:
        memory = None if worker.graphs is None else worker.graphs.memory
        target.capture_prefill(worker.feature_mode, memory)


def _capture_decode(worker: BaseSpecWorker, config: RunnerConfig) -> None:
    platform, target = current_platform(), worker.target_runner
    default = DEFAULT_GRAPH_MAX_BS
    if not worker.steps_aside(default):
        default = min(default, max(1, DEFAULT_MAX_TOKENS // worker.shape.num_draft_tokens))
    limit = config.cuda_graph_max_bs or max(config.cuda_graph_bs or [default])
    sizes = capture_batch_sizes(min(limit, target.max_running_requests), config.cuda_graph_bs)
    before = platform.held_bytes()
    worker.capture_graphs(
        sizes,
        pad=not config.disable_cuda_graph_padding,
        show_progress=get_tp_group().rank == 0,
    )
    target.graph_bytes += max(platform.held_bytes() - before, 0)


def _worker_class(settings: SpecSettings) -> type[DraftModelWorker]:
    if settings.overlap:
        return EAGLEWorkerV2
    is_standalone = settings.algorithm is SpeculativeAlgorithm.STANDALONE
    return StandaloneWorker if is_standalone else EAGLEWorker


def _share_with_target(model: LanguageModel, target: LanguageModel) -> None:
    if isinstance(model, EagleDraftModel):
        model.set_embed_and_head(*target.get_embed_and_head())


for _algorithm in (
    SpeculativeAlgorithm.EAGLE,
    SpeculativeAlgorithm.EAGLE3,
    SpeculativeAlgorithm.STANDALONE,
):
    register_worker(_algorithm, _make_draft_model_worker)
register_worker(SpeculativeAlgorithm.NGRAM, _make_ngram_worker)
