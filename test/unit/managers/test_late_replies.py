"""What schedulers say after the time-out of a control request is told, and holds for the front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    TokenizedGenerateReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
    UpdateWeightVersionReqInput,
    WeightUpdateReqOutput,
)
from sglang.srt.managers.request_errors import EngineUnavailableError
from sglang.test.fakes.front import Front, run_with_front, until

FOUR = {"max_new_tokens": 4}
LIMIT_S = 0.05


@asynccontextmanager
async def timing_out(front: Front, num_back: int | None = None) -> AsyncIterator[None]:
    """The call inside ends with a time-out; all schedulers, or so many, handle it afterwards."""
    for scheduler in front.schedulers:
        scheduler.silent = True
    await asyncio.sleep(0.05)  # one may be waiting for a message right now
    with envs.SGLANG_CONTROL_TIMEOUT.override(LIMIT_S):
        with pytest.raises(EngineUnavailableError, match="no reply within 0.05 s"):
            yield
    for scheduler in front.schedulers[:num_back]:
        scheduler.silent = False


async def all_told(front: Front) -> None:
    await until(lambda: not front.manager.control._pending)


def test_a_late_reply_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(front: Front) -> None:
        front.scheduler.flush_ok = False
        async with timing_out(front):
            await front.manager.flush_cache()
        await all_told(front)
        [record] = [r for r in caplog.records if "FlushCacheReqInput" in r.message]
        assert record.levelname == "WARNING"
        assert "too late for its client: failure" in record.message
        await front.manager.control.ping(5)

    run_with_front(tmp_path, body)


def test_an_update_that_succeeds_late_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(front: Front) -> None:
        manager = front.manager
        front.scheduler.weight_reply = WeightUpdateReqOutput(message="All was loaded.")
        async with timing_out(front):
            await manager.update_weights_from_disk(
                UpdateWeightFromDiskReqInput(model_path="new", weight_version="7")
            )
        assert manager.weight_version == "default", "nobody knows yet"
        await all_told(front)
        assert (manager.weight_version, manager.model_path) == ("7", "new")
        assert manager.served_model_name == "new"
        assert "too late for its client: success, All was loaded." in caplog.text

        async with timing_out(front):
            await manager.update_weight_version(UpdateWeightVersionReqInput(new_version="8"))
        await all_told(front)
        assert manager.weight_version == "8"

    run_with_front(tmp_path, body)


def test_an_update_that_fails_late_is_none_but_mixes(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.weight_reply = WeightUpdateReqOutput(
            success=False, message="Half of it.", weights_mixed=True, mixed_tensors="the target"
        )
        async with timing_out(front):
            await front.manager.weights.from_tensor(
                UpdateWeightsFromTensorReqInput(serialized_named_tensors=[], weight_version="7")
            )
        await all_told(front)
        assert front.manager.weight_version == "default"
        assert front.manager.weights.state.mixed_tensors == "the target"

    run_with_front(tmp_path, body)


def test_replicas_that_are_late_one_by_one(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        message = UpdateWeightVersionReqInput(new_version="8", abort_all_requests=False)
        async with timing_out(front, num_back=1):
            await front.manager.update_weight_version(message)
        await until(lambda: front.scheduler.weight_version == "8")
        await asyncio.sleep(0.05)
        assert front.manager.weight_version == "default"
        front.schedulers[1].silent = False
        await all_told(front)
        assert front.manager.weight_version == "8"

    run_with_front(tmp_path, body, dp_size=2)


def test_a_cancelled_call_holds_as_well(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.silent = True
        await asyncio.sleep(0.05)
        message = UpdateWeightVersionReqInput(new_version="8", abort_all_requests=False)
        call = asyncio.create_task(front.manager.update_weight_version(message))
        await asyncio.sleep(0.02)
        call.cancel()
        front.scheduler.silent = False
        await all_told(front)
        assert call.cancelled() and front.manager.weight_version == "8"

    run_with_front(tmp_path, body)


def test_who_is_continued_late_goes_on(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        await front.manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        held = asyncio.create_task(front.generate(text="b", sampling_params=FOUR))
        async with timing_out(front):
            await front.manager.continue_generation(ContinueGenerationReqInput())
        assert front.manager.is_pause
        assert (await held)["text"] == "bbbb" and not front.manager.is_pause

    run_with_front(tmp_path, body)


def test_a_late_continue_does_not_end_the_next_pause(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        manager, pause = front.manager, PauseGenerationReqInput(mode="in_place")
        await manager.pause_generation(pause)
        async with timing_out(front):
            await manager.continue_generation(ContinueGenerationReqInput())
        await manager.pause_generation(pause)
        await all_told(front)
        assert manager.is_pause and front.scheduler.paused == "in_place"
        await manager.continue_generation(ContinueGenerationReqInput())
        assert not manager.is_pause and front.scheduler.paused is None

    run_with_front(tmp_path, body)


def test_memory_that_is_released_late_is_held_for_and_comes_back(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        manager = front.manager
        front.scheduler.weight_reply = WeightUpdateReqOutput(released_tags=["kv_cache"])
        front.scheduler.paused = "released"  # nothing can be computed
        async with timing_out(front):
            await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        early = asyncio.create_task(front.generate(text="a", sampling_params=FOUR))
        await until(lambda: manager.is_holding)
        await until(lambda: len(front.scheduler.of_type(TokenizedGenerateReqInput)) == 1)
        late = asyncio.create_task(front.generate(text="b", sampling_params=FOUR))
        await asyncio.sleep(0.05)
        assert len(front.scheduler.of_type(TokenizedGenerateReqInput)) == 1

        front.scheduler.weight_reply = WeightUpdateReqOutput(released_tags=[])
        async with asyncio.timeout(5):  # the early one cannot end before
            await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput())
        front.scheduler.paused = None
        assert [(await each)["text"] for each in (early, late)] == ["aaaa", "bbbb"]

    run_with_front(tmp_path, body)
