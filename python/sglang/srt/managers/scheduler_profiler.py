"""`/start_profile` and `/stop_profile` on one scheduler: torch's profiler around steps.

Writes one Chrome trace per rank. Scheduler thread only.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import ProfileReqInput

logger = logging.getLogger(__name__)

_ACTIVITIES = {
    "CPU": torch.profiler.ProfilerActivity.CPU,
    "GPU": torch.profiler.ProfilerActivity.CUDA,
}


def _available_activities() -> dict[str, torch.profiler.ProfilerActivity]:
    """What this machine's torch can record, by the names that requests use."""
    supported = torch.profiler.supported_activities()
    return {name: kind for name, kind in _ACTIVITIES.items() if kind in supported}


class SchedulerProfiler:
    """At most one profile at a time."""

    def __init__(self, tp_rank: int, dp_rank: int) -> None:
        self._rank_name = f"DP{dp_rank}-TP{tp_rank}"
        self._profiler: Any = None
        self._request: ProfileReqInput | None = None
        self._step = 0
        self._stop_at: int | None = None

    def handle(self, recv: ProfileReqInput) -> tuple[bool, str]:
        """Start or stop as `recv` says; returns (success, message)."""
        if recv.start:
            return self._arm(recv)
        if self._request is None:
            return False, "Profiling is not in progress. Call /start_profile first."
        return self._stop()

    def on_step(self) -> None:
        """Called before each step: begins and ends a profile that was asked for by step number."""
        self._step += 1
        if self._request is None:
            return
        if self._profiler is None and self._step >= (self._request.start_step or 0):
            problem = self._begin()
            if problem is not None:
                logger.warning("%s", problem)
        elif self._stop_at is not None and self._step >= self._stop_at:
            self._stop()

    def _arm(self, recv: ProfileReqInput) -> tuple[bool, str]:
        if self._request is not None:
            return False, "Profiling is already in progress. Call /stop_profile first."
        available = _available_activities()
        unknown = [a for a in recv.activities or [] if a not in available]
        if unknown:
            return False, f"Cannot record {unknown} here; available: {sorted(available)}."
        self._request = recv
        if recv.start_step is None:
            problem = self._begin()
            if problem is not None:
                return False, problem
        return True, "Profiling started."

    def _begin(self) -> str | None:
        """Start recording; returns what went wrong (then nothing is armed any more), or None."""
        recv = self._request
        if recv is None:
            return None
        available = _available_activities()
        names = recv.activities or sorted(available)
        try:
            self._profiler = torch.profiler.profile(
                activities=[available[name] for name in names],
                with_stack=bool(recv.with_stack),
                record_shapes=bool(recv.record_shapes),
            )
            self._profiler.start()
        except (RuntimeError, AssertionError) as error:
            self._request = self._profiler = None
            return f"The profiler could not start: {error}"
        self._stop_at = None if recv.num_steps is None else self._step + recv.num_steps
        logger.info("Profiling started at step %d", self._step)
        return None

    def _stop(self) -> tuple[bool, str]:
        """End the profile and write it; a folder that cannot be written is the client's fault."""
        recv, profiler = self._request, self._profiler
        self._request = self._profiler = self._stop_at = None
        if recv is None or profiler is None:
            return True, "Profiling stopped before its first step."
        profiler.stop()
        try:
            path = self._export(recv, profiler)
        except (OSError, RuntimeError) as error:
            logger.warning("The profile could not be written: %s", error)
            return False, f"The profile could not be written: {error}"
        logger.info("Profile written to %s", path)
        return True, f"Profile written to {path}."

    def _export(self, recv: ProfileReqInput, profiler: Any) -> Path:
        folder = Path(recv.output_dir or envs.SGLANG_TORCH_PROFILER_DIR.get())
        folder.mkdir(parents=True, exist_ok=True)
        prefix = f"{recv.profile_prefix}-" if recv.profile_prefix else ""
        stamp = recv.profile_id or str(time.time())
        path = folder / f"{prefix}{stamp}-{self._rank_name}.trace.json.gz"
        profiler.export_chrome_trace(str(path))
        return path
