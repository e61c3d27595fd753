"""`Engine` on a fake scheduler: loops that take turns, streams that are left, a death."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import AbandonReq
from sglang.srt.managers.request_errors import RequestError
from sglang.test.fakes.front import Front, make_front, until

FOUR = {"max_new_tokens": 4}
ENDLESS = {"max_new_tokens": 200}


class FrontEngine(Engine):
    """An Engine whose processes are those of a fake front."""

    def __init__(self, front: Front) -> None:
        self.front = front
        self.server_args = front.manager.server_args
        self.loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self.tokenizer_manager = front.manager

    def text(self, **fields: Any) -> Any:
        """What `generate` gives, or a TimeoutError where it would wait for ever."""

        async def one() -> Any:
            async with asyncio.timeout(5):
                return await self.async_generate("a", FOUR, **fields)

        return self._run(one())["text"]


def update_from_disk(engine: FrontEngine) -> tuple[bool, str, int]:
    return engine.update_weights_from_disk("/new")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FrontEngine]:
    with make_front(tmp_path) as front:
        made = FrontEngine(front)
        yield made
        front.manager.close()
        made.loop.run_until_complete(asyncio.sleep(0))
        made.loop.close()


def test_loops_take_turns(engine: FrontEngine) -> None:
    """The engine's own loop, a caller's, the own one again, also after a collection."""

    async def one() -> Any:
        async with asyncio.timeout(5):
            return (await engine.async_generate("a", FOUR))["text"]  # type: ignore[call-overload,index]

    for _ in range(2):
        assert engine.text() == "aaaa"
        assert asyncio.run(one()) == "aaaa"
        assert engine.text() == "aaaa"
        gc.collect()
        assert engine.text() == "aaaa"


def test_an_update_that_would_wait_for_its_own_caller_is_refused(engine: FrontEngine) -> None:
    async def body() -> None:
        engine.front.scheduler.step_s = 0.01
        running = asyncio.create_task(engine.async_generate("a", FOUR))
        await until(lambda: bool(engine.front.scheduler.live))
        engine.get_server_info()  # on the engine's own loop
        for update in (engine.release_memory_occupation, partial(update_from_disk, engine)):
            with pytest.raises(RuntimeError, match="await the requests of the running"):
                update()
        assert (await running)["text"] == "aaaa"  # type: ignore[index,call-overload]
        assert update_from_disk(engine)[0]

    asyncio.run(body())


def test_an_update_that_would_wait_for_an_unread_stream_is_refused(engine: FrontEngine) -> None:
    engine.front.scheduler.step_s = 0.01
    stream = engine.generate("a", {"max_new_tokens": 20}, stream=True)
    next(stream)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="read streams to their end"):
        update_from_disk(engine)
    assert list(stream)
    assert update_from_disk(engine)[0]


def test_an_update_waits_for_another_threads_request(engine: FrontEngine) -> None:
    engine.front.scheduler.step_s = 0.01
    answers: list[Any] = []
    other = threading.Thread(target=lambda: answers.append(engine.generate("a", FOUR)), daemon=True)
    other.start()
    deadline = time.monotonic() + 5
    while not engine.front.scheduler.live and time.monotonic() < deadline:
        time.sleep(0.002)
    assert update_from_disk(engine)[0]
    other.join(5)
    assert answers[0]["text"] == "aaaa"


def test_death_reaches_a_caller_on_a_loop_of_its_own(engine: FrontEngine) -> None:
    async def wait() -> None:
        engine.front.scheduler.step_s = 0.01
        running = asyncio.create_task(engine.async_generate("a", ENDLESS))
        await until(lambda: bool(engine.front.scheduler.live))
        engine.front.scheduler.silent = True
        await asyncio.to_thread(engine._on_failure, "the scheduler was killed")
        with pytest.raises(RequestError, match="killed"):
            async with asyncio.timeout(5):
                await running

    asyncio.run(wait())
    with pytest.raises(RequestError, match="killed"):
        engine.text()


def test_a_death_after_the_loops_end_is_no_error(engine: FrontEngine) -> None:
    asyncio.run(engine.async_generate("a", FOUR))
    engine._on_failure("killed")
    with pytest.raises(RequestError, match="killed"):
        engine.text()


def test_a_stream_may_be_collected_in_the_middle_of_another_call(engine: FrontEngine) -> None:
    engine.front.scheduler.step_s = 0.01
    streams = [engine.generate("a", ENDLESS, rid="left", stream=True)]
    next(streams[0])  # type: ignore[arg-type]
    # What the garbage collector does some day by itself: the stream ends inside the other call.
    engine.loop.call_later(0.02, streams.clear)
    answers: list[Any] = []
    other = threading.Thread(
        target=lambda: answers.append(engine.generate("b", {"max_new_tokens": 20})), daemon=True
    )
    other.start()
    other.join(5)
    assert not other.is_alive(), "the engine waits for its own lock"
    assert answers[0]["text"] == "b" * 20
    assert engine.front.scheduler.of_type(AbandonReq) == [AbandonReq(rids={"left"})]


def test_a_stream_that_is_left_between_calls_is_aborted_at_once(engine: FrontEngine) -> None:
    engine.front.scheduler.step_s = 0.01
    stream = engine.generate("a", ENDLESS, rid="left", stream=True)
    next(stream)  # type: ignore[arg-type]
    stream.close()  # type: ignore[union-attr]
    assert engine.text() == "aaaa"
    assert engine.front.scheduler.of_type(AbandonReq) == [AbandonReq(rids={"left"})]
    assert engine.tokenizer_manager.rid_to_state == {}


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"priority": "high"}, "`priority`"),
    ({"extra_key": 3}, "`extra_key`"),
    ({"return_logprob": "yes"}, "`return_logprob`"),
    ({"top_logprobs_num": 1.5}, "`top_logprobs_num`"),
    ({"return_hidden_states": "all"}, "`return_hidden_states`"),
    ({"rid": 7}, "`rid`"),
    ({"routed_dp_rank": "0"}, "`routed_dp_rank`"),
]


@pytest.mark.parametrize(("fields", "text"), WRONG_TYPES, ids=[text for _, text in WRONG_TYPES])
def test_wrong_types_never_reach_the_scheduler(
    engine: FrontEngine, fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        engine.text(**fields)
    assert engine.front.scheduler.received == []
