"""The front's engine client against a fake scheduler: pauses and weight updates."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    TokenizedGenerateReqInput,
    UpdateWeightVersionReqInput,
    WeightUpdateReqOutput,
)
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.managers.request_state import Phase
from sglang.test.fakes.front import Front, run_with_front, until

FOUR = {"max_new_tokens": 4}
ENDLESS = {"max_new_tokens": 100}


# -- pause -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_holds_new_requests_and_freezes_running_ones(tmp_path: Path, mode: str) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        running = await front.start(text="a", sampling_params={"max_new_tokens": 20})
        await front.manager.pause_generation(PauseGenerationReqInput(mode=mode))
        held = asyncio.create_task(front.generate(text="b", rid="held", sampling_params=FOUR))
        await asyncio.sleep(0.1)
        assert not running.done() and not held.done()
        assert front.manager.rid_to_state["held"].phase is Phase.HELD
        await front.manager.pause_generation(PauseGenerationReqInput(mode=mode))  # harmless
        front.scheduler.step_s = 0.0
        await front.manager.continue_generation(ContinueGenerationReqInput())
        assert (await running)["meta_info"]["completion_tokens"] == 20
        assert (await held)["text"] == "bbbb"

    run_with_front(tmp_path, body)


def test_pause_abort_drains_and_keeps_held_requests(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        running = await front.start(text="a", sampling_params=ENDLESS)
        await front.manager.pause_generation(PauseGenerationReqInput())
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        assert front.scheduler.paused is None
        held = asyncio.create_task(front.generate(text="b", sampling_params=FOUR))
        await asyncio.sleep(0.05)
        await front.manager.pause_generation(PauseGenerationReqInput())
        assert not held.done()
        await front.manager.continue_generation(ContinueGenerationReqInput())
        assert (await held)["text"] == "bbbb"

    run_with_front(tmp_path, body)


def test_pause_abort_after_in_place_ends_frozen_requests(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        running = await front.start(text="a", sampling_params=ENDLESS)
        await front.manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        await front.manager.pause_generation(PauseGenerationReqInput(mode="abort"))
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        assert front.scheduler.paused is None and front.manager.is_pause

    run_with_front(tmp_path, body)


def test_held_request_can_be_aborted(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        await front.manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        held = asyncio.create_task(
            front.generate(text="b", rid="h", sampling_params=FOUR, return_logprob=True)
        )
        streamed = asyncio.create_task(front.stream(text="b", rid="hs", sampling_params=FOUR))
        await until(lambda: len(front.manager.rid_to_state) == 2)
        front.manager.abort_request("h")
        answer = await held
        assert answer["meta_info"]["finish_reason"]["message"] == "Abort in waiting queue"
        assert answer["text"] == "" and answer["meta_info"]["output_token_logprobs"] == []
        assert answer["meta_info"]["prompt_tokens"] == 1
        (chunk,) = await streamed
        assert chunk["meta_info"]["finish_reason"]["type"] == "abort"
        assert front.scheduler.of_type(TokenizedGenerateReqInput) == []

    run_with_front(tmp_path, body)


def test_samples_held_behind_their_prompt_block_no_update(tmp_path: Path) -> None:
    """The hold may only end with an update, which waits for whoever has the reader lock."""

    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.05
        params = {**FOUR, "n": 2}
        request = await front.start(text="ab", sampling_params=params)
        await front.manager.pause_generation(PauseGenerationReqInput())
        front.scheduler.weight_reply = WeightUpdateReqOutput(released_tags=["kv_cache"])
        await front.manager.release_memory_occupation(ReleaseMemoryOccupationReqInput())
        await front.manager.continue_generation(ContinueGenerationReqInput())
        assert front.manager.is_holding and not request.done()
        front.scheduler.weight_reply = WeightUpdateReqOutput(released_tags=[])
        async with asyncio.timeout(5):
            await front.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput())
            assert [answer["text"] for answer in await request] == ["abab"] * 2
            async with front.manager.model_update_lock.writer_lock():  # no reader is left
                pass

    run_with_front(tmp_path, body)


def test_unknown_pause_mode_and_idle_continue(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        with pytest.raises(RequestError, match="mode must be one of"):
            await front.manager.pause_generation(PauseGenerationReqInput(mode="x"))
        await front.manager.continue_generation(ContinueGenerationReqInput())
        assert not front.manager.is_pause

    run_with_front(tmp_path, body)


def test_forgotten_pause_ends_where_a_limit_is_set(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        with envs.SGLANG_ENGINE_PAUSE_TIMEOUT.override(0.2):
            await front.manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
            await front.manager.continue_generation(ContinueGenerationReqInput())
            await front.manager.pause_generation(PauseGenerationReqInput(mode="retract"))
            answer = await front.generate(text="b", sampling_params=FOUR)
        assert answer["text"] == "bbbb" and answer["meta_info"]["e2e_latency"] > 0.15

    run_with_front(tmp_path, body)


# -- weight updates --------------------------------------------------------------------------------


def test_update_waits_for_requests_and_holds_later_ones(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        params = {"max_new_tokens": 10}
        running = await front.start(text="a", rid="first", sampling_params=params)

        async def update() -> None:
            async with front.manager.weight_update_guard():
                assert "first" not in front.manager.rid_to_state, "it is still running"
                await asyncio.sleep(0.05)
                assert len(front.scheduler.of_type(TokenizedGenerateReqInput)) == 1

        updating = asyncio.create_task(update())
        await asyncio.sleep(0.01)
        later = asyncio.create_task(front.generate(text="b", sampling_params=FOUR))
        await asyncio.gather(running, updating, later)

    run_with_front(tmp_path, body)


def test_update_while_paused_starts_at_once_and_blocks_continue(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        running = await front.start(text="a", sampling_params={"max_new_tokens": 10})
        await front.manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
        async with front.manager.weight_update_guard():
            resumed = asyncio.create_task(
                front.manager.continue_generation(ContinueGenerationReqInput())
            )
            await asyncio.sleep(0.05)
            assert not resumed.done() and not running.done()
            front.scheduler.step_s = 0.0
        await resumed
        await running

    run_with_front(tmp_path, body)


def test_weight_version_is_stamped_and_echoed(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        running = await front.start(text="a", sampling_params=ENDLESS)
        await front.manager.update_weight_version(UpdateWeightVersionReqInput(new_version="v2"))
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"  # the default
        answer = await front.generate(text="a", sampling_params=FOUR)
        assert answer["meta_info"]["weight_version"] == "v2"
        assert front.manager.weight_version == "v2"

    run_with_front(tmp_path, body)
