"""``HiMambaRadixCache``: the hierarchical cache of models with full attention and recurrent state.

Owns how a request's state gets into the tree, and its defaults; all other behaviour is
``UnifiedRadixCache``'s with the components FULL and MAMBA. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from sglang.srt.mem_cache.base_prefix_cache import CacheableReq, CacheInitParams
from sglang.srt.mem_cache.pool_transfer import PoolTransfer
from sglang.srt.mem_cache.storage.extra_config import PrefetchOptions
from sglang.srt.mem_cache.tree_components.base import ComponentType, TreeNode
from sglang.srt.mem_cache.tree_components.mamba import MambaComponent
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache


class HiMambaRadixCache(UnifiedRadixCache):
    """Prefix cache of full-attention KV and state snapshots; a match ends where a snapshot is."""

    default_storage_options: ClassVar[PrefetchOptions] = PrefetchOptions(
        prefetch_timeout_base=2.0, prefetch_timeout_per_ki_token=0.1
    )

    def __init__(self, params: CacheInitParams) -> None:
        if params.hicache is None or params.capture_state is None:
            raise ValueError("HiMambaRadixCache needs HiCacheParams and a way to capture states")
        super().__init__(params, components=(ComponentType.FULL, ComponentType.MAMBA))
        self._capture = params.capture_state

    @property
    def _states(self) -> MambaComponent:
        states = self.components[ComponentType.MAMBA]
        assert isinstance(states, MambaComponent)
        return states

    def mamba_backup_transfers(self, nodes: Sequence[TreeNode]) -> list[PoolTransfer] | None:
        """Reserve host slots for the snapshots of ``nodes``; None where there is no room."""
        return self._states.reserve(nodes, to_host=True)

    def mamba_load_back_transfers(self, nodes: Sequence[TreeNode]) -> list[PoolTransfer] | None:
        """Reserve device slots for the snapshots of ``nodes``; None where there is no room."""
        return self._states.reserve(nodes, to_host=False)

    def _capture_state(self, req: CacheableReq, num_tokens: int) -> torch.Tensor | None:
        return self._capture(req, num_tokens) if num_tokens else None

    def _take_state(self, node: TreeNode, state_slot: torch.Tensor | None) -> bool:
        if state_slot is None or node.data[ComponentType.MAMBA].value is not None:
            return False
        self._states.store(node, state_slot)
        return True

    def _drop_state(self, state_slot: torch.Tensor) -> None:
        self._states.allocator.free(state_slot)
