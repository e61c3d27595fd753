"""The file backend with slow writes, for tests that need backups queued at a chosen moment.

A server loads it as `dynamic`; `extra_config(folder, delay_s)` is the text that configures it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
)


def extra_config(folder: str | Path, delay_s: float, **options: object) -> str:
    """Text for `--hicache-storage-backend-extra-config`."""
    return json.dumps(
        {
            "backend_name": "slow-file",
            "module_path": __name__,
            "class_name": "SlowFileStore",
            "file_storage_path": str(folder),
            "delay_s": delay_s,
            **options,
        }
    )


class SlowFileStore(HiCacheFile):
    """Each write call takes `delay_s` seconds longer."""

    def __init__(self, config: HiCacheStorageConfig) -> None:
        options = dict(config.extra_config)
        self.delay_s = float(options.pop("delay_s"))
        super().__init__(replace(config, extra_config=options))

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[PoolName, list[bool]]:
        """See `HiCacheFile`."""
        time.sleep(self.delay_s)
        return super().batch_set_v2(transfers, extra_info)
