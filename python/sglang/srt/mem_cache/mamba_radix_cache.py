"""``MambaRadixCache``: the prefix cache of models with full attention and recurrent state.

Owns when a request's state is kept (which positions of a prompt, of its output), how it gets into
the tree and which snapshots go when slots are short; the walk, the tiers and all other behaviour
are ``UnifiedRadixCache``'s with the components FULL and MAMBA. Scheduler thread only.

A prefix is of use only up to a snapshot, so a prefill step keeps the state

* at the end of its last whole page: more of the prompt, or a next turn, continues there;
* at the last page end before the prompt's last token: the same prompt again, which must compute
  one token at least, continues there;
* where the prompt leaves what the tree knew: a prefix that two prompts share is likely to be one
  that a third begins with (arXiv 2411.19379, section 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sglang.srt.mem_cache.base_prefix_cache import CacheableReq, CacheInitParams, PoolUsage
from sglang.srt.mem_cache.state_snapshots import (
    OWN_STATE,
    PrefillSpan,
    StatePlan,
    StateSnapshot,
)
from sglang.srt.mem_cache.tree_components.base import (
    ComponentData,
    ComponentType,
    InvariantError,
    TreeComponent,
    TreeNode,
)
from sglang.srt.mem_cache.tree_components.mamba import MambaComponent
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

# A snapshot this few tokens behind what its request began with takes a free slot or none: it is
# not worth the one that would have to go.
MIN_GAIN_TOKENS = 64


def _data(node: TreeNode) -> ComponentData:
    return node.data[ComponentType.MAMBA]


class MambaRadixCache(UnifiedRadixCache):
    """Prefix cache of full-attention KV and state snapshots; a match ends where a snapshot is."""

    def __init__(self, params: CacheInitParams) -> None:
        if params.capture_state is None:
            raise ValueError(f"{type(self).__name__} needs a way to capture states")
        super().__init__(params, components=(ComponentType.FULL, ComponentType.MAMBA))
        self._capture = params.capture_state
        self._snapshots = params.state_snapshots
        # Least recently used first, as of when it was made; see `free_state_slots`.
        self._victims: list[tuple[int, TreeNode]] = []

    @property
    def _states(self) -> MambaComponent:
        states = self.components[ComponentType.MAMBA]
        assert isinstance(states, MambaComponent)
        return states

    def side_pools(self) -> dict[str, PoolUsage]:
        """See ``BasePrefixCache``: states of running requests, one a row, and snapshots."""
        rows, snapshots = self.req_to_token_pool, self._states.allocator
        states = PoolUsage(
            total=rows.size + snapshots.size,
            available=rows.available_size() + snapshots.available_size(),
            evictable=self._states.evictable_size,
        )
        return {**super().side_pools(), "mamba": states}

    # -- what the forward pass is to keep -------------------------------------------------------

    def plan_prefill_states(self, spans: Sequence[PrefillSpan]) -> StatePlan | None:
        """See ``BasePrefixCache``."""
        if self._snapshots is None:
            return None
        snapshots: list[StateSnapshot] = []
        for index, span in enumerate(spans):
            for position in self._worth_keeping(span):
                may_evict = position - span.start >= MIN_GAIN_TOKENS
                slot = self._plan_snapshot(span.row, position, may_evict=may_evict)
                if slot is not None:
                    snapshots.append(StateSnapshot(index=index, position=position, slot=slot))
        return StatePlan(sources=[self._source(span) for span in spans], snapshots=snapshots)

    def plan_decode_states(self, rows: np.ndarray, seq_lens: np.ndarray) -> StatePlan | None:
        """See ``BasePrefixCache``."""
        if self._snapshots is None:
            return None
        snapshots: list[StateSnapshot] = []
        for index in np.flatnonzero(seq_lens % self._snapshots.track_interval == 0).tolist():
            row, position = int(rows[index]), int(seq_lens[index])
            slot = self._plan_snapshot(row, position, may_evict=True, is_output=True)
            if slot is not None:
                snapshots.append(StateSnapshot(index=index, position=position, slot=slot))
        return StatePlan(snapshots=snapshots) if snapshots else None

    def _worth_keeping(self, span: PrefillSpan) -> list[int]:
        """Positions of a span whose state is to be kept, rising; see the module docstring."""
        page = self.page_size
        # Units of a key may take tokens behind their own.
        wanted = {(span.end - self.lookahead) // page * page, span.known_len // page * page}
        if span.is_last:
            wanted.add((span.end - max(1, self.lookahead)) // page * page)
        # With a lookahead the step before could not keep the state at its own end.
        goes_on = span.node is None and self.lookahead > 0
        first = span.start if goes_on else span.start + 1
        return sorted(p for p in wanted if first <= p <= span.end)

    @staticmethod
    def _source(span: PrefillSpan) -> int:
        if span.node is None:
            return OWN_STATE
        if span.node.parent is None:
            return 0
        slot = _data(span.node).value
        if slot is None:
            raise InvariantError(f"a request begins at {span.node!r}, which has no state")
        return int(slot[0])

    def _plan_snapshot(
        self, row: int, position: int, *, may_evict: bool, is_output: bool = False
    ) -> int | None:
        assert self._snapshots is not None
        slot = self._snapshots.plan(row, position, is_output)
        if slot is None and may_evict and self.free_state_slots(1):
            slot = self._snapshots.plan(row, position, is_output)
        return slot

    # -- from the request to the tree -----------------------------------------------------------

    def cache_finished_req(self, req: CacheableReq, is_insert: bool = True) -> None:
        """See ``BasePrefixCache``."""
        super().cache_finished_req(req, is_insert)
        if self._snapshots is not None and req.req_pool_idx is not None:
            self._snapshots.release(req.req_pool_idx)

    def _earlier_states(self, req: CacheableReq, num_tokens: int) -> list[int]:
        return [] if self._snapshots is None else self._snapshots.positions(req, num_tokens)

    def _capture_state(self, req: CacheableReq, num_tokens: int) -> torch.Tensor | None:
        return self._capture(req, num_tokens) if num_tokens else None

    def _take_state(self, node: TreeNode, state_slot: torch.Tensor | None) -> bool:
        if state_slot is None or _data(node).value is not None:
            return False
        self._states.store(node, state_slot)
        return True

    def _drop_state(self, state_slot: torch.Tensor) -> None:
        self._states.allocator.free(state_slot)

    # -- eviction -------------------------------------------------------------------------------

    def reset(self) -> None:
        """See ``BasePrefixCache``."""
        super().reset()
        self._victims.clear()
        if self._snapshots is not None:
            self._snapshots.clear()

    def free_state_slots(self, num_slots: int) -> int:
        """Give up the least recently used snapshots that nobody holds; return how many slots.

        An inner node loses its snapshot only; a leaf goes as a whole, since without it its KV is
        of no use. What was used since the order was made comes again when all others have gone.
        """
        freed = 0
        is_fresh = False
        with self._evicting():
            while freed < num_slots:
                if not self._victims:
                    if is_fresh or not self._order_victims():
                        break
                    is_fresh = True
                tick, node = self._victims.pop()
                if node.last_access_time == tick and self._can_lose_state(node):
                    freed += self._lose_state(node)
        return freed

    def _make_device_room(self, part: TreeComponent) -> int:
        """See ``UnifiedRadixCache``."""
        return self.free_state_slots(1)

    def _can_lose_state(self, node: TreeNode) -> bool:
        data = _data(node)
        return data.value is not None and data.lock_ref == 0 and node.parent is not None

    def _order_victims(self) -> bool:
        nodes = (node for node in self.iter_nodes() if self._can_lose_state(node))
        self._victims = sorted(
            ((node.last_access_time, node) for node in nodes),
            key=lambda entry: (-entry[0], entry[1].id),
        )
        return bool(self._victims)

    def _lose_state(self, node: TreeNode) -> int:
        before = self._states.allocator.available_size()
        if node in self.evictable_leaves:
            self._evict_leaf(node)
        else:
            self._save_before_loss(node)
            self._states.release_device(node)
        return self._states.allocator.available_size() - before

    # -- self-check -----------------------------------------------------------------------------

    def check_invariants(self, num_private_slots: int | None = None) -> None:
        """See ``BasePrefixCache``; also: free + cached + pending state slots are all of them."""
        super().check_invariants(num_private_slots)
        if self._snapshots is None:
            return
        allocator, pending = self._snapshots.allocator, self._snapshots.num_pending
        states = self._states
        held = states.evictable_size + states.protected_size
        if allocator.available_size() + held + pending != allocator.size:
            raise InvariantError(
                f"state slots: {allocator.available_size()} free + {held} cached + {pending} "
                f"pending != {allocator.size}"
            )
        if num_private_slots == 0 and pending:
            raise InvariantError(f"{pending} state slots are pending without a request")
