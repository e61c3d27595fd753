"""The one order of a weight update, seen from a host that notes what is asked of it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
)
from sglang.srt.managers.scheduler_update_weights_mixin import (
    SchedulerUpdateWeightsMixin,
    WeightUpdateHost,
    apply_weight_update,
)
from sglang.srt.model_executor.memory_saver import MemorySaver
from sglang.srt.model_executor.weight_updater import WeightUpdateResult
from sglang.srt.platforms import init_platform


class FakeUpdater:
    """Its fingerprint changes when `load` says so."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self.fingerprint = "a"
        self.weights_mixed = False

    def kv_fingerprint(self) -> str:
        return self.fingerprint

    def describe_mixed(self) -> str:
        return ""

    def wait_for_all_ranks(self) -> None:
        self._log.append("barrier")

    def agree(self, action: Any) -> str | None:
        try:
            action()
        except ValueError as error:
            return str(error)
        return None

    def weights_lost(self, is_kept: Any) -> None:
        self._log.append("lost")


class FakeHost:
    """`busy`: what is left after an abort; None: idle."""

    def __init__(self, busy: str | None = None) -> None:
        self.log: list[str] = []
        self.weight_updater = FakeUpdater(self.log)
        self.memory_saver = MemorySaver(enabled=True)
        self.tree_cache = self
        self.reports = self
        self.timed: list[str] = []
        self.busy = busy
        self.flushes = True
        self.version = "0"

    def settle_requests(self, abort_all: bool) -> str | None:
        self.log.append("abort" if abort_all else "settle")
        return self.busy

    def on_weight_update(self, source: str, elapsed_s: float) -> None:
        assert elapsed_s >= 0
        self.timed.append(source)

    def prepare_weights_update(self) -> None:
        self.log.append("prepare")

    def flush_cache(self, empty_cache: bool = True) -> bool:
        self.log.append("flush")
        return self.flushes

    def isolate_cached_kv(self) -> None:
        self.log.append("isolate")

    def stamp_weight_version(self, version: str) -> None:
        self.log.append("stamp")
        self.version = version


@pytest.fixture(autouse=True)
def platform() -> None:
    init_platform("cpu")


def update(
    host: FakeHost,
    *,
    success: bool = True,
    writes: bool = True,
    discarded: str | None = None,
    **fields: Any,
) -> Any:
    def load() -> WeightUpdateResult:
        host.log.append("load")
        if writes:
            host.weight_updater.fingerprint = "b"
        mixed = "" if success else "the target lacks 3 of 4 tensors"
        return WeightUpdateResult(
            success=success, message="Done.", weights_mixed=not success, mixed_tensors=mixed
        )

    def discard() -> str | None:
        host.log.append("discard")
        return discarded

    return apply_weight_update(
        cast(WeightUpdateHost, host),
        UpdateWeightFromDiskReqInput(model_path="new", **fields),
        load,
        discard=discard,
    )


def test_with_a_flush() -> None:
    host = FakeHost()
    reply = update(host, weight_version="7", abort_all_requests=True)
    assert host.log == ["abort", "prepare", "load", "flush", "stamp", "barrier"]
    assert reply.success and reply.message == "Done. Weight version updated to 7."
    assert host.timed == ["disk"]


def test_without_a_flush_old_kv_is_isolated() -> None:
    host = FakeHost(busy="#running-req: 1")
    assert update(host, flush_cache=False).success
    assert host.log == ["settle", "prepare", "load", "isolate", "barrier"]


def test_a_flush_that_cannot_be_touches_nothing_and_takes_what_is_sent() -> None:
    host = FakeHost(busy="#running-req: 1")
    reply = update(host, weight_version="7")
    assert host.log == ["settle", "discard", "barrier"]
    assert not reply.success and "#running-req: 1" in reply.message and host.version == "0"
    assert update(host, discarded="Group g was closed.").message.endswith(" Group g was closed.")


@pytest.mark.parametrize(("writes", "end"), [(True, "flush"), (False, "isolate")])
def test_a_failure_leaves_no_kv_of_what_was_overwritten(writes: bool, end: str) -> None:
    host = FakeHost()
    reply = update(host, success=False, writes=writes, weight_version="7")
    assert host.log == ["settle", "prepare", "load", end, "barrier"]
    assert not reply.success and reply.weights_mixed and host.version == "0"
    assert reply.message == (
        "Done. The weights are mixed until all have come: the target lacks 3 of 4 tensors."
    )


def test_a_flush_that_fails_after_all_is_a_broken_invariant() -> None:
    host = FakeHost()
    host.flushes = False
    with pytest.raises(RuntimeError, match="idle before the update"):
        update(host)


def memory(host: FakeHost, what: str, tags: list[str] | None) -> Any:
    mixin = SchedulerUpdateWeightsMixin
    if what == "release":
        return mixin.release_memory_occupation(
            cast(Any, host), ReleaseMemoryOccupationReqInput(tags=tags)
        )
    return mixin.resume_memory_occupation(
        cast(Any, host), ResumeMemoryOccupationReqInput(tags=tags)
    )


def test_released_weights_refuse_updates() -> None:
    host = FakeHost()
    assert memory(host, "release", ["weights"]).released_tags == ["weights"]
    assert "flush" not in host.log
    reply = update(host, flush_cache=False)
    assert not reply.success and "released" in reply.message and "load" not in host.log
    assert memory(host, "resume", ["weights"]).success
    assert host.log[-3:] == ["lost", "isolate", "barrier"]


def test_memory_is_not_released_under_requests() -> None:
    host = FakeHost(busy="#queue-req: 2")
    reply = memory(host, "release", None)
    assert not reply.success and "#queue-req: 2" in reply.message
    assert not host.memory_saver.released and "flush" not in host.log
    host.busy = None
    assert memory(host, "release", None).success and "flush" in host.log
    again = memory(host, "release", ["kv_cache"])
    assert not again.success and "already released" in again.message
    assert host.log.count("flush") == 1
