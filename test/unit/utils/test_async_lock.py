"""Waiting and locks: writers first, cancelled waiters, one loop after the other."""

from __future__ import annotations

import asyncio

import pytest

from sglang.srt.utils.async_lock import Mutex, RWLock, Waiters


async def _soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _writers_come_first() -> list[str]:
    lock, order = RWLock(), []

    async def read(name: str) -> None:
        await lock.acquire_reader()
        order.append(name)
        await _soon()
        lock.release_reader()

    async def write(name: str) -> None:
        async with lock.writer_lock():
            order.append(name)
            await _soon()
            order.append(f"{name} ends")

    async with asyncio.TaskGroup() as tasks, asyncio.timeout(5):
        for work in (read("r1"), read("r2"), write("w1"), write("w2"), read("r3")):
            tasks.create_task(work)
    return order


def test_a_writer_waits_for_readers_and_later_readers_for_it() -> None:
    order = asyncio.run(_writers_come_first())
    assert sorted(order[:2]) == ["r1", "r2"] and order[-1] == "r3"
    # One writer after the other.
    assert order[3] == f"{order[2]} ends" and order[5] == f"{order[4]} ends"


def test_readers_go_on_when_the_writer_that_waits_is_cancelled() -> None:
    async def body() -> None:
        lock = RWLock()
        await lock.acquire_reader()

        async def write() -> None:
            async with lock.writer_lock():
                raise AssertionError("there is a reader")

        writer = asyncio.create_task(write())
        await _soon()
        reader = asyncio.create_task(lock.acquire_reader())
        await _soon()
        assert not reader.done()
        writer.cancel()
        async with asyncio.timeout(5):
            await reader
        with pytest.raises(asyncio.CancelledError):
            await writer

    asyncio.run(body())


def test_a_mutex_goes_on_past_a_cancelled_waiter_and_an_error_inside() -> None:
    async def body() -> None:
        mutex, entered = Mutex(), []

        async def enter(number: int) -> None:
            async with mutex:
                entered.append(number)

        with pytest.raises(ValueError, match="inside"):
            async with mutex:
                waiting = [asyncio.create_task(enter(number)) for number in range(3)]
                await _soon()
                waiting[0].cancel()
                raise ValueError("inside")
        async with asyncio.timeout(5):
            await asyncio.wait(waiting)
        assert entered == [1, 2]

    asyncio.run(body())


def test_loops_may_follow_each_other() -> None:
    waiters, mutex, lock = Waiters(), Mutex(), RWLock()

    async def wait_for_all() -> None:
        async with asyncio.timeout(5):
            await lock.acquire_reader()
            asyncio.get_running_loop().call_later(0.01, lock.release_reader)
            async with lock.writer_lock():
                pass
            entered = asyncio.Event()

            async def enter() -> None:
                async with mutex:
                    entered.set()

            async with mutex:
                other = asyncio.create_task(enter())
                await _soon()
                assert not entered.is_set()
            await other
            asyncio.get_running_loop().call_later(0.01, waiters.wake_all)
            await waiters.wait()

    for _ in range(3):
        asyncio.run(wait_for_all())


def test_who_waited_on_a_loop_that_is_closed_stops_nobody() -> None:
    waiters = Waiters()
    loop = asyncio.new_event_loop()
    left = loop.create_task(waiters.wait())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()

    async def body() -> None:
        waiting = asyncio.create_task(waiters.wait())
        await _soon()
        waiters.wake_all()
        async with asyncio.timeout(5):
            await waiting

    asyncio.run(body())
    assert not left.done()
