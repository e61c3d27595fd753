"""From free memory to the number of KV tokens and request rows.

Pure arithmetic on numbers that the model runner has measured. Called once at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass

# On a CPU the KV cache shares its memory with everything else on the machine, so without
# `--mem-fraction-static` only this share of what is free is taken ...
CPU_DEFAULT_SHARE = 0.25
# ... and no more than this many full contexts: beyond it a CPU could not serve the requests.
CPU_DEFAULT_CONTEXTS = 16
# Rows of the request table when `--max-running-requests` is not given.
DEFAULT_MAX_RUNNING = {"cpu": 256, "cuda": 4096}
MIN_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What the sizing starts from, per rank; bytes and tokens.

    `free_bytes`: free memory once the weights are loaded. `total_bytes`: the device's memory.
    `bytes_per_token`: KV of all layers (target and draft) for one token.
    """

    device: str
    total_bytes: int
    free_bytes: int
    bytes_per_token: int
    context_len: int
    page_size: int
    mem_fraction_static: float | None
    max_total_tokens: int | None


def profile_max_num_tokens(budget: MemoryBudget) -> int:
    """KV tokens of the pool: whole pages, capped by `--max-total-tokens`.

    With `mem_fraction_static` f, weights and KV together may use f of the device's memory.
    Raises ValueError when not even a short prompt would fit.
    """
    if budget.mem_fraction_static is not None:
        reserve = budget.total_bytes * (1.0 - budget.mem_fraction_static)
        num_tokens = int((budget.free_bytes - reserve) // budget.bytes_per_token)
    else:
        num_tokens = int(budget.free_bytes * CPU_DEFAULT_SHARE // budget.bytes_per_token)
        num_tokens = min(num_tokens, CPU_DEFAULT_CONTEXTS * budget.context_len)
    if budget.max_total_tokens is not None:
        if budget.mem_fraction_static is None:
            num_tokens = int(budget.free_bytes * 0.9 // budget.bytes_per_token)
        num_tokens = min(num_tokens, budget.max_total_tokens)
    num_tokens = num_tokens // budget.page_size * budget.page_size
    if num_tokens < max(MIN_TOKENS, budget.page_size):
        raise ValueError(
            f"the KV cache would hold only {max(num_tokens, 0)} tokens "
            f"({budget.free_bytes / 1e9:.2f} GB free, {budget.bytes_per_token} bytes a token): "
            "raise --mem-fraction-static, raise --max-total-tokens or take a smaller page"
        )
    return num_tokens


def num_window_tokens(
    num_tokens: int, *, ratio: float, window: int, page_size: int, step_slots: int
) -> int:
    """Rows for layers with a window beside a pool of `num_tokens` slots: whole pages.

    As many as `ratio` says, but so many at least that one request can always go on: a window that
    the prefix cache keeps for it, one of its own, and a step. Never more than there are slots.
    """
    least = 2 * window + window // 4 + 6 * page_size + 2 * step_slots
    wanted = max(int(num_tokens * ratio), least)
    return min(num_tokens, -(-wanted // page_size) * page_size)


def resolve_max_running_requests(
    requested: int | None, *, device: str, max_num_tokens: int, page_size: int
) -> int:
    """Rows of the request table: as asked, but never more than pages to put one token in."""
    limit = requested if requested is not None else DEFAULT_MAX_RUNNING[device]
    return max(1, min(limit, max_num_tokens // page_size))
