"""The other side of weight update groups, for tests: a trainer in this process, and a loop."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from sglang.srt.model_executor.weight_updater import WeightUpdater, WeightUpdateResult
from sglang.srt.utils.network import get_free_port


class ThreadTrainer:
    """Rank 0 of a gloo group, which torch's table of this process's groups does not know.

    Opens its store at once; `join` waits for the members.
    """

    def __init__(
        self, name: str, world_size: int = 2, port: int | None = None, timeout_s: float = 20.0
    ) -> None:
        self.port = get_free_port() if port is None else port
        self._name = name
        self._world_size = world_size
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._store = dist.TCPStore(
            "127.0.0.1", self.port, world_size, True, self._timeout, wait_for_workers=False
        )
        self._group: Any = None

    def place(self, rank_offset: int = 1) -> tuple[str, int, int, int, str, str]:
        """The arguments of `init_group`."""
        return "127.0.0.1", self.port, rank_offset, self._world_size, self._name, "gloo"

    def join(self) -> threading.Thread:
        """Join in a thread, which is returned."""
        thread = threading.Thread(target=self._join, name=f"trainer-{self._name}", daemon=True)
        thread.start()
        return thread

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Wait until the members have it."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()

    def _join(self) -> None:
        store: dist.Store = self._store
        for prefix in (self._name, f"{self._name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        with contextlib.suppress(RuntimeError):  # members that never come
            self._group = dist.ProcessGroupGloo(store, 0, self._world_size, timeout=self._timeout)


class Opening:
    """One `init_group` of an updater; the test is its loop."""

    def __init__(self, updater: WeightUpdater, *place: Any) -> None:
        self._updater = updater
        self.results: list[WeightUpdateResult] = []
        updater.init_group(*place, on_end=self.results.append)

    def wait(self, timeout_s: float = 60.0) -> WeightUpdateResult:
        """The result. Collective, as the loop of a scheduler is."""
        deadline = time.monotonic() + timeout_s
        while not self.results:
            assert time.monotonic() < deadline, "the group neither opens nor fails"
            self._updater.poll_groups()
            time.sleep(0.005)
        [result] = self.results
        return result
