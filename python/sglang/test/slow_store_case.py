"""A served model over a shared store behind a slow network, in a network namespace of its own.

`run_behind_slow_network` starts this module in such a namespace; it needs the rights to make one.
Everything there goes over the namespace's own loopback, which `tc` slows down.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sglang.test.fakes.store_servers import MooncakeServers, RespServer, StoreServers
from sglang.test.hicache_fault_server import FULL, WAIT_S, from_storage, serve_over_store

# A prompt's pages take seconds at this rate, a request itself a fraction of one.
_SLOW = ("tc", "qdisc", "add", "dev", "lo", "root", "tbf")
_RATE = ("rate", "400kbit", "burst", "16kb", "latency", "5s")
_FAST = ("tc", "qdisc", "del", "dev", "lo", "root")
# On top of what the policy allows: the request's own bytes over the slow network, a busy machine.
_SLACK_S = 3.0
_NUM_PROMPTS = 4
_BACK_S = 40.0  # a store that was too slow may count as away for a while


def why_no_slow_network() -> str | None:
    """Why a network cannot be slowed down here; None: it can."""
    command = " && ".join(["ip link set lo up", " ".join([*_SLOW, *_RATE])])
    try:
        result = subprocess.run(
            ["unshare", "-n", "sh", "-c", command], capture_output=True, text=True, timeout=20
        )
    except OSError as error:
        return str(error)
    return result.stderr.strip() or "unshare or tc failed" if result.returncode else None


def run_behind_slow_network(backend: str) -> subprocess.CompletedProcess[str]:
    """Run this module in a namespace of its own."""
    script = f'ip link set lo up && exec "{sys.executable}" -m {__spec__.name} {backend}'
    return subprocess.run(
        ["unshare", "-n", "sh", "-c", script], capture_output=True, text=True, timeout=280
    )


def main(backend: str) -> None:
    """Serve, slow the network down, ask, make it fast, ask."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store: StoreServers
        store = MooncakeServers(folder) if backend == "mooncake" else RespServer(folder)
        store.start()
        try:
            _serve(folder, store)
        finally:
            store.close()


def _serve(folder: Path, store: StoreServers) -> None:
    with serve_over_store(folder, store) as case:
        expected = [case.tokens(number) for number in range(_NUM_PROMPTS)]
        case.flush()
        assert from_storage(case.ask(0)) == FULL
        case.flush()
        subprocess.run([*_SLOW, *_RATE], check=True)
        num_cut = 0
        for number in range(_NUM_PROMPTS):
            start = time.monotonic()
            answer = case.ask(number)
            assert time.monotonic() - start < WAIT_S + _SLACK_S, "storage held a request up"
            assert answer["output_ids"] == expected[number]
            num_cut += from_storage(answer) < FULL
        # A new prompt is written over the slow network while requests go on.
        new = case.tokens(100)
        assert num_cut == _NUM_PROMPTS, "the network was not slow"
        subprocess.run(_FAST, check=True)
        deadline = time.monotonic() + _BACK_S
        for number, tokens in [*enumerate(expected), (100, new)]:
            hit = 0
            while hit < FULL:
                assert time.monotonic() < deadline, f"hits of prompt {number} do not return"
                case.flush()
                answer = case.ask(number)
                assert answer["output_ids"] == tokens
                hit = from_storage(answer)


if __name__ == "__main__":
    main(sys.argv[1])
