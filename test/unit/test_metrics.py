"""Names, labels and values of the metrics, in one process and over several."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import prometheus_client
import pytest

from sglang.srt.observability import http_metrics
from sglang.srt.observability.http_metrics import HttpMetricsMiddleware
from sglang.srt.observability.metrics import (
    E2E_BUCKETS_S,
    SchedulerConstants,
    SchedulerLabels,
    SchedulerMetrics,
    SchedulerStats,
    TokenizerBuckets,
    TokenizerLabels,
    TokenizerMetrics,
    parse_extra_labels,
    parse_token_buckets,
)

SCHEDULER = SchedulerLabels(model_name="m", tp_rank=1, extra={"zone": "a"})
SCHEDULER_KEYS = {
    "model_name": "m",
    "engine_type": "unified",
    "tp_rank": "1",
    "pp_rank": "0",
    "moe_ep_rank": "0",
    "priority": "",
    "zone": "a",
}
FRONT_KEYS = {"model_name": "m", "engine_type": "unified", "priority": ""}


@dataclass
class Counts:
    cached_tokens: int = 0
    cached_tokens_details: dict[str, Any] | None = None
    spec: dict[str, Any] | None = None


@dataclass
class Finished:
    created: float = 100.0
    first_token_time: float = 100.5
    finished_time: float = 102.5
    prompt_ids: array[int] = field(default_factory=lambda: array("i", range(10)))
    output_ids: array[int] = field(default_factory=lambda: array("i", range(5)))
    finish_reason: dict[str, Any] | None = field(default_factory=lambda: {"type": "stop"})
    last: Counts | None = field(default_factory=Counts)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    return prometheus_client.CollectorRegistry()


def test_scheduler_gauges_have_the_names_and_labels_of_dashboards(registry: Any) -> None:
    metrics = SchedulerMetrics(SCHEDULER, registry)
    metrics.log_stats(
        SchedulerStats(num_running_reqs=3, num_queue_reqs=2, num_used_tokens=50, token_usage=0.25)
    )
    values = {
        "num_running_reqs": 3,
        "num_queue_reqs": 2,
        "num_used_tokens": 50,
        "kv_used_tokens": 50,
        "token_usage": 0.25,
        "full_token_usage": 0.25,
        "num_grammar_queue_reqs": 0,
    }
    for name, value in values.items():
        assert registry.get_sample_value(f"sglang:{name}", SCHEDULER_KEYS) == value
    metrics.log_stats(SchedulerStats())
    assert registry.get_sample_value("sglang:num_running_reqs", SCHEDULER_KEYS) == 0


def test_pools_beside_that_of_full_kv_show_where_there_are_some(registry: Any) -> None:
    metrics = SchedulerMetrics(SCHEDULER, registry)
    sample = registry.get_sample_value
    assert sample("sglang:swa_token_usage", SCHEDULER_KEYS) is None
    metrics.log_side_pool("swa", used=5, evictable=7, total=20)
    metrics.log_side_pool("mamba", used=1, evictable=0, total=4)
    metrics.log_side_pool("mamba", used=2, evictable=1, total=4)
    values = {
        "swa_token_usage": 0.25,
        "swa_used_tokens": 5,
        "swa_evictable_tokens": 7,
        "swa_total_tokens": 20,
        "mamba_usage": 0.5,
        "mamba_used_states": 2,
        "mamba_evictable_states": 1,
        "mamba_total_states": 4,
    }
    for name, value in values.items():
        assert sample(f"sglang:{name}", SCHEDULER_KEYS) == value


def test_scheduler_counters_and_constants(registry: Any) -> None:
    metrics = SchedulerMetrics(SCHEDULER, registry)
    metrics.count_prefill(7, 3)
    metrics.count_decode(5)
    metrics.count_decode(5)
    metrics.count_retracted(1, 20, 4)
    metrics.observe_queue_time(0.3)
    metrics.observe_weight_load("disk", 1.5)
    metrics.set_constants(
        SchedulerConstants(
            max_total_num_tokens=1000,
            page_size=16,
            num_pages=62,
            context_len=2048,
            weight_memory_usage_gb=0.5,
            kv_cache_memory_usage_gb=0.25,
            spec_num_steps=3,
            spec_num_draft_tokens=4,
            startup_available_gpu_memory_gb=7.5,
        )
    )
    sample = registry.get_sample_value
    for mode, value in (("prefill_compute", 7), ("prefill_cache", 3), ("decode", 10)):
        assert sample("sglang:realtime_tokens_total", {**SCHEDULER_KEYS, "mode": mode}) == value
    assert sample("sglang:num_retracted_input_tokens_total", SCHEDULER_KEYS) == 20
    assert sample("sglang:queue_time_seconds_count", SCHEDULER_KEYS) == 1
    assert sample("sglang:page_size", SCHEDULER_KEYS) == 16
    assert sample("sglang:startup_available_gpu_memory_gb", SCHEDULER_KEYS) == 7.5
    assert b"_created" not in prometheus_client.generate_latest(registry)
    disk = {**SCHEDULER_KEYS, "source": "disk"}
    assert sample("sglang:weight_load_duration_seconds", disk) == 1.5


def test_the_replica_label_exists_only_with_data_parallelism() -> None:
    assert "dp_rank" not in SCHEDULER.to_dict()
    assert SchedulerLabels(model_name="m", dp_rank=0).to_dict()["dp_rank"] == "0"


def test_a_finished_request_is_counted_and_timed(registry: Any) -> None:
    metrics = TokenizerMetrics(TokenizerLabels(model_name="m"), registry=registry)
    last = Counts(4, {"device": 3, "host": 1}, {"spec_verify_ct": 6})
    metrics.observe_request(Finished(last=last), is_streaming=True)
    sample = registry.get_sample_value
    streaming = {**FRONT_KEYS, "is_streaming": "true"}
    assert sample("sglang:prompt_tokens_total", streaming) == 10
    assert sample("sglang:generation_tokens_total", streaming) == 5
    assert sample("sglang:num_requests_total", streaming) == 1
    assert sample("sglang:num_aborted_requests_total", FRONT_KEYS) in (None, 0)
    for source, value in (("total", 4), ("device", 3), ("host", 1), ("storage", 0)):
        labels = {**FRONT_KEYS, "cache_source": source}
        assert sample("sglang:cached_tokens_total", labels) == value
    assert sample("sglang:spec_verify_calls_total", FRONT_KEYS) == 6
    assert sample("sglang:uncached_prompt_tokens_histogram_sum", FRONT_KEYS) == 6
    assert sample("sglang:time_to_first_token_seconds_sum", streaming) == 0.5
    assert sample("sglang:e2e_request_latency_seconds_sum", streaming) == 2.5
    assert sample("sglang:request_time_per_output_token_seconds_sum", streaming) == 0.5


def test_aborted_and_tokenless_requests(registry: Any) -> None:
    metrics = TokenizerMetrics(TokenizerLabels(model_name="m"), registry=registry)
    aborted = Finished(
        first_token_time=0.0, output_ids=array("i"), finish_reason={"type": "abort"}, last=None
    )
    metrics.observe_request(aborted, is_streaming=False)
    sample = registry.get_sample_value
    plain = {**FRONT_KEYS, "is_streaming": "false"}
    assert sample("sglang:num_aborted_requests_total", FRONT_KEYS) == 1
    assert sample("sglang:time_to_first_token_seconds_count", plain) in (None, 0)
    assert sample("sglang:e2e_request_latency_seconds_count", plain) == 1


def test_inter_token_times_are_spread_over_the_new_tokens(registry: Any) -> None:
    metrics = TokenizerMetrics(TokenizerLabels(model_name="m"), registry=registry)
    metrics.observe_inter_token(0.4, 4)
    assert registry.get_sample_value("sglang:inter_token_latency_seconds_count", FRONT_KEYS) == 4
    labels = {**FRONT_KEYS, "le": "0.1"}
    assert registry.get_sample_value("sglang:inter_token_latency_seconds_bucket", labels) == 4


@pytest.mark.parametrize("has_replicas", [False, True])
def test_what_waits_in_front_has_the_labels_of_schedulers(
    registry: Any, has_replicas: bool
) -> None:
    """Routers refuse all that a server says where the series of one name have different labels."""
    labels = TokenizerLabels(
        model_name="m", has_replicas=has_replicas, allowed_custom=["team"], extra={"zone": "a"}
    )
    TokenizerMetrics(labels, registry=registry).show_held(2, is_paused=False)
    rank = SchedulerLabels(
        model_name="m", dp_rank=1 if has_replicas else None, extra={"zone": "a"}
    ).to_dict()
    no_rank = {name: "" if name.endswith("_rank") else value for name, value in rank.items()}
    assert registry.get_sample_value("sglang:num_queue_reqs", no_rank) == 2
    assert registry.get_sample_value("sglang:num_paused_reqs", no_rank) == 0


def test_custom_labels_are_taken_only_when_allowed(registry: Any) -> None:
    labels = TokenizerLabels(model_name="m", allowed_custom=["team"])
    metrics = TokenizerMetrics(labels, registry=registry)
    metrics.observe_request(Finished(), False, custom_labels={"team": "x", "evil": "y"})
    key = {**FRONT_KEYS, "team": "x", "is_streaming": "false"}
    assert registry.get_sample_value("sglang:num_requests_total", key) == 1


def test_bucket_limits_can_be_set(registry: Any) -> None:
    buckets = TokenizerBuckets(time_to_first_token=[0.7])
    metrics = TokenizerMetrics(TokenizerLabels(model_name="m"), buckets, registry)
    metrics.observe_request(Finished(), is_streaming=True)
    streaming = {**FRONT_KEYS, "is_streaming": "true"}
    name = "sglang:time_to_first_token_seconds_bucket"
    assert registry.get_sample_value(name, {**streaming, "le": "0.7"}) == 1
    assert registry.get_sample_value(name, {**streaming, "le": "0.4"}) is None
    assert E2E_BUCKETS_S[-1] == 2400


def test_only_streams_have_a_first_token(registry: Any) -> None:
    metrics = TokenizerMetrics(TokenizerLabels(model_name="m"), registry=registry)
    metrics.observe_request(Finished(), is_streaming=False)
    labels = {**FRONT_KEYS, "is_streaming": "false"}

    def count(name: str) -> float | None:
        value: float | None = registry.get_sample_value(f"sglang:{name}_count", labels)
        return value

    assert count("e2e_request_latency_seconds") == 1
    assert count("time_to_first_token_seconds") is None
    assert count("request_time_per_output_token_seconds") is None


def test_extra_labels() -> None:
    assert parse_extra_labels(None) == {}
    assert parse_extra_labels('{"a": 1}') == {"a": "1"}


def test_rules_for_token_buckets() -> None:
    assert parse_token_buckets(None) is None
    assert parse_token_buckets(["default"]) is None
    assert parse_token_buckets(["10", "5"]) == parse_token_buckets(["custom", "5", "10"]) == [5, 10]
    assert parse_token_buckets(["tse", "1000", "2", "8"]) == [
        984, 992, 996, 998, 1000, 1002, 1004, 1008, 1016,
    ]  # fmt: skip
    for bad in (["tse", "1"], ["tse", "1", "1", "8"], ["custom"], ["many"]):
        with pytest.raises(ValueError, match="token buckets"):
            parse_token_buckets(bad)


async def _call(app: Any, path: str, method: str = "GET") -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app({"type": "http", "path": path, "method": method}, None, send)
    return sent


def test_http_requests_are_counted_by_route_and_status(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        http_metrics,
        "MetricFactory",
        lambda labels: http_metrics_factory(labels, registry),
    )

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/broken":
            raise RuntimeError
        await send({"type": "http.response.start", "status": 404})

    app = HttpMetricsMiddleware(inner, ["/health", "/broken"])
    asyncio.run(_call(app, "/health"))
    asyncio.run(_call(app, "/secret-scan-1"))
    asyncio.run(_call(app, "/secret-scan-2", "BREW"))
    with pytest.raises(RuntimeError):
        asyncio.run(_call(app, "/broken"))
    sample = registry.get_sample_value
    name = "sglang:http_responses_total"
    health = {"endpoint": "/health", "status_code": "404", "method": "GET"}
    assert sample(name, health) == 1
    assert sample(name, {"endpoint": "/broken", "status_code": "500", "method": "GET"}) == 1
    assert sample("sglang:http_requests_total", {"endpoint": "other", "method": "GET"}) == 1
    assert sample("sglang:http_requests_total", {"endpoint": "other", "method": "other"}) == 1
    assert sample("sglang:http_requests_active", {}) == 0


def http_metrics_factory(labels: Any, registry: Any) -> Any:
    from sglang.srt.observability.metric_factory import MetricFactory

    return MetricFactory(labels, registry)


_PARENT = """
import os, subprocess, sys
from sglang.srt.utils import set_prometheus_multiproc_dir
path = set_prometheus_multiproc_dir()
child = '''
from sglang.srt.observability.metrics import *
m = SchedulerMetrics(SchedulerLabels(model_name="m"))
m.log_stats(SchedulerStats(num_running_reqs=4, num_queue_reqs=2))
m.count_decode(5)
'''
subprocess.run([sys.executable, "-c", child], check=True)
subprocess.run([sys.executable, "-c", child], check=True)
from sglang.srt.observability.metrics import *
from sglang.srt.utils import add_prometheus_middleware
TokenizerMetrics(TokenizerLabels(model_name="m")).observe_inter_token(0.1, 1)
front = TokenizerMetrics(TokenizerLabels(model_name="m"))
front.observe_inter_token(0.1, 1)
from fastapi import FastAPI
from starlette.testclient import TestClient
app = FastAPI()
add_prometheus_middleware(app, lambda: front.show_held(3, is_paused=True))
answer = TestClient(app).get("/metrics", follow_redirects=False)
assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
sys.stdout.write(answer.text)
"""


def test_the_metrics_of_all_processes_come_together(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _PARENT], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    values = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in lines}
    running = [v for k, v in values.items() if k.startswith("sglang:num_running_reqs{")]
    decoded = [v for k, v in values.items() if 'mode="decode"' in k]
    gaps = [
        v for k, v in values.items() if k.startswith("sglang:inter_token_latency_seconds_count")
    ]
    assert (running, decoded, gaps) == (["4.0"], ["10.0"], ["2.0"])
    assert "_created" not in done.stdout
    waiting = {k: v for k, v in values.items() if k.startswith("sglang:num_queue_reqs{")}
    assert sorted(waiting.values()) == ["2.0", "3.0"], "the front's beside the scheduler's"
    assert [('tp_rank="0"' in key) for key in sorted(waiting, key=lambda each: waiting[each])] == [
        True,
        False,
    ]
    assert "3.0" in [v for k, v in values.items() if k.startswith("sglang:num_paused_reqs{")]


def test_the_page_on_metrics_lists_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr(
        http_metrics, "MetricFactory", lambda labels: http_metrics_factory(labels, registry)
    )
    scheduler = SchedulerMetrics(SCHEDULER, registry)
    for pool in ("swa", "mamba"):
        scheduler.log_side_pool(pool, used=1, evictable=1, total=2)
    values = {spec.name: 1 for spec in dataclasses.fields(SchedulerConstants)}
    scheduler.set_constants(SchedulerConstants(**values))
    scheduler.set_graph_memory({"decode": 1.0})
    # The front has series of two names that schedulers have too, in a process of its own.
    front = prometheus_client.CollectorRegistry()
    TokenizerMetrics(TokenizerLabels(model_name="m"), registry=front)
    HttpMetricsMiddleware(None, [])
    declared = {
        family.name + ("_total" if family.type == "counter" else "")
        for collected in (registry, front)
        for family in collected.collect()
    }
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text("utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    listed = {f"sglang:{name}" for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == declared
