"""Storage as its operators see it: status, attach, detach and clear, also when a backend hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.hicache_control import HiCacheControl
from sglang.srt.managers.io_struct import (
    AttachHiCacheStorageReqInput,
    ClearHiCacheReqInput,
    ControlReqOutput,
    DetachHiCacheStorageReqInput,
)
from sglang.srt.mem_cache import backend_opening, storage_threads
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.storage_threads import CallWatch
from sglang.test.fakes.controller_rig import Gate, MemoryStore
from sglang.test.fakes.hicache_engine import HiCacheEngine

CONFIG = '{"prefetch_threshold": 1}'


def attachment(config: str | None = CONFIG, **policies: str) -> AttachHiCacheStorageReqInput:
    return AttachHiCacheStorageReqInput(
        hicache_storage_backend="memory",
        hicache_storage_backend_extra_config_json=config,
        **policies,
    )


class Operated:
    """A tree over the real controller, and the requests of its operators."""

    def __init__(self, **options: Any) -> None:
        self.store = MemoryStore()
        self.engine = HiCacheEngine(
            HiRadixCache,
            page_size=4,
            size=160,
            host_size=160,
            controller_class=HiCacheController,
            store=self.store,
            storage_backend=None,
            **options,
        )
        self.control = HiCacheControl(
            self.engine.tree,
            served_model_name="m",
            storage_backend=None,
            extra_config=None,
            prefetch_policy="timeout",
            write_policy="write_through",
        )
        self.busy: str | None = None
        self.now = 1000.0
        self.late_replies: list[ControlReqOutput] = []
        self._handlers = self.control.start(
            lambda: self.busy, lambda recv, reply: self.late_replies.append(reply)
        )

    def begin(self, request: Any) -> ControlReqOutput | None:
        return self._handlers[type(request)](request)

    def call(self, request: Any) -> ControlReqOutput:
        reply = self.begin(request)
        return self.end() if reply is None else reply

    def end(self) -> ControlReqOutput:
        """The answer that comes later."""
        self.tick_until(lambda: bool(self.late_replies))
        return self.late_replies.pop()

    def attach(self, config: str | None = CONFIG, **policies: str) -> ControlReqOutput:
        return self.call(attachment(config, **policies))

    def block_making(self) -> threading.Event:
        """Let backends wait for the event while they are made."""
        event = threading.Event()

        def make(name: str, config: object) -> MemoryStore:
            assert event.wait(10)
            return self.store

        self.engine.any_controller._backend_factory = make
        return event

    def detach(self) -> ControlReqOutput:
        return self.call(DetachHiCacheStorageReqInput())

    def tick_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            self.engine.tick()
            self.now += 0.02
            self.control.poll(self.now)
            time.sleep(0.001)

    def hang(self, first: int = 0) -> Gate:
        """Let a write hang in the backend."""
        gate = Gate("set kv")
        self.store.hook = gate
        self.engine.run(list(range(first, first + 17)))
        self.tick_until(gate.entered.is_set)
        return gate


def test_what_is_attached_takes_other_policies_and_no_other_config() -> None:
    operated = Operated()
    assert operated.attach().success
    before = operated.control.status()
    reply = operated.attach('{"prefetch_threshold": 2}', hicache_write_policy="write_back")
    assert not reply.success and "another extra config; detach it" in reply.message
    assert operated.control.status() == before
    for same in (CONFIG, '{ "prefetch_threshold":1 }', None):
        assert operated.attach(same, hicache_storage_prefetch_policy="best_effort").success
    expected = {**before, "hicache_storage_prefetch_policy": "best_effort"}
    assert operated.control.status() == expected
    assert operated.detach().success
    assert operated.attach('{"prefetch_threshold": 2}').success
    config = operated.control.status()["hicache_storage_backend_extra_config"]
    assert config == '{"prefetch_threshold": 2}'
    operated.engine.tree.shutdown()


def test_the_scheduler_goes_on_while_a_backend_connects() -> None:
    operated = Operated()
    connected = operated.block_making()
    begun = time.monotonic()
    assert operated.begin(attachment()) is None
    operated.control.poll(operated.now)
    assert time.monotonic() - begun < 1
    status = operated.control.status()
    assert status["hicache_storage_backend"] is None
    assert status["hicache_storage_backend_attaching"] == "memory"
    second = operated.attach()
    assert not second.success and "is being attached; wait" in second.message
    operated.engine.run(list(range(17)))
    connected.set()
    assert operated.end().success
    status = operated.control.status()
    assert status["hicache_storage_backend"] == "memory"
    assert "hicache_storage_backend_attaching" not in status
    assert not operated.late_replies
    operated.engine.tree.shutdown()


def _tick_for(operated: Operated, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    operated.tick_until(lambda: time.monotonic() > deadline)


def test_a_backend_that_is_ready_waits_for_an_idle_moment() -> None:
    operated = Operated()
    for waited_s, is_attached in ((5.0, True), (31.0, False)):
        operated.busy = None
        assert operated.begin(attachment()) is None
        operated.busy = "#running-req: 1"
        _tick_for(operated, 0.1)
        assert not operated.late_replies and not operated.engine.tree.enable_storage
        operated.now += waited_s
        operated.busy = None if is_attached else operated.busy
        reply = operated.end()
        assert reply.success == is_attached == operated.engine.tree.enable_storage
        assert is_attached or "idle server only: #running-req: 1" in reply.message
        operated.busy = None
        assert operated.detach().success
    operated.engine.tree.shutdown()


def test_an_attachment_under_way_can_be_called_off() -> None:
    operated = Operated()
    closed = threading.Event()
    operated.store.close = closed.set  # type: ignore[method-assign]
    connected = operated.block_making()
    assert operated.begin(attachment()) is None
    assert operated.detach().success
    reply = operated.late_replies.pop()
    assert not reply.success and "before it was attached" in reply.message
    connected.set()
    assert closed.wait(10)  # what comes too late is closed
    assert not operated.engine.tree.enable_storage
    assert operated.attach().success
    operated.engine.tree.shutdown()


def test_a_backend_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_opening.BackendOpening.__init__, "__defaults__", (0.1,))
    operated = Operated()
    connected = operated.block_making()
    reply = operated.attach()
    assert not reply.success and reply.message == "memory has not answered for 0.1 s"
    connected.set()
    operated.engine.tree.shutdown()


def test_no_rank_attaches_what_another_could_not_make() -> None:
    others = [[0, -1], [1, -1]]  # one failed while one connects; then all have ended

    def min_reduce(values: list[int]) -> list[int]:
        return [min(pair) for pair in zip(values, others[0])] if len(values) == 2 else values

    operated = Operated(min_reduce=min_reduce)
    assert operated.begin(attachment()) is None
    time.sleep(0.1)
    operated.control.poll(operated.now)
    assert not operated.late_replies, "another rank has not ended"
    del others[0]
    reply = operated.end()
    assert not reply.success and "nother rank" in reply.message
    assert not operated.engine.tree.enable_storage


def test_a_backend_that_cannot_be_let_go_of_is_not_called_attached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    operated = Operated()
    operated.engine.any_controller._join_timeout_s = 0.1
    assert operated.attach().success
    gate = operated.hang()
    reply = operated.detach()
    assert not reply.success and "Storage is off meanwhile" in reply.message
    status = operated.control.status()
    assert status["hicache_storage_backend"] is None
    assert status["hicache_storage_backend_extra_config"] is None
    assert status["hicache_storage_backend_detaching"] == "memory"
    assert not operated.call(ClearHiCacheReqInput()).success
    assert "memory is being detached" in caplog.messages[-1]
    assert not operated.attach().success
    assert operated.control.status() == status
    gate.open()
    operated.tick_until(lambda: operated.detach().success)
    assert "hicache_storage_backend_detaching" not in operated.control.status()
    assert operated.attach('{"prefetch_threshold": 3}').success
    status = operated.control.status()
    assert status["hicache_storage_backend"] == "memory"
    assert status["hicache_storage_backend_extra_config"] == '{"prefetch_threshold": 3}'
    operated.engine.tree.shutdown()


def test_requests_are_served_while_a_backend_is_waited_for() -> None:
    operated = Operated()
    assert operated.attach().success
    gate = operated.hang()
    started = time.monotonic()
    assert operated.begin(DetachHiCacheStorageReqInput()) is None
    assert time.monotonic() - started < 1.0, "the scheduler waits for the backend"
    assert operated.control.status()["hicache_storage_backend_detaching"] == "memory"
    again = operated.begin(DetachHiCacheStorageReqInput())
    assert again is not None and "is being detached" in again.message
    attach = operated.begin(attachment())
    assert attach is not None and "is being detached" in attach.message
    operated.busy = "one request runs"
    for _ in range(100):
        operated.now += 0.02
        operated.engine.tick()
        operated.control.poll(operated.now)
    assert not operated.late_replies
    operated.busy = None
    gate.open()
    assert operated.end().success
    assert operated.attach().success
    operated.engine.tree.shutdown()


def test_a_clear_that_failed_is_told_why(caplog: pytest.LogCaptureFixture) -> None:
    operated = Operated()
    reply = operated.call(ClearHiCacheReqInput())
    assert (reply.success, reply.message) == (False, "no storage backend is attached")
    assert caplog.messages == ["Storage was not cleared: no storage backend is attached"]
    assert operated.attach().success
    assert operated.call(ClearHiCacheReqInput()) == type(reply)()
    operated.store.hook = lambda method, keys: (_ for _ in ()).throw(OSError("no"))
    reply = operated.call(ClearHiCacheReqInput())
    assert not reply.success and "memory failed" in reply.message
    operated.engine.tree.shutdown()


def test_a_call_that_hangs_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    operated = Operated()
    watch = operated.engine.any_controller.call_watch
    watch.hang_warning_s = 0.02
    caplog.set_level(logging.WARNING)
    assert operated.attach().success
    gate = operated.hang()
    operated.tick_until(lambda: bool(caplog.messages))
    time.sleep(0.1)
    (message,) = caplog.messages
    assert message.startswith("Storage backend memory hangs: a call of hicache-backup has not")
    gate.open()
    operated.tick_until(lambda: not operated.engine.tree.has_pending_transfers())
    assert "hicache-backup returned after" in caplog.messages[1]
    gate = operated.hang(100)  # so soon after the first it is no news
    time.sleep(0.1)
    gate.open()
    operated.tick_until(lambda: not operated.engine.tree.has_pending_transfers())
    assert len(caplog.messages) == 2
    operated.engine.tree.shutdown()


def test_one_call_is_warned_about_once_however_long_it_takes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_threads, "_HANG_WARNING_INTERVAL_S", 0.0)
    watch = CallWatch(hang_warning_s=0.0)
    for number in (1, 2):
        watch.begin()
        for _ in range(3):
            watch.check("memory")
        assert len(caplog.messages) == 2 * number - 1
        watch.end()
        watch.check("memory")
        assert len(caplog.messages) == 2 * number
