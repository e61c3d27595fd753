"""A scheduler process that tells, when it ends, what it did: one report a rank.

The launcher starts `run_probed_scheduler` in place of the real one (see `probed_server.py`).
Nothing is changed but what HISPEC_PROBE_SLOW asks for; calls of collectives are counted on their
way. The report is a file `rank<r>.json` in the folder HISPEC_PROBE: the cache as a list of nodes,
the collectives of every thread as a count and a running digest, replays of captured steps, and
whether the pool equations hold, before and after a last flush.

HISPEC_PROBE_SLOW="<rank>:<seconds>": that rank's copies between device and host take so much
longer, each layer of a load and each backup.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_process import make_scheduler
from sglang.srt.mem_cache.component_tree import ComponentTree
from sglang.srt.mem_cache.tree_components.base import TreeNode
from sglang.srt.server_args import PortArgs, ServerArgs

FOLDER = "HISPEC_PROBE"
SLOW = "HISPEC_PROBE_SLOW"
_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "barrier")
_SETTLE_S = 10.0


class CollectiveLog:
    """Counts collective calls by thread, with a digest of their order and sizes."""

    def __init__(self) -> None:
        self._threads: dict[str, tuple[int, Any]] = {}

    def install(self) -> None:
        """Put itself in front of torch's functions, in this process."""
        for name in _COLLECTIVES:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            thread = threading.current_thread().name
            count, digest = self._threads.get(thread) or (0, hashlib.sha256())
            tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
            size = 0 if tensor is None else tensor.numel()
            # One rank may have nothing to say in a broadcast but its length: sizes are equal.
            digest.update(f"{name} {size};".encode())
            self._threads[thread] = (count + 1, digest)
            return function(*args, **kwargs)

        return counted

    def report(self) -> dict[str, list[Any]]:
        """Thread -> [calls, digest]."""
        return {name: [count, d.hexdigest()[:16]] for name, (count, d) in self._threads.items()}


def run_probed_scheduler(
    server_args: ServerArgs,
    port_args: PortArgs,
    tp_rank: int,
    dp_rank: int,
    pipe_writer: Connection,
) -> None:
    """As `run_scheduler_process`, and the report."""
    collectives = CollectiveLog()
    collectives.install()
    scheduler, ready = make_scheduler(server_args, port_args, tp_rank, dp_rank)
    _slow_down(scheduler, tp_rank)
    scheduler.reports.freeze_gc()
    pipe_writer.send(ready)
    pipe_writer.close()
    scheduler.run()
    report = {
        "rank": tp_rank,
        "collectives": collectives.report(),
        "replays": _replays(scheduler),
        "tree": _nodes(scheduler),
        "pools": _pools(scheduler),
    }
    folder = Path(os.environ[FOLDER])
    (folder / f"rank{tp_rank}.json").write_text(json.dumps(report))
    scheduler.tree_cache.shutdown()


def _slow_down(scheduler: Scheduler, tp_rank: int) -> None:
    rank, _, seconds = os.environ.get(SLOW, "").partition(":")
    controller = scheduler.tree_cache.hicache_controller()
    if not seconds or int(rank) != tp_rank or controller is None:
        return
    delay_s = float(seconds)

    def hook(kind: str, layer: int) -> None:
        if torch.cuda.is_available():
            # On the copies' stream, as slow hardware would be; not on the thread that submits.
            torch.cuda._sleep(int(delay_s * 1.5e9))
        else:
            time.sleep(delay_s)

    controller._copy_hook = hook


def _replays(scheduler: Scheduler) -> dict[str, int]:
    """Captured steps that were replayed, by kind."""
    target = scheduler.worker
    runner = getattr(target, "target_runner", None) or getattr(target, "model_runner", None)
    found: dict[str, int] = {}
    decode = getattr(runner, "decode_runner", None)
    if decode is not None:
        found["decode"] = int(getattr(decode, "num_steps", 0))
    prefill = getattr(runner, "prefill_runner", None)
    if prefill is not None:
        found["prefill"] = int(prefill.num_steps)
    graphs = getattr(target, "graphs", None)
    if graphs is not None:
        found |= {str(kind.value): count for kind, count in graphs.num_steps.items()}
    return found


def _nodes(scheduler: Scheduler) -> list[list[Any]]:
    """Every node of the cache, by id."""
    tree = scheduler.tree_cache
    if not isinstance(tree, ComponentTree):
        return []
    return sorted(_node(node) for node in tree.iter_nodes())


def _node(node: TreeNode) -> list[Any]:
    parent = None if node.parent is None else node.parent.id
    data = [
        [
            None if part.value is None else part.value.tolist(),
            None if part.host_value is None else part.host_value.tolist(),
            part.lock_ref,
            part.host_lock_ref,
        ]
        for part in node.data
    ]
    times = [node.hit_count, node.last_access_time, node.creation_time]
    return [node.id, parent, list(node.key.token_ids), data, times]


def _pools(scheduler: Scheduler) -> dict[str, Any]:
    """What is left in the pools; `error`: the equation that does not hold, None: all do."""
    found: dict[str, Any] = {"error": None}
    try:
        _settle(scheduler)
        scheduler.checker.check_idle()
        found["cached"] = scheduler.tree_cache.evictable_size()
        if not scheduler.flush_cache():
            raise RuntimeError("requests are left")
        scheduler.checker.check_idle()
        allocator = scheduler.token_to_kv_pool_allocator
        found["slots"] = [allocator.available_size(), allocator.size]
        rows = scheduler.req_to_token_pool
        found["rows"] = [rows.available_size(), rows.size]
        controller = scheduler.tree_cache.hicache_controller()
        if controller is not None:
            pools = [entry.host_pool for entry in controller.host_pools.entries]
            found["host"] = [[pool.available_size(), pool.size] for pool in pools]
        pairs = [found["slots"], found["rows"], *found.get("host", [])]
        if any(free != size for free, size in pairs):
            raise RuntimeError(f"not everything is free after a flush: {pairs}")
    except RuntimeError as error:
        found["error"] = str(error)
    return found


def _settle(scheduler: Scheduler) -> None:
    """Until this rank's copies and storage work are done; both ranks step alike."""
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        pending = scheduler.tree_cache.has_pending_transfers()
        flag = torch.tensor([1 if pending else 0])
        group = getattr(scheduler.receiver, "_cpu_group", None)
        if group is not None:
            dist.all_reduce(flag, group=group)
        if not int(flag[0]):
            return
        scheduler.tree_cache.check_hicache_events()
        time.sleep(0.01)
