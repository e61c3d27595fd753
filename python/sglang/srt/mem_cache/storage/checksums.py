"""Checksums of many pages at once, by more than one core where there are cores to spare.

Called by the backends of shared stores, for the pages of one call of theirs: a single core reads
memory hardly faster than a good network brings it. Threads: any; who asks works too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from sglang.srt.mem_cache.storage.page_file import Buffers, checksum

# The scheduler, the host's copies and the store's own transport want cores as well.
_CORES_A_THREAD = 4
_MAX_THREADS = 4
# To wake a thread takes as long as reading a part of this size.
_LEAST_BYTES = 1 << 20


def checksums(pages: Sequence[Buffers]) -> list[int]:
    """Return the checksum of each page, in order; pages of about equal size are expected."""
    num_bytes = sum(buffer.nbytes for buffer in pages[0]) * len(pages) if pages else 0
    num_parts = max(min(_num_threads(), num_bytes // _LEAST_BYTES, len(pages)), 1)
    if num_parts == 1:
        return _of_part(pages)
    size = -(-len(pages) // num_parts)
    parts = [pages[start : start + size] for start in range(0, len(pages), size)]
    others = [_helpers().submit(_of_part, part) for part in parts[1:]]
    sums = _of_part(parts[0])
    for other in others:
        sums += other.result()
    return sums


def _of_part(pages: Sequence[Buffers]) -> list[int]:
    return [checksum(page) for page in pages]


@functools.cache
def _num_threads() -> int:
    return max(min(len(os.sched_getaffinity(0)) // _CORES_A_THREAD, _MAX_THREADS), 1)


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_num_threads() - 1, "hicache-checksum")
