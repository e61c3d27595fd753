"""The scheduler process: from `ServerArgs` to a running `Scheduler`.

Builds the parts, reports READY over the start-up pipe, runs the event loop and says why it ended.
The process's main thread is the scheduler thread.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from sglang.srt.configs.kv_events_config import KVEventsConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.served_tokenizer import load_tokenizer, load_tokenizer_json
from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarBackend,
    create_grammar_backend,
)
from sglang.srt.distributed.parallel_state import get_tp_group, init_distributed
from sglang.srt.environ import envs
from sglang.srt.managers.batch_result_processor import BatchResultProcessor
from sglang.srt.managers.finish_check import DecodeTail
from sglang.srt.managers.grammar_manager import GrammarManager
from sglang.srt.managers.hicache_control import HiCacheControl
from sglang.srt.managers.hicache_setup import HiCacheSettings, build_hicache
from sglang.srt.managers.invariant_checker import InvariantChecker
from sglang.srt.managers.io_struct import (
    BatchStrOutput,
    BatchTokenIDOutput,
    ControlReqOutput,
    SchedulerReady,
)
from sglang.srt.managers.ipc import PullChannel, PushChannel
from sglang.srt.managers.kv_event_publisher import KVEventPublisher
from sglang.srt.managers.output_streamer import OutputStreamer
from sglang.srt.managers.request_receiver import RequestReceiver
from sglang.srt.managers.schedule_policy import NewTokenRatio, PrefillLimits, SchedulePolicy
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_parts import SchedulerConfig, SchedulerParts
from sglang.srt.managers.scheduler_profiler import SchedulerProfiler
from sglang.srt.managers.scheduler_reports import PREFILL_MODE, ReportFacts, SchedulerReports
from sglang.srt.managers.spec_setup import key_lookahead, kv_dtype, spec_settings
from sglang.srt.managers.tp_worker import BatchWorker, TpModelWorker
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.cache_metrics import MetricsHook, ignore_metric
from sglang.srt.mem_cache.hicache_records import HiCacheParams
from sglang.srt.mem_cache.host_pool_sizing import HostPoolLimits
from sglang.srt.mem_cache.registry import CacheInitParams, create_tree_cache
from sglang.srt.mem_cache.state_snapshots import StateSnapshots
from sglang.srt.mem_cache.storage.backend_factory import check_storage_options
from sglang.srt.mem_cache.storage_control import group_min_reduce
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.memory_saver import MemorySaver
from sglang.srt.model_executor.model_runner import ModelRunner, RunnerConfig, kv_bytes_per_token
from sglang.srt.model_executor.prefill_graph_runner import capture_token_counts
from sglang.srt.model_executor.weight_groups import UpdateTimeouts
from sglang.srt.model_executor.weight_updater import WeightUpdater
from sglang.srt.observability.metrics import (
    SchedulerConstants,
    SchedulerLabels,
    SchedulerMetrics,
    parse_extra_labels,
)
from sglang.srt.platforms import current_platform, init_platform
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.speculative.draft_runner import draft_kv
from sglang.srt.speculative.eagle_worker import DraftModelWorker
from sglang.srt.speculative.worker_factory import (
    DraftPlan,
    SpecSettings,
    create_draft_worker,
    draft_positions,
    plan_draft,
)
from sglang.srt.utils.liveness import LivenessCounter
from sglang.srt.utils.wakeup import Wakeup

logger = logging.getLogger(__name__)


def run_scheduler_process(
    server_args: ServerArgs,
    port_args: PortArgs,
    tp_rank: int,
    dp_rank: int,
    pipe_writer: Connection,
) -> None:
    """Entry of a scheduler process. Sends `SchedulerReady` on `pipe_writer`, then serves.

    Any exception leaves through the caller (the launcher's wrapper reports it and exits non-zero).
    """
    start = time.perf_counter()
    scheduler, ready = make_scheduler(server_args, port_args, tp_rank, dp_rank)
    ready.load_time_s = scheduler.reports.startup_s = time.perf_counter() - start
    # What is there now stays: collections under load, and those that flushes ask for, would walk
    # all of torch's objects each time (0.1 s).
    scheduler.reports.freeze_gc()
    pipe_writer.send(ready)
    pipe_writer.close()
    scheduler.run()
    scheduler.tree_cache.shutdown()
    if scheduler.kv_events is not None:
        scheduler.kv_events.close()
    logger.info("Scheduler stopped")


def make_scheduler(
    server_args: ServerArgs, port_args: PortArgs, tp_rank: int, dp_rank: int
) -> tuple[Scheduler, SchedulerReady]:
    """Load the model and build the scheduler that the settings ask for. Collective over TP ranks.

    Also makes this process's platform and tensor-parallel group.
    """
    _check_storage(server_args)
    kv_events = _open_kv_events(server_args, tp_rank, dp_rank)
    platform = init_platform(server_args.device, _device_index(server_args, tp_rank, dp_rank))
    platform.configure_process(server_args.num_threads)
    tp_size = server_args.tp_size
    init_method = f"tcp://{port_args.dist_init_addrs[dp_rank]}" if tp_size > 1 else ""
    init_distributed(tp_size, tp_rank, init_method, backend=platform.collective_backend)

    model_config = ModelConfig.from_path(server_args.model_path, **server_args.model_options())
    spec = spec_settings(server_args)
    plan = plan_draft(spec, model_config, kv_dtype(server_args, model_config)) if spec else None
    config = _runner_config(server_args, model_config, spec, plan)
    runner = ModelRunner(model_config, config)
    target_worker = TpModelWorker(runner)
    draft_worker = create_draft_worker(spec, plan, target_worker, config) if spec else None
    setup = RankSetup(
        server_args=server_args,
        port_args=port_args,
        target_worker=target_worker,
        draft_worker=draft_worker,
        ready=_ready_message(model_config, runner, draft_worker),
        tp_rank=tp_rank,
        dp_rank=dp_rank,
        kv_events=kv_events,
    )
    setup.ready.kv_events = kv_events.endpoints if kv_events is not None else None
    return build_scheduler(setup), setup.ready


def _check_storage(server_args: ServerArgs) -> None:
    """Raise ValueError for storage options that cannot be right, before the weights are read."""
    backend = server_args.hicache_storage_backend
    if not server_args.enable_hierarchical_cache or backend is None:
        return
    try:
        check_storage_options(backend, server_args.hicache_storage_backend_extra_config)
    except ValueError as error:
        raise ValueError(f"--hicache-storage-backend {backend}: {error}") from error


def _open_kv_events(server_args: ServerArgs, tp_rank: int, dp_rank: int) -> KVEventPublisher | None:
    """The publisher of a replica's events, on its first rank. Raises ValueError."""
    text = server_args.kv_events_config
    config = KVEventsConfig.from_cli(text) if text is not None and tp_rank == 0 else None
    if config is None or not config.is_enabled:
        return None
    return KVEventPublisher(config, host=server_args.host, dp_rank=dp_rank)


def _device_index(server_args: ServerArgs, tp_rank: int, dp_rank: int) -> int:
    return server_args.gpu_id(tp_rank, dp_rank) if server_args.device == "cuda" else 0


def _runner_config(
    server_args: ServerArgs,
    model_config: ModelConfig,
    spec: SpecSettings | None,
    plan: DraftPlan | None,
) -> RunnerConfig:
    if server_args.page_size is None or server_args.attention_backend is None:
        raise ValueError("page_size and attention_backend must be resolved before the launch")
    if server_args.random_seed is None:
        raise ValueError("random_seed must be resolved before the launch: ranks must share it")
    return RunnerConfig(
        load_format=server_args.load_format,
        attention_backend=server_args.attention_backend,
        page_size=server_args.page_size,
        mem_fraction_static=server_args.mem_fraction_static,
        max_total_tokens=server_args.max_total_tokens,
        max_running_requests=server_args.max_running_requests,
        kv_cache_dtype=server_args.kv_cache_dtype,
        random_seed=server_args.random_seed,
        cpu_weight_format=server_args.cpu_weight_format,
        disable_cuda_graph=server_args.disable_cuda_graph or server_args.disable_decode_cuda_graph,
        cuda_graph_max_bs=server_args.cuda_graph_max_bs_decode,
        cuda_graph_bs=server_args.cuda_graph_bs_decode,
        disable_cuda_graph_padding=server_args.disable_cuda_graph_padding,
        prefill_graph_tokens=_prefill_graph_tokens(server_args, model_config),
        warm_up_tokens=_warm_up_tokens(server_args, model_config),
        # The target of a draft model takes no plain decode step, but for NGRAM's.
        use_decode_runner=plan is None,
        draft_token_bytes=plan.token_bytes if plan is not None else 0,
        draft_weight_bytes=plan.weight_bytes if plan is not None else 0,
        draft_positions=draft_positions(spec) if spec is not None else 0,
        swa_full_tokens_ratio=server_args.swa_full_tokens_ratio,
        disable_hybrid_swa_memory=server_args.disable_hybrid_swa_memory,
        mamba_full_memory_ratio=server_args.mamba_full_memory_ratio,
        max_mamba_cache_size=server_args.max_mamba_cache_size,
        keep_state_snapshots=not server_args.disable_radix_cache,
        memory_saver=MemorySaver(server_args.enable_memory_saver),
        keep_released_weights=server_args.enable_weights_cpu_backup,
        keep_released_draft_weights=server_args.enable_draft_weights_cpu_backup,
    )


def _prefill_graph_tokens(server_args: ServerArgs, model_config: ModelConfig) -> tuple[int, ...]:
    """Token counts of captured prefill steps."""
    if server_args.disable_cuda_graph or server_args.disable_prefill_cuda_graph:
        return ()
    requested = server_args.cuda_graph_bs_prefill
    limit = server_args.cuda_graph_max_bs_prefill
    if limit is None:
        limit = max(requested or [0])
    # The tokens that pad a step are a request of their own.
    limit = min(limit, model_config.context_len)
    chunk = server_args.chunked_prefill_size
    if chunk is not None and chunk > 0:
        limit = min(limit, chunk)  # of all requests of a step together
    return tuple(capture_token_counts(limit, requested))


def _warm_up_tokens(server_args: ServerArgs, model_config: ModelConfig) -> int:
    """The longest prefill step of one request."""
    if server_args.skip_server_warmup:
        return 0
    chunk = server_args.chunked_prefill_size
    longest = chunk if chunk is not None and chunk > 0 else server_args.max_prefill_tokens
    return min(longest, model_config.context_len)


def _ready_message(
    model_config: ModelConfig, runner: ModelRunner, draft_worker: BaseSpecWorker | None
) -> SchedulerReady:
    drafts = draft_worker.draft_runner_list if isinstance(draft_worker, DraftModelWorker) else ()
    return SchedulerReady(
        max_total_num_tokens=runner.max_total_num_tokens,
        # One slot at least must be left for the first output token.
        max_req_input_len=min(model_config.context_len, runner.max_total_num_tokens) - 1,
        context_len=model_config.context_len,
        vocab_size=model_config.vocab_size,
        eos_token_ids=sorted(model_config.hf_eos_token_id),
        page_size=runner.config.page_size,
        max_running_requests=runner.max_running_requests,
        memory_usage=runner.memory_usage(),
        resolved_args={
            "dtype": model_config.dtype,
            "max_running_requests": runner.max_running_requests,
            "max_total_tokens": runner.max_total_num_tokens,
            "context_length": model_config.context_len,
            "model_type": model_config.model_type,
            "architectures": list(model_config.architectures),
            # Models that draft: one, or one for each step.
            "num_draft_runners": len(drafts),
        },
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankSetup:
    """What the parts of one rank's scheduler are made from: settings, loaded models, its place."""

    server_args: ServerArgs
    port_args: PortArgs
    target_worker: TpModelWorker
    draft_worker: BaseSpecWorker | None
    ready: SchedulerReady
    tp_rank: int
    dp_rank: int
    kv_events: KVEventPublisher | None = None

    @property
    def worker(self) -> BatchWorker:
        """The one that takes the steps."""
        return self.draft_worker or self.target_worker

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is the rank that reads from and sends to other processes."""
        return self.tp_rank == 0


def build_scheduler(setup: RankSetup) -> Scheduler:
    """Wire one rank's scheduler. Collective over TP ranks where there are tiers."""
    server_args = setup.server_args
    rows, allocator = setup.worker.get_memory_pool()
    metrics = _make_metrics(setup)
    weight_updater = _make_weight_updater(setup)
    wakeup = Wakeup()
    hicache = _make_hicache(setup, wakeup)
    count = metrics.count_cache if metrics is not None else ignore_metric
    tree_cache = _make_tree_cache(setup, hicache, weight_updater.kv_fingerprint(), count)
    channels = _open_channels(setup)
    streamer = OutputStreamer(channels.send_output, dp_rank=setup.dp_rank)
    cpu_group = get_tp_group().cpu_group
    results = BatchResultProcessor(
        tree_cache=tree_cache,
        req_to_token_pool=rows,
        streamer=streamer,
        decode_tail=_make_decode_tail(server_args),
        min_reduce=group_min_reduce(cpu_group) if cpu_group is not None else None,
    )
    new_token_ratio = NewTokenRatio(server_args.schedule_conservativeness)
    parts = SchedulerParts(
        receiver=RequestReceiver(channels.receiver, cpu_group, wakeup),
        worker=setup.worker,
        draft_worker=setup.draft_worker,
        tree_cache=tree_cache,
        policy=_make_policy(server_args, tree_cache),
        grammar_manager=GrammarManager(_make_grammar_backend(setup)),
        result_processor=results,
        streamer=streamer,
        reports=SchedulerReports(
            _report_facts(setup),
            tree_cache=tree_cache,
            allocator=allocator,
            results=results,
            metrics=metrics,
            new_token_ratio=new_token_ratio,
            count_replays=lambda: _count_replays(setup),
        ),
        profiler=SchedulerProfiler(setup.tp_rank, setup.dp_rank),
        new_token_ratio=new_token_ratio,
        checker=_make_checker(setup, tree_cache),
        hicache_control=_make_hicache_control(server_args, tree_cache),
        send_to_front=channels.send_control,
        beat=_make_liveness(setup).increment,
        weight_updater=weight_updater,
        kv_events=setup.kv_events,
        memory_saver=setup.target_worker.model_runner.config.memory_saver or MemorySaver(),
    )
    return Scheduler(_scheduler_config(setup), parts)


def _no_front(reply: ControlReqOutput) -> None:
    raise RuntimeError("only rank 0 replies to the front")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Channels:
    """The ways from and to other processes; by default those of a rank that has none."""

    receiver: PullChannel | None = None
    send_output: Callable[[BatchTokenIDOutput], None] | None = None
    send_control: Callable[[ControlReqOutput], None] = _no_front


def _open_channels(setup: RankSetup) -> _Channels:
    if not setup.is_rank_zero:
        return _Channels()
    ports = setup.port_args
    front = PushChannel(ports.tokenizer_ipc_name)
    return _Channels(
        receiver=PullChannel(ports.scheduler_input_ipc_names[setup.dp_rank]),
        send_output=_without_text(front)
        if setup.server_args.skip_tokenizer_init
        else PushChannel(ports.detokenizer_ipc_name).send,
        send_control=front.send,
    )


def _without_text(front: PushChannel) -> Callable[[BatchTokenIDOutput], None]:
    """Outputs go to the front at once where nobody would make text of them."""

    def send(batch: BatchTokenIDOutput) -> None:
        front.send(BatchStrOutput(outputs=batch.outputs, dp_rank=batch.dp_rank))

    return send


def _make_liveness(setup: RankSetup) -> LivenessCounter:
    index = setup.dp_rank * setup.server_args.tp_size + setup.tp_rank
    return LivenessCounter(setup.port_args.liveness_path, index)


def _make_tree_cache(
    setup: RankSetup,
    hicache: HiCacheParams | None,
    weights_fingerprint: str,
    metrics: MetricsHook,
) -> BasePrefixCache:
    """The prefix cache over the worker's pools, and over the tiers behind them."""
    server_args, worker = setup.server_args, setup.worker
    rows, allocator = worker.get_memory_pool()
    states = _make_state_snapshots(server_args, setup.target_worker.model_runner)
    tree_cache = create_tree_cache(
        CacheInitParams(
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=setup.ready.page_size,
            disable=server_args.disable_radix_cache,
            eviction_policy=server_args.radix_eviction_policy,
            lookahead=key_lookahead(server_args),
            weights_fingerprint=weights_fingerprint,
            hicache=hicache,
            enable_kv_cache_events=setup.kv_events is not None,
            metrics=metrics,
            state_allocator=states.allocator if states is not None else None,
            capture_state=states.capture if states is not None else None,
            state_snapshots=states,
        )
    )
    if hicache is not None:
        worker.register_hicache_layer_transfer_counter(hicache.controller.layer_done_counter)
    return tree_cache


def _make_checker(setup: RankSetup, tree_cache: BasePrefixCache) -> InvariantChecker:
    rows, allocator = setup.worker.get_memory_pool()
    return InvariantChecker(
        tree_cache=tree_cache, req_to_token_pool=rows, token_to_kv_pool_allocator=allocator
    )


def _make_policy(server_args: ServerArgs, tree_cache: BasePrefixCache) -> SchedulePolicy:
    return SchedulePolicy(
        server_args.schedule_policy,
        tree_cache,
        enable_priority=server_args.enable_priority_scheduling,
        seed=server_args.random_seed or 0,
    )


def _make_weight_updater(setup: RankSetup) -> WeightUpdater:
    server_args, draft = setup.server_args, setup.draft_worker
    drafts = draft.draft_runner_list if isinstance(draft, DraftModelWorker) else ()
    return WeightUpdater(
        setup.target_worker.model_runner,
        drafts,
        model_path=server_args.model_path,
        load_format=server_args.load_format,
        custom_weight_loaders=server_args.custom_weight_loader,
        timeouts=UpdateTimeouts(
            join_s=envs.SGLANG_WEIGHT_GROUP_JOIN_TIMEOUT.get(),
            receive_s=envs.SGLANG_WEIGHT_RECEIVE_TIMEOUT.get(),
        ),
    )


def _make_state_snapshots(server_args: ServerArgs, runner: ModelRunner) -> StateSnapshots | None:
    """Slots of recurrent states for the prefix cache; None where there are none."""
    if runner.num_state_snapshots == 0:
        return None
    # Only whole pages are cached, so a state within one is of no use.
    page = runner.config.page_size
    interval = -(-server_args.mamba_track_interval // page) * page
    return StateSnapshots(runner.num_state_snapshots, interval)


def _make_hicache(setup: RankSetup, wakeup: Wakeup) -> HiCacheParams | None:
    """The tiers behind the device, without storage; None where they are not wanted."""
    server_args = setup.server_args
    if not server_args.enable_hierarchical_cache:
        return None
    runner = setup.target_worker.model_runner
    draft_bytes = 0
    if isinstance(setup.draft_worker, DraftModelWorker):
        pool, config = draft_kv(setup.draft_worker.draft_runner_list)
        draft_bytes = kv_bytes_per_token(config, server_args.tp_size, pool.dtype)
    return build_hicache(
        HiCacheSettings(
            limits=HostPoolLimits(
                size_gb=server_args.hicache_size,
                ratio=server_args.hicache_ratio,
                memory_fraction=server_args.hicache_host_memory_fraction,
                local_ranks=max(1, server_args.tp_size * server_args.dp_size // server_args.nnodes),
            ),
            layout=server_args.hicache_mem_layout,
            io_backend=server_args.hicache_io_backend,
            write_policy=server_args.hicache_write_policy,
            prefetch_policy=server_args.hicache_storage_prefetch_policy,
            draft_storage_policy=server_args.hicache_draft_storage_policy,
            served_model_name=server_args.served_model_name or server_args.model_path,
        ),
        device_pool=runner.token_to_kv_pool,
        allocator=runner.token_to_kv_pool_allocator,
        model_config=runner.model_config,
        weights_fingerprint=runner.weights_fingerprint,
        draft_token_bytes=draft_bytes,
        on_progress=wakeup.set,
    )


def _make_hicache_control(
    server_args: ServerArgs, tree_cache: BasePrefixCache
) -> HiCacheControl | None:
    if not server_args.enable_hierarchical_cache:
        return None
    return HiCacheControl(
        tree_cache,
        served_model_name=server_args.served_model_name or server_args.model_path,
        storage_backend=server_args.hicache_storage_backend,
        extra_config=server_args.hicache_storage_backend_extra_config,
        prefetch_policy=server_args.hicache_storage_prefetch_policy,
        write_policy=server_args.hicache_write_policy,
    )


def _scheduler_config(setup: RankSetup) -> SchedulerConfig:
    server_args, ready = setup.server_args, setup.ready
    chunk = server_args.chunked_prefill_size
    return SchedulerConfig(
        limits=PrefillLimits(
            max_prefill_tokens=server_args.max_prefill_tokens,
            chunk_size=chunk if chunk is not None and chunk > 0 else None,
            page_size=ready.page_size,
            step_slots=setup.worker.step_shape.num_slots,
        ),
        max_running_requests=ready.max_running_requests,
        max_queued_requests=server_args.max_queued_requests,
        enable_priority=server_args.enable_priority_scheduling,
        context_len=ready.context_len,
        vocab_size=ready.vocab_size,
        eos_token_ids=frozenset(ready.eos_token_ids),
        weight_version=server_args.weight_version,
        stream_interval=server_args.stream_interval,
        dp_rank=setup.dp_rank,
        is_rank_zero=setup.is_rank_zero,
        enable_overlap=not server_args.disable_overlap_schedule,
        isolate_weights=not server_args.disable_weight_version_kv_isolation,
    )


def _make_decode_tail(server_args: ServerArgs) -> DecodeTail | None:
    tokenizer = load_tokenizer(server_args)
    return tokenizer.decode_tail if tokenizer is not None else None


def _make_grammar_backend(setup: RankSetup) -> BaseGrammarBackend | None:
    server_args = setup.server_args
    if server_args.skip_tokenizer_init:
        return None
    return create_grammar_backend(
        server_args.grammar_backend or "none",
        load_tokenizer_json(server_args),
        setup.ready.vocab_size,
        setup.ready.eos_token_ids,
    )


def _make_metrics(setup: RankSetup) -> SchedulerMetrics | None:
    """Metrics of this rank; None where it does not report any."""
    server_args, ready = setup.server_args, setup.ready
    reports = setup.is_rank_zero or server_args.enable_metrics_for_all_schedulers
    if not (server_args.enable_metrics and reports):
        return None
    metrics = SchedulerMetrics(
        SchedulerLabels(
            model_name=server_args.served_model_name or server_args.model_path,
            tp_rank=setup.tp_rank,
            dp_rank=setup.dp_rank if server_args.dp_size > 1 else None,
            extra=parse_extra_labels(server_args.extra_metric_labels),
        )
    )
    metrics.set_constants(
        SchedulerConstants(
            max_total_num_tokens=ready.max_total_num_tokens,
            page_size=ready.page_size,
            num_pages=ready.max_total_num_tokens // ready.page_size,
            context_len=ready.context_len,
            weight_memory_usage_gb=ready.memory_usage["weight"],
            kv_cache_memory_usage_gb=ready.memory_usage["kv_cache"],
            spec_num_steps=server_args.speculative_num_steps or 0,
            spec_num_draft_tokens=server_args.speculative_num_draft_tokens or 0,
            startup_available_gpu_memory_gb=current_platform().memory_info().free_bytes / 1e9,
        )
    )
    prefill_gb = ready.memory_usage["prefill_graph"]
    metrics.set_graph_memory(
        {"decode": ready.memory_usage["graph"] - prefill_gb, "prefill": prefill_gb}
    )
    return metrics


def _count_replays(setup: RankSetup) -> dict[str, int]:
    """CUDA graphs that were replayed so far, by what they are of: see `SchedulerReports`."""
    runner = setup.target_worker.model_runner
    replays = {}
    if isinstance(runner.decode_runner, CudaGraphRunner):
        replays["decode"] = runner.decode_runner.num_steps
    if runner.prefill_runner is not None:
        replays[PREFILL_MODE] = runner.prefill_runner.num_steps
    graphs = setup.draft_worker.graphs if setup.draft_worker is not None else None
    if graphs is not None:
        replays |= {f"speculative_{kind.value}": n for kind, n in graphs.num_steps.items()}
    return replays


def _report_facts(setup: RankSetup) -> ReportFacts:
    server_args, ready = setup.server_args, setup.ready
    return ReportFacts(
        server_args={**dataclasses.asdict(server_args), **ready.resolved_args},
        memory_usage=ready.memory_usage,
        max_running_requests=ready.max_running_requests,
        decode_log_interval=server_args.decode_log_interval,
        dp_rank=setup.dp_rank,
        is_logging_rank=setup.is_rank_zero,
    )
