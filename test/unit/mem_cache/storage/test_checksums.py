"""Checksums of many pages: the same by one thread or several, and several where it pays."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from sglang.srt.mem_cache.storage import checksums as module
from sglang.srt.mem_cache.storage.checksums import checksums
from sglang.srt.mem_cache.storage.page_file import Buffers


def make_pages(count: int, num_bytes: int) -> list[Buffers]:
    """Each page in two pieces."""
    rng = np.random.default_rng(count)
    data = [memoryview(rng.bytes(num_bytes)) for _ in range(count)]
    return [[page[: num_bytes // 3], page[num_bytes // 3 :]] for page in data]


@pytest.fixture
def four_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """As on a machine of sixteen cores; the names of the threads that computed a checksum."""
    seen: set[str] = set()
    plain = module.checksum

    def see(page: Buffers) -> int:
        seen.add(threading.current_thread().name)
        return plain(page)

    monkeypatch.setattr(module, "checksum", see)
    monkeypatch.setattr(module, "_num_threads", lambda: 4)
    module._helpers.cache_clear()
    yield seen
    module._helpers().shutdown()
    module._helpers.cache_clear()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 31, 32])
def test_order_is_kept(four_threads: set[str], count: int) -> None:
    pages = make_pages(count, 700_000)
    assert checksums(pages) == [zlib.crc32(b"".join(page)) for page in pages]
    helpers = {name for name in four_threads if name.startswith("hicache-checksum")}
    assert threading.current_thread().name in four_threads
    assert bool(helpers) == (count > 2), "two of these pages are not worth a second thread"


def test_small_pages_stay_with_the_caller(four_threads: set[str]) -> None:
    pages = make_pages(100, 4096)
    assert checksums(pages) == [zlib.crc32(b"".join(page)) for page in pages]
    assert four_threads == {threading.current_thread().name}


def test_no_pages() -> None:
    assert checksums([]) == []


def test_few_cores_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, threads in ((1, 1), (2, 1), (8, 2), (16, 4), (128, 4)):
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert module._num_threads.__wrapped__() == threads
