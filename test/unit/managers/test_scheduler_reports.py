"""What a scheduler's gauges say while it computes, is paused and rests."""

from __future__ import annotations

from typing import Any

import prometheus_client
import pytest

from sglang.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    GetLoadsReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.observability.metrics import (
    SchedulerLabels,
    SchedulerMetrics,
    SchedulerStats,
)
from sglang.test.fakes.fake_worker import FakeSpeculativeWorker
from sglang.test.fakes.scheduler_harness import SchedulerHarness

LABELS = SchedulerLabels(model_name="m")


class Watched:
    """A scheduler that reports after every decode step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
        self._registry = prometheus_client.CollectorRegistry()
        self.harness = SchedulerHarness(
            metrics=SchedulerMetrics(LABELS, self._registry), decode_log_interval=1, **options
        )

    def __getitem__(self, name: str) -> float:
        value = self._registry.get_sample_value(f"sglang:{name}", LABELS.to_dict())
        assert value is not None, f"there is no gauge {name}"
        return value

    def total(self, name: str, **labels: str) -> float:
        """A counter with labels of its own; 0 where nothing was counted."""
        value = self._registry.get_sample_value(f"sglang:{name}", {**LABELS.to_dict(), **labels})
        return value or 0.0

    def start(self, *rids: str) -> None:
        for index, rid in enumerate(rids):
            self.harness.generate(rid, [index + 1, 2, 3], 40, ignore_eos=True)

    def pause(self, mode: str) -> None:
        self.harness.send(PauseGenerationReqInput(mode=mode))
        self.harness.step()

    def load(self) -> dict[str, Any]:
        self.harness.send(GetLoadsReqInput())
        self.harness.step()
        reply: Any = self.harness.replies[-1]
        loaded: dict[str, Any] = reply.load
        return loaded


@pytest.mark.parametrize("overlap", [False, True])
def test_gauges_of_a_busy_scheduler(monkeypatch: pytest.MonkeyPatch, overlap: bool) -> None:
    watched = Watched(monkeypatch, max_requests=2, overlap=overlap)
    watched.start("a", "b", "c")
    watched.harness.step(6)
    load = watched.load()
    assert watched["num_running_reqs"] == load["num_running_reqs"] == 2
    assert watched["num_queue_reqs"] == load["num_waiting_reqs"] == 1
    assert watched["utilization"] == load["utilization"] == 1.0
    running = watched.harness.scheduler.running_batch.reqs
    lengths = sum(req.seq_len for req in running)
    assert lengths - 2 * len(running) <= watched["decode_sum_seq_lens"] <= lengths
    assert watched["decode_sum_seq_lens"] > 6
    assert watched["gen_throughput"] > 0 and 0 < watched["fwd_occupancy"] <= 1
    assert watched["num_paused_reqs"] == watched["num_retracted_reqs"] == 0

    watched.harness.run_until_idle()
    for name in ("num_running_reqs", "num_queue_reqs", "utilization", "decode_sum_seq_lens"):
        assert watched[name] == 0, name
    assert watched["gen_throughput"] == watched["fwd_occupancy"] == 0


def test_a_prefill_step_counts_those_whose_prompts_it_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = Watched(monkeypatch, max_requests=2)
    watched.start("a", "b", "c")
    watched.harness.step()
    assert (watched["num_running_reqs"], watched["num_queue_reqs"]) == (2, 1)
    watched.harness.run_until_idle()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_does_not_hide_who_waits(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    watched = Watched(monkeypatch, max_requests=2)
    watched.start("a", "b", "c")
    watched.harness.step(5)
    watched.pause(mode)
    held = {"in_place": (2, 1), "retract": (0, 3)}[mode]

    def shown() -> tuple[float, float]:
        return watched["num_running_reqs"], watched["num_queue_reqs"]

    assert shown() == held and watched["gen_throughput"] == watched["fwd_occupancy"] == 0
    assert watched["num_paused_reqs"] == held[0]
    assert watched["num_retracted_reqs"] == (2 if mode == "retract" else 0)
    watched.harness.send(FlushCacheReqInput())
    watched.harness.step(3)
    assert shown() == held
    watched.start("d")
    watched.harness.step(2)
    assert shown() == (held[0], held[1] + 1)
    watched.harness.send(AbortReq(rid="c"))
    watched.harness.step(2)
    assert shown() == held

    watched.harness.send(ContinueGenerationReqInput())
    watched.harness.step()
    assert watched["num_paused_reqs"] == 0
    watched.harness.run_until_idle()
    assert shown() == (0, 0) and watched["num_retracted_reqs"] == 0


def test_throughput_leaves_out_the_time_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    watched = Watched(monkeypatch)
    compute = watched.harness.worker.forward_batch_generation

    def compute_slowly(batch: Any) -> Any:
        now[0] += 0.5
        return compute(batch)

    watched.harness.worker.forward_batch_generation = compute_slowly
    for rest_s in (60.0, 600.0):
        now[0] += rest_s
        watched.start("a")
        watched.harness.step(2)  # a prefill and the first decode step
        assert watched["gen_throughput"] == pytest.approx(2.0), "a token in half a second"
        assert watched["fwd_occupancy"] == pytest.approx(1.0)
        watched.harness.run_until_idle()
    watched.start("a")
    watched.harness.step(3)
    watched.pause("in_place")
    now[0] += 60
    watched.harness.send(ContinueGenerationReqInput())
    watched.harness.step()
    assert watched["gen_throughput"] == pytest.approx(2.0)
    watched.harness.run_until_idle()


def test_replayed_steps_show(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch)
    watched.start("a")
    watched.harness.step(3)
    assert watched["is_cuda_graph"] == 0
    watched.harness.num_replays = 1
    watched.harness.step()
    assert watched["is_cuda_graph"] == 1
    watched.harness.step()
    assert watched["is_cuda_graph"] == 0
    assert watched.total("cuda_graph_passes_total", mode="decode") == 1
    watched.harness.run_until_idle()


def test_loads_tell_of_speculation_where_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeSpeculativeWorker(num_slots=256, page_size=1, max_requests=4, context_len=128)
    for watched in (Watched(monkeypatch), Watched(monkeypatch, worker=worker)):
        watched.start("a")
        watched.harness.step(4)
        load = watched.load()
        assert ("speculative" in load) is (watched.harness.worker is worker)
        watched.harness.run_until_idle()
    assert 1 <= load["speculative"]["accept_length"] <= 4
    assert 0 <= load["speculative"]["accept_rate"] <= 1


def test_every_gauge_has_a_value_from_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is left at what `SchedulerStats` has for who says nothing."""
    seen: list[SchedulerStats] = []
    monkeypatch.setattr(SchedulerMetrics, "log_stats", lambda self, stats: seen.append(stats))
    given: list[set[str]] = []
    made = SchedulerStats.__init__

    def init(self: SchedulerStats, **values: Any) -> None:
        given.append(set(values))
        made(self, **values)

    monkeypatch.setattr(SchedulerStats, "__init__", init)
    watched = Watched(monkeypatch)
    watched.start("a")
    watched.harness.run_until_idle()
    follow_others = {"full_token_usage", "kv_used_tokens"}
    assert given and all(names | follow_others == set(SchedulerStats.__slots__) for names in given)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prefill_is_reported_once_it_is_under_way(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    watched = Watched(monkeypatch, overlap=overlap)
    launch = watched.harness.worker.forward_batch_generation
    shown_at_launch = []

    def forward_batch_generation(batch: Any) -> Any:
        shown_at_launch.append(watched["num_running_reqs"])
        return launch(batch)

    watched.harness.worker.forward_batch_generation = forward_batch_generation
    watched.start("a")
    watched.harness.step()
    assert shown_at_launch == [0] and watched["num_running_reqs"] == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_earlier_chunks_of_a_prompt_are_no_hits(
    monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    watched = Watched(monkeypatch, overlap=overlap, chunk_size=8)
    prompt = list(range(1, 31))
    watched.harness.generate("cold", prompt, 1, ignore_eos=True)
    watched.harness.run_until_idle()
    assert watched.total("realtime_tokens_total", mode="prefill_compute") == 30
    assert watched.total("realtime_tokens_total", mode="prefill_cache") == 0
    assert watched["cache_hit_rate"] == 0
    # 15 of 35 tokens are known; two chunks and a part are not.
    watched.harness.generate("warm", [*prompt[:15], *range(100, 120)], 1, ignore_eos=True)
    watched.harness.run_until_idle()
    assert watched.total("realtime_tokens_total", mode="prefill_compute") == 50
    assert watched.total("realtime_tokens_total", mode="prefill_cache") == 15
