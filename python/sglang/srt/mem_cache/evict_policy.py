"""Eviction orders: which unlocked leaf goes first.

Owns only the key functions. A key may never *fall* while its node lives: the tree keeps one heap
entry a node and renews it when it is popped, which is right only for keys that stay or rise.
Times are the tree's ticks. Any thread, pure.
"""

from __future__ import annotations

from collections.abc import Callable

from sglang.srt.mem_cache.tree_components.base import TreeNode

EvictKey = tuple[int, int]
EvictKeyFn = Callable[[TreeNode], EvictKey]

# Hits from which a node counts as reused (slru): once for its making, once more for a reuse.
SLRU_PROTECTED_HITS = 2


def _lru(node: TreeNode) -> EvictKey:
    return (node.last_access_time, 0)


def _lfu(node: TreeNode) -> EvictKey:
    return (node.hit_count, node.last_access_time)


def _slru(node: TreeNode) -> EvictKey:
    return (int(node.hit_count >= SLRU_PROTECTED_HITS), node.last_access_time)


def _fifo(node: TreeNode) -> EvictKey:
    return (node.creation_time, 0)


def _filo(node: TreeNode) -> EvictKey:
    return (-node.creation_time, 0)


def _priority(node: TreeNode) -> EvictKey:
    return (node.priority, node.last_access_time)


EVICT_POLICIES: dict[str, EvictKeyFn] = {
    "lru": _lru,
    "lfu": _lfu,
    "slru": _slru,
    "fifo": _fifo,
    "filo": _filo,
    "priority": _priority,
}


def get_evict_key_fn(policy: str) -> EvictKeyFn:
    """Return the key function of a policy: the smallest key is evicted first.

    Raises ValueError for an unknown name.
    """
    if policy not in EVICT_POLICIES:
        raise ValueError(f"eviction policy {policy!r} is none of {sorted(EVICT_POLICIES)}")
    return EVICT_POLICIES[policy]
