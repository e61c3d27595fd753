"""`ModelRunner`: the model of one rank with its memory: load, size the pools, forward, sample.

Owns the module, the KV pool and (unless given by another runner) the request table and the slot
allocator. Knows nothing of requests. Scheduler thread only. Trainers import the names of weight
updates from here, which live elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.communication import all_reduce_min
from sglang.srt.distributed.parallel_state import get_tp_group
from sglang.srt.layers.attention.base import AttentionBackend, RunnerFacts
from sglang.srt.layers.attention.registry import create_attention_backend
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.mamba.step_states import keep_states
from sglang.srt.layers.sampler import Sampler, nan_rows
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.hybrid_kv_pool import HybridLinearKVPool
from sglang.srt.mem_cache.memory_pool import KVCache, MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.cpu_decode_runner import CpuDecodeRunner, why_not_supported
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, capture_batch_sizes
from sglang.srt.model_executor.custom_weight_loader import (
    _model_load_weights_direct as _model_load_weights_direct,
)
from sglang.srt.model_executor.decode_runner import DecodeRunner, StagedStep
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.forward_context import use_attention_backend
from sglang.srt.model_executor.graph_capture import GraphMemory
from sglang.srt.model_executor.kv_cache_sizing import (
    MemoryBudget,
    num_window_tokens,
    profile_max_num_tokens,
    resolve_max_running_requests,
)
from sglang.srt.model_executor.kv_pools import (
    KVPoolShape,
    bytes_per_state,
    make_kv_pool,
    make_slot_allocator,
)
from sglang.srt.model_executor.kv_pools import kv_bytes_per_token as kv_bytes_per_token
from sglang.srt.model_executor.memory_saver import MemorySaver
from sglang.srt.model_executor.prefill_graph_runner import (
    PrefillGraphRunner,
    PrefillStep,
    StagedPrefill,
    why_not_captured,
)
from sglang.srt.model_executor.prefill_warm_up import warm_up_prefill
from sglang.srt.model_executor.state_sizing import (
    StateBudget,
    StateCounts,
    divide_states,
    num_states_that_fit,
)
from sglang.srt.model_loader.loader import load_model
from sglang.srt.model_loader.weight_fingerprint import WeightsFingerprint
from sglang.srt.models.base import LanguageModel
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.platforms import current_platform
from sglang.srt.platforms.base import MemoryInfo
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket as FlattenedTensorBucket
from sglang.srt.weight_sync.tensor_bucket import LocalSerializedTensor as LocalSerializedTensor

logger = logging.getLogger(__name__)

# Names of the command line that are not torch's.
_KV_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}

# Largest captured decode batch unless a flag says otherwise.
DEFAULT_GRAPH_MAX_BS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """The part of the server's arguments that a runner reads."""

    load_format: str
    attention_backend: str
    page_size: int
    mem_fraction_static: float | None
    max_total_tokens: int | None
    max_running_requests: int | None
    kv_cache_dtype: str  # "auto": the model's
    random_seed: int
    cpu_weight_format: str = "auto"
    disable_cuda_graph: bool = False
    use_decode_runner: bool = True  # take a shortcut for plain decode steps where there is one
    cuda_graph_max_bs: int | None = None  # None: DEFAULT_GRAPH_MAX_BS
    cuda_graph_bs: list[int] | None = None  # None: a ladder up to the maximum
    disable_cuda_graph_padding: bool = False
    # Token counts of captured prefill steps, rising; none: they are not captured.
    prefill_graph_tokens: tuple[int, ...] = ()
    warm_up_tokens: int = 0  # prefill steps up to this many tokens are tried out at start
    # Of a draft model that will share slots and rows with this one: bytes of its KV a token, bytes
    # of its weights, and positions behind the context that its proposals may touch.
    draft_token_bytes: int = 0
    draft_weight_bytes: int = 0
    draft_positions: int = 0
    # Of models that mix windows and full attention: window rows for each slot; one pool for all.
    swa_full_tokens_ratio: float = 0.8
    disable_hybrid_swa_memory: bool = False
    # Of models with recurrent states; see `StateBudget`.
    mamba_full_memory_ratio: float = 0.9
    max_mamba_cache_size: int | None = None
    keep_state_snapshots: bool = False
    memory_saver: MemorySaver | None = None
    # Copy weights to the host when their memory is released: a target's; its draft's.
    keep_released_weights: bool = False
    keep_released_draft_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryPool:
    """Rows and slots of a target model, for a draft model that has KV buffers of its own."""

    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator
    # The draft's own buffers, where they were made beforehand: its layer of a pool of several.
    kv_pool: KVCache | None = None


def resolve_kv_dtype(name: str, model_dtype: str) -> torch.dtype:
    """The KV pool's type by the name of `--kv-cache-dtype`; "auto" is the model's."""
    resolved: torch.dtype = getattr(
        torch, _KV_DTYPES.get(name, name) if name != "auto" else model_dtype
    )
    return resolved


class ModelRunner:
    """One model on one device. `forward` and `sample` are collective over the TP ranks."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: RunnerConfig,
        shared_pool: SharedMemoryPool | None = None,
        after_load: Callable[[LanguageModel], None] | None = None,
    ) -> None:
        """`shared_pool`: this is a draft; only its KV buffers are its own.

        `after_load` gets the model before anything reads its parameters.
        """
        self.model_config = model_config
        self.config = config
        platform = current_platform()
        self.device = platform.device
        self.dtype = getattr(torch, model_config.dtype)
        self.tp = get_tp_group()
        torch.manual_seed(config.random_seed)

        self.graph_bytes = 0
        self.prefill_graph_bytes = 0  # of these
        self.num_state_snapshots = 0
        start = time.perf_counter()
        self.model = self._load(after_load)
        self.load_time_s = time.perf_counter() - start
        self.weight_bytes = sum(p.nbytes for p in self.model.parameters())
        logger.info(
            "Loaded %s in %.2f s: %.2f GB of weights",
            model_config.architectures[0],
            self.load_time_s,
            self.weight_bytes / 1e9,
        )
        # Latent KV is the same on every rank: caches of any number of ranks may share it.
        portable = model_config.mla is not None
        self.fingerprint = WeightsFingerprint(self.tp.cpu_group, portable=portable)
        self.fingerprint.full(self.model)
        self.kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, model_config.dtype)
        # Rows of layers with a window; None: they have slots as all others.
        self.num_window_tokens: int | None = None
        if shared_pool is None:
            self._init_memory_pools()
        else:
            self._share_memory_pools(shared_pool)
        self.attn_backend = self._make_attention_backend()
        # int64 [rows of the request table]: the token that each request sampled last, which is the
        # input of its next decode step; so decode never waits for the host.
        self.last_token_ids = torch.zeros(
            self.req_to_token_pool.num_rows, dtype=torch.int64, device=self.device
        )
        self.sampler = Sampler()
        self.decode_runner = self._make_decode_runner() if config.use_decode_runner else None
        self.prefill_runner: PrefillGraphRunner | None = None  # by `capture_prefill`
        if config.use_decode_runner:
            graphs = self.decode_runner
            memory = graphs.memory if isinstance(graphs, CudaGraphRunner) else None
            self.capture_prefill(CaptureHiddenMode.NULL, memory)
        self.warm_up_s = 0.0
        if config.warm_up_tokens > 0 and platform.graph_capture_supported:
            start = time.perf_counter()
            warm_up_prefill(self, config.warm_up_tokens, show_progress=self.tp.rank == 0)
            self.warm_up_s = time.perf_counter() - start

    def _load(self, after_load: Callable[[LanguageModel], None] | None) -> LanguageModel:
        free = current_platform().memory_info().free_bytes
        logger.info("Loading %s: %.2f GB are free", self.model_config.architectures[0], free / 1e9)
        model = load_model(self.model_config, self.config.load_format, self.device)
        if after_load is not None:
            after_load(model)
        if self.config.memory_saver is not None:
            self.config.memory_saver.adopt_weights(model, self.config.keep_released_weights)
        return model

    def _make_attention_backend(self) -> AttentionBackend:
        config, model = self.config, self.model_config
        facts = RunnerFacts(
            device=current_platform().name,
            dtype=self.dtype,
            num_heads=model.get_num_attention_heads(self.tp.size),
            num_kv_heads=model.get_num_kv_heads(self.tp.size),
            head_dim=model.kv_key_dim,
            v_head_dim=model.kv_value_dim if model.mla is not None else None,
            page_size=config.page_size,
            max_context_len=model.context_len,
            max_running_requests=self.max_running_requests,
            kv_dtype=self.kv_dtype,
        )
        return create_attention_backend(config.attention_backend, facts)

    @property
    def weights_fingerprint(self) -> str:
        """32 hex digits: the content of the weights of all ranks."""
        return self.fingerprint.digest()

    def _make_decode_runner(self) -> DecodeRunner | None:
        """The shortcut for decode steps that this platform and model have, if any."""
        config = self.config
        if current_platform().graph_capture_supported:
            return None if config.disable_cuda_graph else self._capture_graphs()
        reason = why_not_supported(self.model, self.tp.size)
        pool = self.token_to_kv_pool
        if (
            reason is None
            and isinstance(self.model, LlamaForCausalLM)
            and isinstance(pool, MHATokenToKVPool)
        ):
            return CpuDecodeRunner(
                self.model,
                weight_format=config.cpu_weight_format,
                req_to_token_pool=self.req_to_token_pool,
                token_to_kv_pool=pool,
            )
        if config.cpu_weight_format not in ("auto", "fp32"):
            raise ValueError(
                f"--cpu-weight-format {config.cpu_weight_format} cannot be used here: {reason}"
            )
        logger.info("Decode steps run module by module: %s", reason)
        return None

    def _capture_graphs(self) -> CudaGraphRunner:
        config = self.config
        limit = config.cuda_graph_max_bs or max(config.cuda_graph_bs or [DEFAULT_GRAPH_MAX_BS])
        sizes = capture_batch_sizes(min(limit, self.max_running_requests), config.cuda_graph_bs)
        before = current_platform().held_bytes()
        graphs = CudaGraphRunner(
            self,
            sizes,
            show_progress=self.tp.rank == 0,
            pad=not config.disable_cuda_graph_padding,
        )
        self.graph_bytes = max(current_platform().held_bytes() - before, 0)
        return graphs

    def capture_prefill(
        self, hidden_mode: CaptureHiddenMode, memory: GraphMemory | None = None
    ) -> None:
        """Capture prefill steps where that is wanted and possible. Collective.

        `hidden_mode`: the states that they keep for a draft model, which must know by now which
        layers it reads. `memory`: that of other graphs, to be used again.
        """
        counts = list(self.config.prefill_graph_tokens)
        platform = current_platform()
        if not counts or not platform.graph_capture_supported:
            return
        reason = why_not_captured(self)
        if reason is not None:
            logger.info("Prefill steps of this model are not captured: %s", reason)
            return
        before = platform.held_bytes()
        self.prefill_runner = PrefillGraphRunner(
            self,
            counts,
            hidden_mode=hidden_mode,
            pad=not self.config.disable_cuda_graph_padding,
            show_progress=self.tp.rank == 0,
            memory=memory,
        )
        self.prefill_graph_bytes = max(platform.held_bytes() - before, 0)
        self.graph_bytes += self.prefill_graph_bytes

    def _init_memory_pools(self) -> None:
        config, model = self.config, self.model_config
        platform = current_platform()
        memory = platform.memory_info()
        window_ratio = None if config.disable_hybrid_swa_memory else config.swa_full_tokens_ratio
        token_bytes = kv_bytes_per_token(model, self.tp.size, self.kv_dtype, window_ratio)
        state_bytes = bytes_per_state(model, self.tp.size)
        states = self._count_states(memory, state_bytes) if state_bytes else None
        self.num_state_snapshots = states.num_snapshots if states is not None else 0
        local = profile_max_num_tokens(
            MemoryBudget(
                device=platform.name,
                total_bytes=memory.total_bytes,
                free_bytes=self._free_bytes_a_rank(memory)
                - (states.num_bytes(state_bytes) if states is not None else 0),
                bytes_per_token=token_bytes + config.draft_token_bytes,
                context_len=model.context_len,
                page_size=config.page_size,
                mem_fraction_static=config.mem_fraction_static,
                max_total_tokens=config.max_total_tokens,
            )
        )
        # Ranks must agree on the size of the pool, or they would schedule differently.
        agreed = all_reduce_min(torch.tensor([local], dtype=torch.int64), self.tp.cpu_group)
        self.max_total_num_tokens = int(agreed[0])
        self.max_running_requests = resolve_max_running_requests(
            states.max_running if states is not None else config.max_running_requests,
            device=platform.name,
            max_num_tokens=self.max_total_num_tokens,
            page_size=config.page_size,
        )
        # One more column than the context: the slot of a token past the end is never read.
        self.req_to_token_pool = ReqToTokenPool(
            self.max_running_requests, model.context_len + 1 + config.draft_positions, self.device
        )
        self.num_window_tokens = self._count_window_rows(window_ratio)
        self.token_to_kv_pool = self._make_kv_pool()
        self.token_to_kv_pool_allocator: BaseTokenToKVPoolAllocator = make_slot_allocator(
            self.token_to_kv_pool
        )
        self.kv_cache_bytes = sum(self.token_to_kv_pool.get_kv_size_bytes())
        if isinstance(self.token_to_kv_pool, HybridLinearKVPool):
            self.kv_cache_bytes += self.token_to_kv_pool.mamba_pool.get_state_size_bytes()
        logger.info(
            "KV cache: %d tokens of %d bytes (%.2f GB, %s), %d request rows, page size %d",
            self.max_total_num_tokens,
            token_bytes,
            self.kv_cache_bytes / 1e9,
            self.kv_dtype,
            self.max_running_requests,
            config.page_size,
        )

    def _count_window_rows(self, ratio: float | None) -> int | None:
        """Rows of layers with a window; None where they have slots as all others."""
        window = self.model_config.mixed_window
        if window is None or ratio is None:
            return None
        num_rows = num_window_tokens(
            self.max_total_num_tokens,
            ratio=ratio,
            window=window,
            page_size=self.config.page_size,
            step_slots=1 + self.config.draft_positions,
        )
        logger.info("%d window rows of %d tokens", num_rows, window)
        return num_rows

    def _free_bytes_a_rank(self, memory: MemoryInfo) -> int:
        """What this rank may use for its caches: on a CPU all ranks share the memory."""
        free = memory.free_bytes - self.config.draft_weight_bytes
        return free // (self.tp.size if current_platform().name == "cpu" else 1)

    def _count_states(self, memory: MemoryInfo, state_bytes: int) -> StateCounts:
        """How many recurrent states there are, the same on every rank. Collective."""
        config = self.config
        budget = StateBudget(
            device=current_platform().name,
            total_bytes=memory.total_bytes,
            free_bytes=self._free_bytes_a_rank(memory),
            bytes_per_state=state_bytes,
            mem_fraction_static=config.mem_fraction_static,
            ratio=config.mamba_full_memory_ratio,
            max_states=config.max_mamba_cache_size,
            max_running_requests=config.max_running_requests,
            keep_snapshots=config.keep_state_snapshots,
        )
        local = torch.tensor([num_states_that_fit(budget)], dtype=torch.int64)
        counts = divide_states(budget, int(all_reduce_min(local, self.tp.cpu_group)[0]))
        logger.info(
            "Recurrent states of %d bytes: %d of running requests, %d snapshots",
            state_bytes,
            counts.max_running,
            counts.num_snapshots,
        )
        return counts

    def _share_memory_pools(self, shared: SharedMemoryPool) -> None:
        """Rows and slots of the target; buffers for as many tokens as it has."""
        self.req_to_token_pool = shared.req_to_token_pool
        self.token_to_kv_pool_allocator = shared.token_to_kv_pool_allocator
        self.max_running_requests = shared.req_to_token_pool.size
        self.max_total_num_tokens = shared.token_to_kv_pool_allocator.size
        self.token_to_kv_pool = shared.kv_pool or self._make_kv_pool()
        self.kv_cache_bytes = sum(self.token_to_kv_pool.get_kv_size_bytes())
        logger.info(
            "Draft KV cache: %d tokens (%.2f GB, %s)",
            self.max_total_num_tokens,
            self.kv_cache_bytes / 1e9,
            self.kv_dtype,
        )

    def _make_kv_pool(self) -> KVCache:
        saver = self.config.memory_saver
        shape = KVPoolShape(
            num_tokens=self.max_total_num_tokens,
            page_size=self.config.page_size,
            dtype=self.kv_dtype,
            tp_size=self.tp.size,
            num_snapshots=self.num_state_snapshots,
            num_rows=self.req_to_token_pool.num_rows,
            num_window_tokens=self.num_window_tokens,
        )
        allocate = saver.kv_allocator() if saver is not None else None
        return make_kv_pool(self.model_config, shape, self.device, allocate)

    def stage_decode(self, step: np.ndarray) -> StagedStep | None:
        """Hand the inputs of a plain decode step to the shortcut; see `DecodeRunner.stage`."""
        return None if self.decode_runner is None else self.decode_runner.stage(step)

    def stage_prefill(
        self, step: PrefillStep, hidden_mode: CaptureHiddenMode
    ) -> StagedPrefill | None:
        """Hand the inputs of a prefill step to the graphs; see `PrefillGraphRunner.stage`."""
        runner = self.prefill_runner
        return None if runner is None else runner.stage(step, hidden_mode)

    def forward(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        """Run the model on one batch, in inference mode as all steps. Collective."""
        output = self._run_model(forward_batch)
        plan = forward_batch.state_plan
        if plan is not None and forward_batch.forward_mode.is_decode():
            # A prefill step keeps states on its way.
            keep_states(forward_batch, plan)
        return output

    def _run_model(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        for shortcut in (self.decode_runner, self.prefill_runner):
            if shortcut is not None and shortcut.can_run(forward_batch):
                return shortcut.run(forward_batch)
        self.attn_backend.init_forward_metadata(forward_batch)
        with use_attention_backend(self.attn_backend):
            return self.model(forward_batch.input_ids, forward_batch.positions, forward_batch)

    def sample(
        self, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Choose the next token of every request: int64 [b]. Fills the output logprobs."""
        info = forward_batch.sampling_info
        if info is None:
            raise RuntimeError("the batch has no sampling info")
        positions = forward_batch.seq_lens
        return self.sampler.forward(logits_output, info, forward_batch.logprobs, positions)

    def nan_rows(self, logits_output: LogitsProcessorOutput) -> torch.Tensor:
        """[b], not 0 or false: requests whose logits hold NaN, which ends them."""
        if logits_output.unusable_rows is not None:
            return logits_output.unusable_rows
        return nan_rows(logits_output.next_token_logits)

    def memory_usage(self) -> dict[str, float]:
        """GB of weights, KV cache and graphs, and the pool's tokens."""
        return {
            "weight": round(self.weight_bytes / 1e9, 3),
            "kv_cache": round(self.kv_cache_bytes / 1e9, 3),
            "graph": round(self.graph_bytes / 1e9, 3),
            "prefill_graph": round(self.prefill_graph_bytes / 1e9, 3),
            "token_capacity": self.max_total_num_tokens,
        }
