"""Prometheus metrics of the schedulers and of the front, under the names of dashboards.

Every process writes into the directory of `utils.set_prometheus_multiproc_dir`; the HTTP process
merges the files at `/metrics`. `prometheus_client` decides at its first import whether it works
that way, so it is imported when a metrics object is made, not when this module is. Objects are
used by the thread that made them (scheduler thread, event loop).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from sglang.srt.observability.cache_metrics import CacheMetrics
from sglang.srt.observability.metric_factory import MetricFactory

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Gauge

TTFT_BUCKETS_S: tuple[float, ...] = (
    0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400,
)  # fmt: skip
E2E_BUCKETS_S: tuple[float, ...] = (*TTFT_BUCKETS_S, 600, 1200, 1800, 2400)
ITL_BUCKETS_S: tuple[float, ...] = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1,
    0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
TOKEN_BUCKETS: tuple[float, ...] = (
    100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10_000,
    12_000, 15_000, 20_000, 22_000, 25_000, 30_000, 35_000, 40_000, 66_000, 99_000, 132_000,
    300_000, 600_000, 900_000, 1_100_000,
)  # fmt: skip
QUEUE_BUCKETS_S: tuple[float, ...] = (
    0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600,
)  # fmt: skip


def parse_extra_labels(text: str | None) -> dict[str, str]:
    """`--extra-metric-labels` as label names and values; validated at start."""
    if text is None:
        return {}
    return {str(name): str(value) for name, value in json.loads(text).items()}


def parse_token_buckets(rule: Sequence[str] | None) -> list[float] | None:
    """The limits that `--prompt-tokens-buckets` or `--generation-tokens-buckets` asks for.

    `default`; `custom A B …` or just the numbers; `tse MIDDLE BASE COUNT`: the middle and COUNT
    limits at distances BASE, BASE², … on both sides. None is the default. Raises ValueError.
    """
    if not rule or list(rule) == ["default"]:
        return None
    kind, words = (rule[0], rule[1:]) if rule[0] in ("custom", "tse") else ("custom", rule)
    try:
        numbers = [float(word) for word in words]
    except ValueError as error:
        raise ValueError(f"token buckets {' '.join(rule)!r}: {error}") from error
    if kind == "tse":
        if len(numbers) != 3 or numbers[1] <= 1 or numbers[2] < 2:
            raise ValueError("token buckets: tse needs MIDDLE, BASE > 1 and COUNT >= 2")
        middle, base, count = numbers
        steps = [base**exponent for exponent in range(1, int(count) // 2 + 1)]
        numbers = [middle, *(middle - step for step in steps), *(middle + step for step in steps)]
    if not numbers:
        raise ValueError("token buckets: custom needs at least one limit")
    return sorted(set(numbers))


# ------------------------------------------------------------------------------------------------
# Scheduler
# ------------------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """What a scheduler is doing now. Every field is the gauge of the same name."""

    num_running_reqs: int = 0  # that hold slots
    num_queue_reqs: int = 0
    num_grammar_queue_reqs: int = 0
    num_retracted_reqs: int = 0  # waiting again after their KV was taken away
    num_paused_reqs: int = 0  # of the running ones: frozen by a pause
    num_used_tokens: int = 0
    token_usage: float = 0.0  # used / all KV slots
    full_token_usage: float | None = None  # None: as token_usage
    gen_throughput: float = 0.0  # tokens/s over the last log interval
    cache_hit_rate: float = 0.0  # of the last prefill batch
    kv_available_tokens: int = 0
    kv_evictable_tokens: int = 0
    kv_used_tokens: int | None = None  # None: as num_used_tokens
    decode_sum_seq_lens: int = 0  # tokens of the requests that decode
    utilization: float = 0.0  # running / most running requests
    new_token_ratio: float = 0.0
    fwd_occupancy: float = 0.0  # share of time with a forward step in flight
    is_cuda_graph: float = 0.0  # 1: the last decode steps replayed captured ones
    hicache_host_used_tokens: int = 0
    hicache_host_total_tokens: int = 0
    spec_accept_length: float = 0.0  # tokens a verification, since the last log line
    spec_accept_rate: float = 0.0  # of the drafted tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConstants:
    """Facts that are set once at start. Every field is the gauge of the same name."""

    max_total_num_tokens: int
    page_size: int
    num_pages: int
    context_len: int
    weight_memory_usage_gb: float
    kv_cache_memory_usage_gb: float
    spec_num_steps: int  # 0: no speculation, or one without fixed steps
    spec_num_draft_tokens: int
    startup_available_gpu_memory_gb: float  # of the device, weights and pools being there


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLabels:
    """Labels of one scheduler rank."""

    model_name: str
    tp_rank: int = 0
    pp_rank: int = 0
    moe_ep_rank: int = 0
    dp_rank: int | None = None  # None: no data parallelism, no such label
    engine_type: str = "unified"
    extra: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, str]:
        labels = {
            "model_name": self.model_name,
            "engine_type": self.engine_type,
            "tp_rank": str(self.tp_rank),
            "pp_rank": str(self.pp_rank),
            "moe_ep_rank": str(self.moe_ep_rank),
        }
        if self.dp_rank is not None:
            labels["dp_rank"] = str(self.dp_rank)
        labels["priority"] = ""
        return {**labels, **(self.extra or {})}


# Pool -> (its gauge of used / all, in what it is counted).
_SIDE_POOLS = {"swa": ("swa_token_usage", "tokens"), "mamba": ("mamba_usage", "states")}


class SchedulerMetrics:
    """Gauges and counters of one scheduler. Scheduler thread only."""

    def __init__(self, labels: SchedulerLabels, registry: CollectorRegistry | None = None) -> None:
        self._labels = labels.to_dict()
        self._make = MetricFactory(self._labels, registry)
        make = self._make
        self._gauges = {
            spec.name: make.gauge(spec.name, _doc(spec.name)).labels(**self._labels)
            for spec in fields(SchedulerStats)
        }
        self._side_gauges: dict[str, Gauge] = {}
        self._retracted = [
            make.counter(name, _doc(name)).labels(**self._labels)
            for name in (
                "num_retracted_requests",
                "num_retracted_input_tokens",
                "num_retracted_output_tokens",
            )
        ]
        self._realtime = make.counter("realtime_tokens", "Tokens by how they came about.", "mode")
        self._queue_time = make.histogram(
            "queue_time_seconds", "Seconds in the waiting queue.", QUEUE_BUCKETS_S
        )
        self._cache = CacheMetrics(make, self._labels)
        self._graph_passes = make.counter(
            "cuda_graph_passes", "Replays of captured steps, by what they are of.", "mode"
        )
        self._weight_load = make.gauge(
            "weight_load_duration_seconds", "Seconds of the last weight update.", "source"
        )

    def log_stats(self, stats: SchedulerStats) -> None:
        """Show the present state."""
        for name, gauge in self._gauges.items():
            value = getattr(stats, name)
            if value is None:
                source = "token_usage" if name == "full_token_usage" else "num_used_tokens"
                value = getattr(stats, source)
            gauge.set(value)

    def log_side_pool(self, name: str, *, used: int, evictable: int, total: int) -> None:
        """Show the present state of a pool beside that of full KV; only models with one have it.

        `name`: swa (rows of window layers, in tokens) or mamba (recurrent states).
        """
        share, unit = _SIDE_POOLS[name]
        values = {
            share: used / total,
            f"{name}_used_{unit}": used,
            f"{name}_evictable_{unit}": evictable,
            f"{name}_total_{unit}": total,
        }
        for gauge_name, value in values.items():
            if gauge_name not in self._side_gauges:
                gauge = self._make.gauge(gauge_name, _doc(gauge_name))
                self._side_gauges[gauge_name] = gauge.labels(**self._labels)
            self._side_gauges[gauge_name].set(value)

    def set_constants(self, constants: SchedulerConstants) -> None:
        """Show the sizes of the pools. Called once."""
        for spec in fields(constants):
            gauge = self._make.gauge(spec.name, _doc(spec.name))
            gauge.labels(**self._labels).set(getattr(constants, spec.name))

    def set_graph_memory(self, by_phase: Mapping[str, float]) -> None:
        """Show the GB that captured steps take, by phase. Called once."""
        gauge = self._make.gauge("graph_memory_usage_gb", _doc("graph_memory_usage_gb"), "phase")
        for phase, num_gb in by_phase.items():
            gauge.labels(**self._labels, phase=phase).set(num_gb)

    def count_graph_passes(self, mode: str, count: int) -> None:
        """So many captured steps, or parts of one, were replayed."""
        self._graph_passes.labels(**self._labels, mode=mode).inc(count)

    def count_prefill(self, computed_tokens: int, cached_tokens: int) -> None:
        """Prompt tokens of a prefill step: computed, and found in the cache."""
        self._realtime.labels(**self._labels, mode="prefill_compute").inc(computed_tokens)
        self._realtime.labels(**self._labels, mode="prefill_cache").inc(cached_tokens)

    def count_decode(self, tokens: int) -> None:
        """Generated tokens."""
        self._realtime.labels(**self._labels, mode="decode").inc(tokens)

    def count_retracted(self, num_reqs: int, input_tokens: int, output_tokens: int) -> None:
        """Requests sent back to the queue, and the tokens that they must compute again."""
        for counter, amount in zip(self._retracted, (num_reqs, input_tokens, output_tokens)):
            counter.inc(amount)

    def count_cache(self, name: str, amount: float, **labels: str) -> None:
        """A count of the prefix cache or its tiers; see `CacheMetrics.count`."""
        self._cache.count(name, amount, **labels)

    def observe_queue_time(self, seconds: float) -> None:
        """A request left the waiting queue."""
        self._queue_time.labels(**self._labels).observe(seconds)

    def observe_weight_load(self, source: str, seconds: float) -> None:
        """A weight update ended. `source`: disk, distributed, tensor or ipc."""
        self._weight_load.labels(**self._labels, source=source).set(seconds)


def _doc(name: str) -> str:
    """Help text made of the name: every metric needs one."""
    return name.replace("_", " ").capitalize() + "."


# ------------------------------------------------------------------------------------------------
# Front
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerLabels:
    """Labels of the front's metrics."""

    model_name: str
    engine_type: str = "unified"
    has_replicas: bool = False  # the schedulers have a label `dp_rank`
    allowed_custom: Sequence[str] = ()
    extra: Mapping[str, str] | None = None

    def to_dict(self) -> dict[str, str]:
        return {
            "model_name": self.model_name,
            "engine_type": self.engine_type,
            "priority": "",
            **dict.fromkeys(self.allowed_custom, ""),
            **(self.extra or {}),
        }

    def of_no_rank(self) -> dict[str, str]:
        """The labels of a scheduler, those of its rank empty.

        For series beside the schedulers' own: routers take all series of a name to have the same
        labels.
        """
        scheduler = SchedulerLabels(
            model_name=self.model_name,
            engine_type=self.engine_type,
            dp_rank=0 if self.has_replicas else None,
            extra=self.extra,
        )
        ranks = ("tp_rank", "pp_rank", "moe_ep_rank", "dp_rank")
        return {n: "" if n in ranks else value for n, value in scheduler.to_dict().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerBuckets:
    """Histogram limits; None keeps the default."""

    time_to_first_token: Sequence[float] | None = None
    inter_token_latency: Sequence[float] | None = None
    e2e_request_latency: Sequence[float] | None = None
    prompt_tokens: Sequence[float] | None = None
    generation_tokens: Sequence[float] | None = None


class RequestCounts(Protocol):
    """The counters that come with a request's last message."""

    @property
    def cached_tokens(self) -> int: ...

    @property
    def cached_tokens_details(self) -> dict[str, Any] | None: ...

    @property
    def spec(self) -> dict[str, Any] | None: ...


class FinishedRequest(Protocol):
    """What is read of a request that ended. Times are unix times; 0 means never."""

    @property
    def created(self) -> float: ...

    @property
    def first_token_time(self) -> float: ...

    @property
    def finished_time(self) -> float: ...

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def output_ids(self) -> Sequence[int]: ...

    @property
    def finish_reason(self) -> dict[str, Any] | None: ...

    @property
    def last(self) -> RequestCounts | None: ...


class TokenizerMetrics:
    """Counters and latencies of requests, as the front sees them. Event loop thread only."""

    def __init__(
        self,
        labels: TokenizerLabels,
        buckets: TokenizerBuckets | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        buckets = buckets or TokenizerBuckets()
        self._labels = labels.to_dict()
        self._allowed = tuple(labels.allowed_custom)
        make = MetricFactory(self._labels, registry)
        self._prompt_tokens = make.counter("prompt_tokens", "Prompt tokens.", "is_streaming")
        self._generation_tokens = make.counter(
            "generation_tokens", "Generated tokens.", "is_streaming"
        )
        self._requests = make.counter("num_requests", "Requests that ended.", "is_streaming")
        self._cached = make.counter("cached_tokens", "Tokens not computed again.", "cache_source")
        # Beside the schedulers' series of these names, so that a sum has both.
        no_rank = labels.of_no_rank()
        beside = MetricFactory(no_rank, registry)
        self._held, self._paused = (
            beside.gauge(name, _doc(name)).labels(**no_rank)
            for name in ("num_queue_reqs", "num_paused_reqs")
        )
        self._aborted = make.counter("num_aborted_requests", "Requests that were aborted.")
        self._structured = make.counter("num_so_requests", "Structured output requests.")
        self._verify_calls = make.counter("spec_verify_calls", "Verification steps.")
        prompt_limits = buckets.prompt_tokens or TOKEN_BUCKETS
        self._prompt_sizes = make.histogram(
            "prompt_tokens_histogram", "Prompt lengths.", prompt_limits
        )
        self._uncached_sizes = make.histogram(
            "uncached_prompt_tokens_histogram", "Prompt lengths without the hit.", prompt_limits
        )
        self._generation_sizes = make.histogram(
            "generation_tokens_histogram",
            "Lengths of answers.",
            buckets.generation_tokens or TOKEN_BUCKETS,
        )
        self._ttft = make.histogram(
            "time_to_first_token_seconds",
            "Seconds until the first token.",
            buckets.time_to_first_token or TTFT_BUCKETS_S,
            "is_streaming",
        )
        itl_limits = buckets.inter_token_latency or ITL_BUCKETS_S
        self._itl = make.histogram(
            "inter_token_latency_seconds", "Seconds between tokens.", itl_limits
        )
        self._time_per_token = make.histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds between the tokens of a request.",
            itl_limits,
            "is_streaming",
        )
        self._startup = make.gauge("startup_time_seconds", "Seconds of the start.", "phase")
        self._get_loads = make.histogram(
            "get_loads_duration_seconds",
            "Seconds until all replicas told their load.",
            ITL_BUCKETS_S,
        )
        self._e2e = make.histogram(
            "e2e_request_latency_seconds",
            "Seconds from arrival to the last token.",
            buckets.e2e_request_latency or E2E_BUCKETS_S,
            "is_streaming",
        )

    def observe_request(
        self,
        request: FinishedRequest,
        is_streaming: bool,
        custom_labels: Mapping[str, str] | None = None,
        has_grammar: bool = False,
    ) -> None:
        """Count one request that ended, and how long it took."""
        labels = self._labels_of(custom_labels)
        streaming = {**labels, "is_streaming": str(is_streaming).lower()}
        self._requests.labels(**streaming).inc()
        if (request.finish_reason or {}).get("type") == "abort":
            self._aborted.labels(**labels).inc()
        if has_grammar:
            self._structured.labels(**labels).inc()
        self._observe_tokens(request, labels, streaming)
        self._observe_times(request, streaming, is_streaming)

    def observe_left(
        self,
        requests: Sequence[FinishedRequest],
        is_streaming: bool,
        custom_labels: Mapping[str, str] | None = None,
    ) -> None:
        """Count requests whose client left before their end, which aborts them."""
        labels = self._labels_of(custom_labels)
        streaming = {**labels, "is_streaming": str(is_streaming).lower()}
        for request in requests:
            self._requests.labels(**streaming).inc()
            self._aborted.labels(**labels).inc()
            self._observe_tokens(request, labels, streaming)

    def set_startup(self, phase: str, seconds: float) -> None:
        """Show how long a phase of the start took."""
        self._startup.labels(**self._labels, phase=phase).set(seconds)

    def observe_get_loads(self, seconds: float) -> None:
        """The replicas were asked for their load, and this is how long they took."""
        self._get_loads.labels(**self._labels).observe(seconds)

    def show_held(self, num_reqs: int, *, is_paused: bool) -> None:
        """Show how many requests no scheduler knows yet, and whether because of a pause."""
        self._held.set(num_reqs)
        self._paused.set(num_reqs if is_paused else 0)

    def observe_inter_token(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` new tokens came `seconds` after the request's previous ones."""
        histogram = self._itl.labels(**self._labels)
        for _ in range(num_tokens):
            histogram.observe(seconds / num_tokens)

    def _labels_of(self, custom: Mapping[str, str] | None) -> dict[str, str]:
        if not custom or not self._allowed:
            return self._labels
        return {**self._labels, **{k: str(custom[k]) for k in self._allowed if k in custom}}

    def _observe_tokens(
        self, request: FinishedRequest, labels: dict[str, str], streaming: dict[str, str]
    ) -> None:
        num_prompt, num_output = len(request.prompt_ids), len(request.output_ids)
        cached = request.last.cached_tokens if request.last is not None else 0
        self._prompt_tokens.labels(**streaming).inc(num_prompt)
        self._generation_tokens.labels(**streaming).inc(num_output)
        self._prompt_sizes.labels(**labels).observe(num_prompt)
        self._uncached_sizes.labels(**labels).observe(max(0, num_prompt - cached))
        self._generation_sizes.labels(**labels).observe(num_output)
        self._cached.labels(**labels, cache_source="total").inc(cached)
        details = request.last.cached_tokens_details if request.last is not None else None
        for source in ("device", "host", "storage"):
            amount = (details or {}).get(source, cached if source == "device" else 0)
            self._cached.labels(**labels, cache_source=source).inc(amount)
        spec = request.last.spec if request.last is not None else None
        if spec and spec.get("spec_verify_ct"):
            self._verify_calls.labels(**labels).inc(spec["spec_verify_ct"])

    def _observe_times(
        self, request: FinishedRequest, streaming: dict[str, str], is_streaming: bool
    ) -> None:
        end = request.finished_time
        self._e2e.labels(**streaming).observe(max(0.0, end - request.created))
        first = request.first_token_time
        if not first or not is_streaming:
            return  # the front learns of all tokens at once where nobody is to get the first one
        self._ttft.labels(**streaming).observe(max(0.0, first - request.created))
        if len(request.output_ids) > 1:
            mean_s = (end - first) / (len(request.output_ids) - 1)
            self._time_per_token.labels(**streaming).observe(max(0.0, mean_s))
