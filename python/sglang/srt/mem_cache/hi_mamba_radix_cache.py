"""``HiMambaRadixCache``: the hierarchical cache of models with full attention and recurrent state.

Owns its defaults and which states a copy between tiers moves; all other behaviour is
``MambaRadixCache``'s. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from sglang.srt.mem_cache.base_prefix_cache import CacheInitParams
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.storage.extra_config import PrefetchOptions
from sglang.srt.mem_cache.tree_components.base import TreeNode


class HiMambaRadixCache(MambaRadixCache):
    """``MambaRadixCache`` with a host tier and storage."""

    default_storage_options: ClassVar[PrefetchOptions] = PrefetchOptions(
        prefetch_timeout_base=2.0, prefetch_timeout_per_ki_token=0.1
    )

    def __init__(self, params: CacheInitParams) -> None:
        if params.hicache is None or params.capture_state is None:
            raise ValueError("HiMambaRadixCache needs HiCacheParams and a way to capture states")
        super().__init__(params)

    def mamba_backup_transfers(self, nodes: Sequence[TreeNode]) -> list[PoolTransfer] | None:
        """Reserve host slots for the snapshots of ``nodes``; None where there is no room."""
        return self._states.reserve(nodes, to_host=True)

    def mamba_load_back_transfers(self, nodes: Sequence[TreeNode]) -> list[PoolTransfer] | None:
        """Reserve device slots for the snapshots of ``nodes``; None where there is no room."""
        return self._states.reserve(nodes, to_host=False)
