"""One block of host memory: zeroed on first touch, or page-locked for a CUDA device.

Owns the mapping and its registration. Does not know what lies in it. Made and closed by the
scheduler thread; the bytes are read and written by whoever owns them.
"""

from __future__ import annotations

import mmap

import numpy as np
import torch

from sglang.srt.platforms import cuda_host


class HostMemory:
    """``num_bytes`` zero bytes, aligned to a memory page.

    ``array`` (numpy uint8) and ``tensor`` (torch uint8) are views of the same bytes. Unpinned
    memory is taken from the system page by page as it is used; pinned memory at once.
    """

    def __init__(self, num_bytes: int, *, pinned: bool) -> None:
        # Private: shared anonymous memory would be a file of the system's, without huge pages.
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.num_bytes = num_bytes
        self.pinned = pinned
        self.array = np.frombuffer(mapping, dtype=np.uint8)
        self.tensor = torch.from_numpy(self.array)
        if pinned:
            # Locking a page at a time is what takes long; huge pages are 512 times fewer.
            mapping.madvise(mmap.MADV_HUGEPAGE)
            cuda_host.register(self.array)

    def close(self) -> None:
        """Unlock the memory and let go of it; idempotent. Views that others hold keep it mapped."""
        if self.num_bytes == 0:
            return
        if self.pinned:
            cuda_host.unregister(self.array)
        self.num_bytes = 0
        self.array = np.empty(0, dtype=np.uint8)
        self.tensor = torch.from_numpy(self.array)
