"""The waiting queue alone: who may enter, what entering begins, who is next, and who leaves how.

The cache is a real tree whose storage is a record of what it was asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from sglang.srt.managers.finish_check import FinishAbort
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import PrefillAdder, PrefillLimits, SchedulePolicy
from sglang.srt.managers.waiting_queue import QueueLimits, WaitingQueue
from sglang.srt.mem_cache.allocator import create_token_to_kv_pool_allocator
from sglang.srt.mem_cache.base_prefix_cache import CacheInitParams, InsertParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

POOL_SIZE = 64
NOW = 1000.0
FULL = (503, "The request queue is full.")


class RecordingCache(RadixCache):
    """A tree with a storage that fetches nothing and remembers what it was asked for."""

    backend: str | None = "Recorder"

    def __init__(self, params: CacheInitParams) -> None:
        super().__init__(params)
        self.prefetched: dict[str, list[int]] = {}  # rid -> tokens asked for
        self.is_fetching: set[str] = set()
        self.loaded: dict[str, int] = {}
        self.released: list[str] = []

    def storage_backend_name(self) -> str | None:
        return self.backend

    def prefetch_from_storage(
        self, rid: str, last_host_node: Any, new_input_tokens: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.prefetched[rid] = list(new_input_tokens)

    def check_prefetch_progress(self, rid: str) -> bool:
        return rid not in self.is_fetching

    def pop_prefetch_loaded_tokens(self, rid: str) -> int:
        return self.loaded.pop(rid, 0)

    def release_aborted_request(self, rid: str) -> None:
        self.released.append(rid)


@dataclass
class Rig:
    """A queue of these limits over an empty cache; `ended` collects whom it has turned away."""

    max_queued: int | None = None
    enable_priority: bool = False
    context_len: int = 100
    step_slots: int = 1
    policy: str = "fcfs"
    ended: list[tuple[str, int | None, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.allocator = create_token_to_kv_pool_allocator(POOL_SIZE, 1)
        self.cache = RecordingCache(
            CacheInitParams(
                req_to_token_pool=ReqToTokenPool(8, 128, "cpu"),
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
            )
        )
        self.queue = WaitingQueue(
            QueueLimits(
                max_queued=self.max_queued,
                enable_priority=self.enable_priority,
                context_len=self.context_len,
                pool_size=POOL_SIZE,
                step_slots=self.step_slots,
            ),
            policy=SchedulePolicy(
                self.policy, self.cache, enable_priority=self.enable_priority, seed=0
            ),
            tree_cache=self.cache,
            end=self._on_end,
        )

    def _on_end(self, req: Req, reason: FinishAbort) -> None:
        assert req not in list(self.queue)
        self.ended.append((req.rid, reason.status_code, reason.message))

    def adder(self, chunk_size: int | None = None, page_size: int = 1) -> PrefillAdder:
        limits = PrefillLimits(max_prefill_tokens=100, chunk_size=chunk_size, page_size=page_size)
        return PrefillAdder(
            limits,
            tree_cache=self.cache,
            allocator=self.allocator,
            running=[],
            new_token_ratio=0.0,
        )

    def add(self, *rids: str, now: float = NOW, **fields: Any) -> None:
        for rid in rids:
            self.queue.add(make_req(rid, **fields), now)

    @property
    def rids(self) -> list[str]:
        return [req.rid for req in self.queue]


def make_req(
    rid: str,
    prompt: Sequence[int] = (1, 2, 3),
    max_new_tokens: int | None = 4,
    priority: int | None = None,
) -> Req:
    recv = TokenizedGenerateReqInput(
        rid=rid,
        input_ids=array("i", prompt),
        sampling_params=SamplingParams(max_new_tokens=max_new_tokens),
        priority=priority,
    )
    return Req(recv, eos_token_ids=frozenset(), weight_version="default")


def rids_of(reqs: Sequence[Req]) -> list[str]:
    return [req.rid for req in reqs]


# -- in -----------------------------------------------------------------------------------------


def test_requests_wait_in_the_order_they_came():
    rig = Rig()
    assert len(rig.queue) == 0 and not rig.queue
    rig.add("a", "b")
    rig.add("c", now=NOW + 1)
    assert len(rig.queue) == 3 and rig.queue
    assert rig.rids == ["a", "b", "c"]
    assert [req.queue_entry_time for req in rig.queue] == [NOW, NOW, NOW + 1]
    assert "rid=b" in repr(rig.queue)


def test_entering_begins_to_fetch_what_the_tree_has_not():
    rig = Rig()
    slots = rig.allocator.alloc(3)
    assert slots is not None
    rig.cache.insert(InsertParams(key=rig.cache.make_key([1, 2, 3]), value=slots))
    rig.add("r", prompt=range(1, 9))
    assert rig.cache.prefetched == {"r": [4, 5, 6, 7]}  # one token is left to compute


def test_without_storage_entering_looks_nothing_up():
    rig = Rig()
    rig.cache.backend = None
    rig.add("r")
    assert rig.cache.prefetched == {}
    assert [req.last_node for req in rig.queue] == [None]


@pytest.mark.parametrize(
    ("prompt_len", "asked", "context_len", "step_slots", "granted"),
    [
        (10, 4, 100, 1, 4),
        (10, 80, 40, 1, 30),
        (10, None, 100, 1, POOL_SIZE - 10),
        (10, None, 100, 6, POOL_SIZE - 5 - 10),
        (POOL_SIZE - 1, 9, 100, 6, 1),
        (POOL_SIZE - 1, 0, 100, 6, 0),
        (50, 9, 40, 1, 0),
    ],
)
def test_the_output_is_capped_by_context_and_pool(
    prompt_len, asked, context_len, step_slots, granted
):
    rig = Rig(context_len=context_len, step_slots=step_slots)
    rig.add("r", prompt=range(prompt_len), max_new_tokens=asked)
    assert [req.max_new_tokens for req in rig.queue] == [granted]


def test_a_prompt_that_fills_the_pool_is_refused():
    rig = Rig(max_queued=0)
    rig.add("r", prompt=range(POOL_SIZE))
    text = f"The input ({POOL_SIZE} tokens) is longer than the KV cache ({POOL_SIZE} tokens)."
    assert rig.ended == [("r", 400, text)]
    assert not rig.queue and not rig.cache.prefetched


@pytest.mark.parametrize("max_queued", [0, 2])
def test_a_full_queue_refuses_the_newcomer(max_queued):
    rig = Rig(max_queued=max_queued)
    rig.add("a", "b", "c", priority=1)
    rig.add("urgent", priority=9)  # priorities are off
    assert rig.rids == ["a", "b"][:max_queued]
    assert rig.ended == [(rid, *FULL) for rid in ["a", "b", "c", "urgent"][max_queued:]]
    assert list(rig.cache.prefetched) == rig.rids and rig.cache.released == []


def test_a_full_queue_gives_up_the_last_of_the_least_important():
    rig = Rig(max_queued=3, enable_priority=True)
    rig.add("high", priority=5)
    rig.add("old", "young")  # no priority counts as 0
    rig.add("as-low", priority=0)
    assert rig.ended == [("as-low", *FULL)]
    rig.add("urgent", priority=1)
    assert rig.ended[1:] == [("young", *FULL)]
    assert rig.rids == ["high", "old", "urgent"]
    assert rig.cache.released == ["young"]


def test_a_full_queue_keeps_whose_client_has_begun_to_read():
    rig = Rig(max_queued=1, enable_priority=True)
    retracted = make_req("retracted")
    retracted.output_ids = [7]
    rig.queue.put_back(retracted, 0, NOW)
    rig.add("urgent", priority=9)
    assert rig.rids == ["retracted"] and rig.ended == [("urgent", *FULL)]


def test_retracted_requests_go_in_front_whatever_the_limits():
    rig = Rig(max_queued=1)
    rig.add("waits")
    for place, rid in enumerate(["first", "second"]):
        req = make_req(rid, max_new_tokens=None)
        req.queue_entry_time = NOW - 50
        rig.queue.put_back(req, place, NOW)
        assert req.queue_entry_time == NOW - 50
    assert rig.rids == ["first", "second", "waits"]
    assert list(rig.cache.prefetched) == ["waits", "first", "second"]
    assert rig.ended == []


# -- out ----------------------------------------------------------------------------------------


def test_admission_follows_the_policy_up_to_the_room():
    rig = Rig(policy="lof")
    for rid, max_new_tokens in (("short", 1), ("long", 9), ("middle", 5)):
        rig.add(rid, max_new_tokens=max_new_tokens)
    adder = rig.adder()
    rig.queue.admit(adder, 2)
    assert rids_of(adder.can_run) == ["long", "middle"]
    assert rig.rids == ["short"]
    assert rig.cache.released == []


@pytest.mark.parametrize("room", [0, -1])
def test_without_room_nobody_is_admitted(room):
    rig = Rig()
    rig.add("a")
    adder = rig.adder()
    rig.queue.admit(adder, room)
    assert adder.can_run == [] and rig.rids == ["a"]


def test_who_is_being_fetched_is_passed_over():
    rig = Rig()
    rig.add("slow", "ready")
    rig.cache.is_fetching.add("slow")
    rig.cache.loaded = {"slow": 2, "ready": 3}
    adder = rig.adder()
    rig.queue.admit(adder, 8)
    assert rids_of(adder.can_run) == ["ready"] and rig.rids == ["slow"]
    assert adder.can_run[0].storage_loaded_tokens == 3
    assert rig.cache.loaded == {"slow": 2}


def test_admission_stops_at_the_first_that_does_not_fit():
    rig = Rig()
    rig.add("a", prompt=range(10))
    rig.add("big", prompt=range(60))
    rig.add("small", prompt=range(10))
    adder = rig.adder()
    rig.queue.admit(adder, 8)
    assert rids_of(adder.can_run) == ["a"] and rig.rids == ["big", "small"]


def test_admission_stops_behind_a_prompt_that_was_cut():
    rig = Rig()
    rig.add("a", prompt=range(8))
    rig.add("cut", prompt=range(20))
    rig.add("next", prompt=range(2))
    # Cut to whole pages: 2 tokens of the chunk are left, in which the next one would fit.
    adder = rig.adder(chunk_size=18, page_size=4)
    rig.queue.admit(adder, 8)
    assert adder.rem_chunk == 2
    assert adder.new_chunked_req is adder.can_run[1]
    assert rids_of(adder.can_run) == ["a", "cut"] and rig.rids == ["next"]


def test_removal_gives_up_what_is_under_way_and_tells_nobody():
    rig = Rig()
    rig.add("x_0", "y_0", "x_1")
    assert rids_of(rig.queue.remove(lambda req: req.rid.startswith("x"))) == ["x_0", "x_1"]
    assert rig.rids == ["y_0"] and rig.cache.released == ["x_0", "x_1"]
    assert rig.queue.remove(lambda req: False) == []
    assert rig.rids == ["y_0"] and rig.ended == []


def test_waiting_ends_behind_the_limit(monkeypatch):
    rig = Rig()
    rig.add("old", now=NOW)
    rig.add("young", now=NOW + 1)
    monkeypatch.delenv("SGLANG_REQ_WAITING_TIMEOUT", raising=False)
    rig.queue.expire(NOW + 1e6)  # no limit
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "2.5")
    rig.queue.expire(NOW + 2.5)
    assert rig.rids == ["old", "young"]
    rig.queue.expire(NOW + 2.6)
    assert rig.rids == ["young"] and rig.cache.released == ["old"]
    assert rig.ended == [("old", 503, "Request waiting timeout reached (2.5 s).")]


def test_running_is_not_waiting(monkeypatch):
    """Waiting times add up, without the time in between; what has output waits for ever."""
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "10")
    rig = Rig()
    for place, rid in enumerate(["prompt", "output"]):
        req = make_req(rid)
        req.queue_entry_time, req.waited_s = NOW, 8.0
        req.output_ids = [7] if rid == "output" else []
        rig.queue.put_back(req, place, NOW + 60)
    rig.queue.expire(NOW + 62)
    assert rig.rids == ["prompt", "output"]
    rig.queue.expire(NOW + 62.1)
    assert rig.rids == ["output"]
    assert rig.ended == [("prompt", 503, "Request waiting timeout reached (10.0 s).")]
    rig.queue.expire(NOW + 1e6)
    assert rig.rids == ["output"]


def test_a_request_that_comes_back_is_as_old_as_it_was():
    rig = Rig(enable_priority=True)
    rig.add("younger", now=NOW + 1)
    req = make_req("back")
    req.queue_entry_time = NOW
    rig.queue.put_back(req, 0, NOW + 60)
    adder = rig.adder()
    rig.queue.admit(adder, 2)
    assert rids_of(adder.can_run) == ["back", "younger"]
