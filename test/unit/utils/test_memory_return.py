"""Giving memory back: soon after it was asked for, and not more often than allowed."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from sglang.srt.utils import memory_return
from sglang.srt.utils.memory_return import MemoryReturner, _find_malloc_trim


def test_many_requests_are_one_and_later_ones_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_return, "_DELAY_S", 0.05)
    calls: list[tuple[float, int]] = []

    def trim(pad: int) -> int:
        calls.append((time.monotonic(), threading.get_ident()))
        return pad

    async def body() -> None:
        returner = MemoryReturner(trim, min_interval_s=0.5)
        for _ in range(100):
            returner.request()
        while not calls:
            await asyncio.sleep(0.01)
        for _ in range(100):
            returner.request()
        while len(calls) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)

    asyncio.run(body())
    assert len(calls) == 2 and calls[1][0] - calls[0][0] >= 0.3
    assert all(thread != threading.get_ident() for _, thread in calls)  # not on the event loop


def test_the_allocators_function_is_found_and_works() -> None:
    trim = _find_malloc_trim()
    assert trim is not None and trim(0) in (0, 1)
