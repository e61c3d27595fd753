"""What the schedulers of two tensor-parallel ranks decide by a clock: the same on both."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from sglang.srt.distributed.parallel_state import (
    destroy_distributed,
    get_tp_group,
    init_distributed,
)
from sglang.srt.managers import finish_check
from sglang.srt.mem_cache.storage_control import group_min_reduce
from sglang.srt.utils.network import get_free_ports
from sglang.test.fakes.scheduler_harness import SchedulerHarness
from sglang.test.forked import run_in_forks

# Each letter more takes 1.6 times as long.
EXPLODING = r"(\w|\w\w)+[A-Z]"


def _rank(rank: int, port: int, limit_s: float) -> tuple[dict[str, Any] | None, int, int]:
    init_distributed(2, rank, f"tcp://127.0.0.1:{port}", timeout_s=30)
    group = get_tp_group().cpu_group
    assert group is not None
    harness = SchedulerHarness(min_reduce=group_min_reduce(group))
    harness.generate("r", range(3, 9), 60, stop_regex=EXPLODING, ignore_eos=True)
    harness.generate("other", range(3, 9), 60, ignore_eos=True)
    # A machine that does less at the same time.
    with patch.object(finish_check, "REGEX_TIMEOUT_S", limit_s):
        harness.run_until_idle()
    seen = harness.finish("r"), len(harness.tokens("r")), len(harness.tokens("other"))
    destroy_distributed()
    return seen


def test_search_too_slow_for_one_rank_ends_the_request_on_both_at_one_token() -> None:
    (port,) = get_free_ports(1)
    first, second = run_in_forks((_rank, (0, port, 0.2)), (_rank, (1, port, 0.002)))
    assert first[1:] == second[1:] and first[1] < 60 and first[2] == 60
    for finish, *_ in (first, second):
        assert finish is not None and finish["type"] == "abort" and finish["status_code"] == 400
        assert "takes too long to match" in finish["message"]
