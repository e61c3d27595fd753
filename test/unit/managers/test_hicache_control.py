"""Storage as its operators see it: status, attach, detach and clear, also when a backend hangs."""

from __future__ import annotations

import logging
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
from sglang.srt.mem_cache import storage_threads
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.storage_threads import CallWatch
from sglang.test.fakes.controller_rig import Gate, MemoryStore
from sglang.test.fakes.hicache_engine import HiCacheEngine

CONFIG = '{"prefetch_threshold": 1}'


class Operated:
    """A tree over the real controller, and the requests of its operators."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.engine = HiCacheEngine(
            HiRadixCache,
            page_size=4,
            size=160,
            host_size=160,
            controller_class=HiCacheController,
            store=self.store,
            storage_backend=None,
        )
        self.control = HiCacheControl(
            self.engine.tree,
            served_model_name="m",
            storage_backend=None,
            extra_config=None,
            prefetch_policy="timeout",
            write_policy="write_through",
        )
        self._handlers = self.control.handlers(lambda: None)

    def call(self, request: Any) -> ControlReqOutput:
        return self._handlers[type(request)](request)

    def attach(self, config: str | None = CONFIG, **policies: str) -> ControlReqOutput:
        return self.call(
            AttachHiCacheStorageReqInput(
                hicache_storage_backend="memory",
                hicache_storage_backend_extra_config_json=config,
                **policies,
            )
        )

    def detach(self) -> ControlReqOutput:
        return self.call(DetachHiCacheStorageReqInput())

    def tick_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            self.engine.tick()
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


def test_a_backend_that_cannot_be_let_go_of_is_not_called_attached(
    caplog: pytest.LogCaptureFixture,
) -> None:
    operated = Operated()
    operated.engine.any_controller._join_timeout_s = 0.2
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
    watch.hang_warning_s = 0.05
    caplog.set_level(logging.WARNING)
    assert operated.attach().success
    gate = operated.hang()
    operated.tick_until(lambda: bool(caplog.messages))
    time.sleep(0.2)
    (message,) = caplog.messages
    assert message.startswith("Storage backend memory hangs: a call of hicache-backup has not")
    gate.open()
    operated.tick_until(lambda: not operated.engine.tree.has_pending_transfers())
    assert "hicache-backup returned after" in caplog.messages[1]
    gate = operated.hang(100)  # so soon after the first it is no news
    time.sleep(0.2)
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
