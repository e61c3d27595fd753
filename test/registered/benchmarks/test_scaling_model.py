"""The formulas of docs/scaling.md: against a simulation, against each other, and as printed."""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest

import plot_scaling
from serving.scaling import (
    REPLICA_COUNTS,
    SPEC_8B,
    SPECS,
    Hardware,
    ReplicaSpec,
    Workload,
    break_even_hit_rate,
    compute_seconds,
    device_tokens,
    estimate,
    host_tokens,
    restore_seconds,
    shortest_worth,
    without_storage,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="benchmarks")

HARDWARE = Hardware()
WORK = Workload()
ROOT = Path(__file__).resolve().parents[3]


class Tier:
    """Conversations that fit into so many tokens, least recently used first out."""

    def __init__(self, capacity: float, work: Workload) -> None:
        self._most = int(capacity / (work.prompt_len + work.output_len))
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, conversation: int) -> bool:
        return conversation in self._kept

    def use(self, conversation: int) -> None:
        self._kept.pop(conversation, None)
        self._kept[conversation] = None
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)


def simulated_shares(spec: ReplicaSpec, work: Workload, num_replicas: int) -> dict[str, float]:
    """The private tiers of replicas, prompt by prompt; a router without affinity draws one."""
    rng = random.Random(5)
    rate = estimate(spec, num_replicas, HARDWARE, work).requests_per_s
    tiers = {"device": device_tokens(spec, HARDWARE), "host": host_tokens(spec, HARDWARE)}
    replicas = [
        {tier: Tier(size, work) for tier, size in tiers.items()} for _ in range(num_replicas)
    ]
    due = [(rng.expovariate(1 / work.mean_gap_s), i) for i in range(int(rate * work.mean_gap_s))]
    last = {i: rng.randrange(num_replicas) for _, i in due}
    heapq.heapify(due)
    hits, total, now = dict.fromkeys(tiers, 0.0), 0, 0.0
    while now < 8 * work.mean_gap_s:
        now, conversation = heapq.heappop(due)
        heapq.heappush(due, (now + rng.expovariate(1 / work.mean_gap_s), conversation))
        stays = rng.random() < work.affinity
        chosen = last[conversation] if stays else rng.randrange(num_replicas)
        # What an older visit left behind has fewer of the tokens; it is not counted as a hit.
        found = [tier for tier in tiers if conversation in replicas[chosen][tier]]
        if now > 3 * work.mean_gap_s:
            total += 1
            if found and chosen == last[conversation]:
                hits[found[0]] += work.reusable
        last[conversation] = chosen
        for tier in replicas[chosen].values():
            tier.use(conversation)
    return {tier: count / total for tier, count in hits.items()}


@pytest.mark.parametrize("gap_s", [30.0, 60.0])
@pytest.mark.parametrize(("count", "affinity"), [(1, 1.0), (4, 1.0), (4, 0.0)])
def test_shares_are_those_of_a_simulation(gap_s: float, count: int, affinity: float) -> None:
    work = without_storage(replace(WORK, mean_gap_s=gap_s, affinity=affinity))
    wanted = estimate(SPEC_8B, count, HARDWARE, work).shares
    found = simulated_shares(SPEC_8B, work, count)
    for tier, share in found.items():
        assert share == pytest.approx(wanted[tier], abs=0.02), tier


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_break_even_bandwidth(spec: ReplicaSpec) -> None:
    each = spec.break_even_bandwidth / spec.num_gpus
    assert restore_seconds(spec, each, 1000) == pytest.approx(compute_seconds(spec, 1000))
    assert shortest_worth(spec, each * 0.99, 0.001) == float("inf")
    tokens = shortest_worth(spec, 3 * each, 0.005)
    restored = 0.005 + restore_seconds(spec, 3 * each, tokens)
    assert restored == pytest.approx(compute_seconds(spec, tokens))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("cost", [0.02, 0.3])
def test_break_even_hit_rate(spec: ReplicaSpec, cost: float) -> None:
    share = break_even_hit_rate(spec, WORK, cost)
    output_s = WORK.output_len / spec.decode_rate(WORK)
    without = compute_seconds(spec, WORK.prompt_len) + output_s
    with_tier = compute_seconds(spec, WORK.prompt_len * (1 - share)) + output_s
    assert without / with_tier == pytest.approx(1 + cost)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("affinity", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("gap_s", [10.0, 120.0, 3000.0])
def test_limits(spec: ReplicaSpec, affinity: float, gap_s: float) -> None:
    work = replace(WORK, affinity=affinity, mean_gap_s=gap_s)
    for count in REPLICA_COUNTS:
        load = estimate(spec, count, HARDWARE, work)
        assert all(share >= -1e-9 for share in load.shares.values())
        assert 0 < load.hit_rate <= work.reusable + 1e-9
        limit = count * spec.num_gpus * HARDWARE.storage_bandwidth
        assert load.storage_read <= limit * 1.001
        without = estimate(spec, count, HARDWARE, without_storage(work))
        assert without.storage_read == 0 and without.hit_rate <= load.hit_rate + 1e-9
        assert load.requests_per_s / without.requests_per_s == pytest.approx(
            load.gain / without.gain
        )


def test_decode_is_as_fast_as_its_bytes_are_read() -> None:
    measured = replace(WORK, prompt_len=512, output_len=32)
    assert SPEC_8B.decode_rate(measured) == pytest.approx(10_469, rel=0.01)
    assert SPEC_8B.decode_step_bytes(WORK) == pytest.approx(51.5e9, rel=0.001)
    assert SPEC_8B.decode_rate(WORK) == pytest.approx(4170, rel=0.001)


@pytest.mark.parametrize(
    "arguments",
    [("--prompt-len", "0"), ("--output-len", "-1"), ("--mean-gap", "0"), ("--reusable", "2")],
)
def test_figures_that_make_no_sense_are_refused(
    arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        plot_scaling.main(arguments)
    assert ended.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_a_picture_that_cannot_be_written_is_told_before_the_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        plot_scaling.main(["--png", "/no such folder/picture.png"])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and "/no such folder" in printed.err and not printed.out


def test_one_replica_needs_no_affinity() -> None:
    loads = [
        estimate(SPEC_8B, 1, HARDWARE, replace(WORK, affinity=affinity)) for affinity in (0.0, 1.0)
    ]
    assert loads[0] == loads[1]


def test_the_document_has_what_the_script_prints() -> None:
    document = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    for table in plot_scaling.document_tables(HARDWARE, WORK):
        assert table in document


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_scaling.draw(tmp_path / "picture.png", HARDWARE, WORK)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
