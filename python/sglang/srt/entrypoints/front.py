"""The parts of a server that live in the caller's process, once its children are ready.

`make_front` is used by the HTTP server and by programs that embed one; those call
`Engine._launch_subprocesses` with the functions below, under their documented names. Owns nothing:
the children are the launcher's, requests are the tokenizer manager's.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from sglang.srt.entrypoints import launch
from sglang.srt.entrypoints.launch import Launched, Watchdog
from sglang.srt.entrypoints.openai.template_manager import TemplateManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.observability.metrics import (
    TokenizerBuckets,
    TokenizerLabels,
    TokenizerMetrics,
    parse_extra_labels,
    parse_token_buckets,
)
from sglang.srt.server_args import PortArgs, ServerArgs


@dataclasses.dataclass(frozen=True)
class SchedulerInitResult:
    """What the schedulers said when they were ready: a dict a replica."""

    scheduler_infos: list[dict[str, Any]]


# Tokenizer manager, templates, ports, what the schedulers said, watchdog of the children. The
# first two are None on a host without HTTP.
Parts = tuple[
    TokenizerManager | None, TemplateManager | None, PortArgs, SchedulerInitResult, Watchdog
]


def make_front(
    server_args: ServerArgs, launched: Launched
) -> tuple[TokenizerManager, TemplateManager]:
    """The client of these children, told when one of them dies, and the chat templates."""
    manager, templates = init_tokenizer_manager(server_args, launched)

    def on_failure(reason: str) -> None:
        loop = manager.event_loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(manager.mark_dead, f"The engine failed: {reason}")

    launched.watchdog.add_failure_callback(on_failure)
    manager.engine_pids = [p.pid for p in launched.processes if p.pid is not None]
    if server_args.enable_metrics:
        manager.metrics = _metrics(server_args, manager)
    return manager, templates


def _metrics(server_args: ServerArgs, manager: TokenizerManager) -> TokenizerMetrics:
    labels = TokenizerLabels(
        model_name=manager.served_model_name,
        has_replicas=server_args.dp_size > 1,
        allowed_custom=server_args.tokenizer_metrics_allowed_custom_labels or (),
        extra=parse_extra_labels(server_args.extra_metric_labels),
    )
    buckets = TokenizerBuckets(
        time_to_first_token=server_args.bucket_time_to_first_token,
        inter_token_latency=server_args.bucket_inter_token_latency,
        e2e_request_latency=server_args.bucket_e2e_request_latency,
        prompt_tokens=parse_token_buckets(server_args.prompt_tokens_buckets),
        generation_tokens=parse_token_buckets(server_args.generation_tokens_buckets),
    )
    metrics = TokenizerMetrics(labels, buckets)
    metrics.set_startup("scheduler", max(info.load_time_s for info in manager.scheduler_infos))
    return metrics


def embedded_parts(server_args: ServerArgs, launched: Launched) -> Parts:
    """What `Engine._launch_subprocesses` returns."""
    infos = [{"status": "ready", **dataclasses.asdict(info)} for info in launched.scheduler_infos]
    manager: TokenizerManager | None = None
    templates: TemplateManager | None = None
    if server_args.node_rank == 0:
        manager, templates = make_front(server_args, launched)
    return manager, templates, launched.port_args, SchedulerInitResult(infos), launched.watchdog


# ------------------------------------------------------------------------------------------------
# Documented names
# ------------------------------------------------------------------------------------------------


def init_tokenizer_manager(
    server_args: ServerArgs, launched: Launched
) -> tuple[TokenizerManager, TemplateManager]:
    """The client of children that are ready, and the chat templates."""
    manager = TokenizerManager(server_args, launched.port_args, launched.scheduler_infos)
    return manager, TemplateManager(manager.tokenizer, server_args.chat_template)


def run_scheduler_process(*args: Any) -> None:
    """Body of a scheduler process. By name: a front process must not load what it runs."""
    _call(launch.SCHEDULER_TARGET, args)


def run_detokenizer_process(*args: Any) -> None:
    """Body of the detokenizer process; as `run_scheduler_process`."""
    _call(launch.DETOKENIZER_TARGET, args)


def _call(target: str, args: tuple[Any, ...]) -> None:
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(*args)
