"""Replicas behind the router: what a shared storage tier saves, and what a killed replica costs.

    python benchmark/bench_replicas.py                      # shares of cached tokens
    python benchmark/bench_replicas.py --minutes 10         # one replica killed every minute
    python benchmark/bench_replicas.py --small              # both, in seconds: a self-test

Needs the router (`pip install 'sglang-hispec[router]'`). Starts its own replicas of a tiny random
model on the CPU: what is measured is where prompts come from and what fails, not speed.

* Shares: a multi-turn load in which every conversation stays alive, more of it than the replicas'
  device and host pools hold together; with one storage folder for all replicas and without, each
  under a cache-aware and a round-robin router. Counted by the servers (`cached_tokens_details`).
* Kills: conversations at a low rate, some of them streamed; once a period one replica gets SIGKILL,
  stays away for a while and comes back at the same address. A request has failed when its client
  sees anything but an answer. What the router sent again is counted by the router; a stream that
  broke off after it had begun is sent again by the client, as no router can do that. Every answer
  is compared with every other answer to the same prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from arguments import output_file
from serving.conversations import (
    TIERS,
    Client,
    Shape,
    SteadyLoad,
    Turn,
    contradictions,
    run_rounds,
    shares,
)
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.replicas import (
    Fleet,
    Router,
    route,
    router_is_installed,
    serve_fleet,
    shared_storage,
)

POLICIES = ("cache_aware", "round_robin")
PAGE_SIZE = 16
CONTEXT_LEN = 2048


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of a run. Lengths in tokens, times in seconds."""

    replicas: int
    policies: tuple[str, ...]
    pool_tokens: int
    shape: Shape
    num_clients: int
    period_s: float
    down_s: float
    pause_s: float


FULL = Plan(
    replicas=4,
    policies=POLICIES,
    pool_tokens=1024,
    shape=Shape(),
    num_clients=4,
    period_s=60.0,
    down_s=10.0,
    pause_s=0.4,
)
SMALL = Plan(
    replicas=2,
    policies=("round_robin",),
    pool_tokens=512,
    shape=Shape(num_conversations=8, num_heads=2, turns=3, head_len=96),
    num_clients=2,
    period_s=6.0,
    down_s=0.5,
    pause_s=0.05,
)


# ------------------------------------------------------------------------------------------------
# Shares of cached tokens
# ------------------------------------------------------------------------------------------------


def pool_flags(plan: Plan) -> list[str | int | float]:
    """Flags of every replica: small pools, host tier, no storage."""
    return [
        *("--max-total-tokens", plan.pool_tokens, "--page-size", PAGE_SIZE, "--enable-metrics"),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
    ]


def measure_shares(fleet: Fleet, plan: Plan, has_storage: bool) -> list[dict[str, Any]]:
    """A row for each policy, with fresh prompts and empty pools."""
    rows = []
    for policy in plan.policies:
        seed = 2 * POLICIES.index(policy) + has_storage
        with route(fleet.urls, "--policy", policy) as router:
            client = Client(router.url, plan.shape.answer_len)
            turns = run_rounds(client, plan.shape, seed, plan.num_clients)
        rows.append(share_row(policy, has_storage, turns))
        for replica in fleet.running():
            replica.post("/flush_cache?timeout=10").raise_for_status()
    return rows


def share_row(policy: str, has_storage: bool, turns: Sequence[Turn]) -> dict[str, Any]:
    failed = [turn.error for turn in turns if turn.error]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed, the first with {failed[0]}")
    found = shares(turns)
    return {
        "policy": policy,
        "shared_storage": has_storage,
        "requests": len(turns),
        "prompt_tokens": found.prompt_tokens,
        "cached": found.cached,
        **found.by_tier,
        "contradictions": contradictions(turns),
    }


def print_shares(rows: Sequence[dict[str, Any]]) -> None:
    print("share of prompt tokens that came from a cache")
    print(f"{'policy':<12} {'storage':<8} {'cached':>8} " + " ".join(f"{t:>8}" for t in TIERS))
    for row in rows:
        cells = " ".join(f"{row[tier]:8.3f}" for tier in TIERS)
        storage = "shared" if row["shared_storage"] else "none"
        print(f"{row['policy']:<12} {storage:<8} {row['cached']:8.3f} {cells}")


# ------------------------------------------------------------------------------------------------
# Kills
# ------------------------------------------------------------------------------------------------


def run_kills(fleet: Fleet, router: Router, plan: Plan, duration_s: float) -> dict[str, Any]:
    """Load for a while; one replica after the other is killed and comes back. The figures."""
    client = Client(router.url, plan.shape.answer_len)
    num_clients, pause_s = plan.num_clients, plan.pause_s
    with SteadyLoad(client, plan.shape, num_clients=num_clients, pause_s=pause_s) as load:
        num_kills = kill_in_turn(fleet, router, plan, duration_s)
        turns = load.stop()
    return {"kills": num_kills, **kill_figures(turns, router), **seen_by_storage(turns)}


def kill_in_turn(fleet: Fleet, router: Router, plan: Plan, duration_s: float) -> int:
    """Kill one replica in each period; returns how many."""
    num_kills, begin = 0, time.monotonic()
    with tqdm(total=round(duration_s), unit="s", desc="killing replicas") as bar:
        while (elapsed := time.monotonic() - begin) < duration_s:
            # In the middle of each period, so that the load is under way and ends with all alive.
            due = (num_kills + 0.5) * plan.period_s
            if elapsed >= due and due + plan.down_s < duration_s:
                kill_and_restart(fleet, num_kills % plan.replicas, plan.down_s)
                # Not the next one before this one counts again, or nobody would be left of two.
                router.wait_healthy(plan.replicas)
                num_kills += 1
            time.sleep(0.1)
            bar.update(round(time.monotonic() - begin) - bar.n)
    return num_kills


def kill_and_restart(fleet: Fleet, index: int, down_s: float) -> None:
    fleet.kill(index)
    time.sleep(down_s)
    fleet.start(index)


def kill_figures(turns: Sequence[Turn], router: Router) -> dict[str, Any]:
    times = sorted(turn.seconds for turn in turns if not turn.error)
    failed = [turn.error for turn in turns if turn.error]
    return {
        "requests": len(turns),
        "failed": len(failed),
        "first_failure": failed[0] if failed else "",
        "router_retries": router.num_retries(),
        "router_resends": int(router.counter("smg_router_upstream_send_retries_total")),
        "streams_sent_again": sum(turn.resends for turn in turns),
        "contradictions": contradictions(turns),
        "median_ms": statistics.median(times) * 1e3,
        "p99_ms": times[int(0.99 * (len(times) - 1))] * 1e3,
        "longest_ms": times[-1] * 1e3,
    }


def seen_by_storage(turns: Sequence[Turn]) -> dict[str, Any]:
    found = shares(turns)
    return {"cached": found.cached, **found.by_tier}


def measure_kills(fleet: Fleet, plan: Plan, duration_s: float) -> dict[str, Any]:
    with route(fleet.urls) as router:
        figures = run_kills(fleet, router, plan, duration_s)
        router.wait_healthy(plan.replicas)
    return figures


def print_kills(figures: dict[str, Any]) -> None:
    for name, value in figures.items():
        print(f"{name:<20} {value:.3f}" if isinstance(value, float) else f"{name:<20} {value}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="kill replicas for so long")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--small", action="store_true", help="a self-test")
    parser.add_argument("--json", type=output_file, help="file for the figures")
    return parser.parse_args()


def measure(args: argparse.Namespace, plan: Plan, root: Path) -> dict[str, Any]:
    """What the arguments ask for. The replicas with storage serve both measurements."""
    model = str(make_tiny_checkpoint(root / "model", max_position_embeddings=CONTEXT_LEN))
    result: dict[str, Any] = {"plan": dataclasses.asdict(plan)}
    wants_shares = args.small or not args.minutes
    rows: list[dict[str, Any]] = []
    if wants_shares:
        with serve_fleet(model, plan.replicas, *pool_flags(plan)) as fleet:
            rows += measure_shares(fleet, plan, False)
    flags = [*pool_flags(plan), *shared_storage(root / "l3", PAGE_SIZE)]
    with serve_fleet(model, plan.replicas, *flags) as fleet:
        if wants_shares:
            result["shares"] = rows + measure_shares(fleet, plan, True)
            print_shares(result["shares"])
        if args.small or args.minutes:
            duration_s = plan.period_s if args.small else 60 * args.minutes
            result["kills"] = measure_kills(fleet, plan, duration_s)
            print_kills(result["kills"])
    return result


def main() -> None:
    args = parse_args()
    if not router_is_installed():
        raise SystemExit("the router is not installed: pip install 'sglang-hispec[router]'")
    plan = SMALL if args.small else FULL
    if args.replicas:
        plan = dataclasses.replace(plan, replicas=args.replicas)
    with tempfile.TemporaryDirectory() as root:
        result = measure(args, plan, Path(root))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2))
    if result.get("kills", {}).get("failed"):
        raise SystemExit("requests failed")


if __name__ == "__main__":
    main()
