"""From free memory to the number of recurrent states: one a running request, the rest snapshots.

Pure arithmetic. Called once at start-up, before the KV pool is sized with what is left.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.model_executor.kv_cache_sizing import CPU_DEFAULT_SHARE, DEFAULT_MAX_RUNNING

# States for each request that may run, where memory has room for more: beyond it snapshots hold
# prefixes whose KV is long gone. Where few requests may run, at least so many in total.
_STATES_PER_REQUEST = 4
_ENOUGH_STATES = 512
# The initial state and that of requests that pad a batch; see `MambaPool`.
_EXTRA_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBudget:
    """What the sizing starts from, per rank; bytes as in `MemoryBudget`.

    `ratio`: memory of states / memory of KV. `max_states`: states wanted in total, None: by ratio.
    `keep_snapshots`: a prefix cache will ask for them.
    """

    device: str
    total_bytes: int
    free_bytes: int
    bytes_per_state: int
    mem_fraction_static: float | None
    ratio: float
    max_states: int | None
    max_running_requests: int | None
    keep_snapshots: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCounts:
    """`max_running`: requests that can have a state of their own."""

    max_running: int
    num_snapshots: int

    def num_bytes(self, bytes_per_state: int) -> int:
        """Memory of the pool with these numbers."""
        return (self.max_running + self.num_snapshots + _EXTRA_SLOTS) * bytes_per_state


def num_states_that_fit(budget: StateBudget) -> int:
    """States in total, as wanted or as the ratio allows. Raises ValueError where it is too few."""
    limit = budget.max_running_requests or DEFAULT_MAX_RUNNING[budget.device]
    if budget.max_states is not None:
        num_states = budget.max_states
    else:
        usable = budget.free_bytes * CPU_DEFAULT_SHARE
        if budget.mem_fraction_static is not None:
            reserve = budget.total_bytes * (1.0 - budget.mem_fraction_static)
            usable = budget.free_bytes - reserve
        share = usable * budget.ratio / (1.0 + budget.ratio)
        most = max(limit * _STATES_PER_REQUEST, _ENOUGH_STATES)
        num_states = min(int(share // budget.bytes_per_state) - _EXTRA_SLOTS, most)
    least = 2 if budget.keep_snapshots else 1
    if num_states < least:
        raise ValueError(
            f"room for {max(num_states, 0)} recurrent states of {budget.bytes_per_state} bytes, "
            f"{least} at least are needed: raise --mamba-full-memory-ratio, --mem-fraction-static "
            "or --max-mamba-cache-size"
        )
    return num_states


def divide_states(budget: StateBudget, num_states: int) -> StateCounts:
    """Between running requests (half at most, where there are snapshots) and snapshots."""
    limit = budget.max_running_requests or DEFAULT_MAX_RUNNING[budget.device]
    running = min(limit, num_states // 2 if budget.keep_snapshots else num_states)
    return StateCounts(
        max_running=running, num_snapshots=num_states - running if budget.keep_snapshots else 0
    )
