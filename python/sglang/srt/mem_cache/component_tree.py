"""The component radix tree: match, insert, split, lock and evict over ``TreeComponent``s.

Owns the nodes, their links, the ticks and the eviction heap. Does not own a component's data
(``tree_components/``), slots (``allocator.py``) nor tiers beyond the device: the walk already
understands nodes that only the host holds, and ``_evict_leaf``, ``_on_insert_visit``,
``_on_split``, ``_on_share`` and ``_refresh_host_leaf`` are where the hierarchical layer
(``hicache_tiers.py``) hooks in. Called by the scheduler thread only.

Only whole pages enter the tree. Namespaces (weights fingerprint, extra key) are part of every
child key, so paths of different namespaces part at the root.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheableReq,
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.events import EventRecorder, KVEvent, StorageMedium
from sglang.srt.mem_cache.evict_policy import EvictKey, get_evict_key_fn
from sglang.srt.mem_cache.page_key import (
    CacheIdentity,
    PageHash,
    RadixKey,
    pack_tokens,
    target_fingerprint,
)
from sglang.srt.mem_cache.swa_allocator import swa_part
from sglang.srt.mem_cache.tree_components.base import (
    ComponentType,
    InvariantError,
    TreeComponent,
    TreeNode,
)
from sglang.srt.mem_cache.tree_components.full import FullComponent
from sglang.srt.mem_cache.tree_components.mamba import MambaComponent
from sglang.srt.mem_cache.tree_components.swa import SWAComponent

COMPONENT_FACTORIES: dict[ComponentType, Callable[[CacheInitParams], TreeComponent]] = {
    ComponentType.FULL: lambda params: FullComponent(params.token_to_kv_pool_allocator),
    ComponentType.SWA: lambda params: _make_swa(params.token_to_kv_pool_allocator),
    ComponentType.MAMBA: lambda params: MambaComponent(params.state_allocator),
}


def _make_swa(allocator: BaseTokenToKVPoolAllocator) -> TreeComponent:
    windows = swa_part(allocator)
    if windows is None:
        raise ValueError("sliding windows need an allocator with rows of their own")
    return SWAComponent(windows)


def _empty_indices() -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64)


class ComponentTree(BasePrefixCache):
    """A radix tree whose nodes carry one data record per component.

    Mutated by the scheduler thread only.
    """

    def __init__(
        self,
        params: CacheInitParams,
        components: Sequence[ComponentType] = (ComponentType.FULL,),
    ) -> None:
        super().__init__(params)
        if ComponentType.FULL not in components:
            raise ValueError("every tree holds full-attention KV")
        self.eviction_policy = params.eviction_policy
        self._evict_key = get_evict_key_fn(params.eviction_policy)
        self.components: dict[ComponentType, TreeComponent] = {
            kind: COMPONENT_FACTORIES[kind](params) for kind in components
        }
        self._num_data = max(components) + 1
        self._events: EventRecorder | None = None
        # Asked at each node: cheaper than calls that do nothing.
        self._has_host_tier = params.hicache is not None
        self._tick = 0
        self._next_node_id = 0
        self.evictable_leaves: set[TreeNode] = set()
        # (policy key, node id, node): one entry a node at most, possibly with an outdated key.
        self._heap: list[tuple[EvictKey, int, TreeNode]] = []
        self.root_node = self._new_node(self.make_key(b""), None)
        ComponentTree.reset(self)  # tiers of a subclass are not there yet
        if params.enable_kv_cache_events:
            self._events = EventRecorder(self.page_size)

    # -- interface ------------------------------------------------------------------------------

    def reset(self) -> None:
        """See the base class."""
        super().reset()
        self.evictable_leaves.clear()
        self._heap.clear()
        self.root_node = self._new_node(self.make_key(b""), None)
        for component in self.components.values():
            component.reset(self.root_node)
        if self._events is not None:
            self._events.cleared()

    def evictable_size(self) -> int:
        """See the base class."""
        return self.components[ComponentType.FULL].evictable_size

    def protected_size(self) -> int:
        """See the base class."""
        return self.components[ComponentType.FULL].protected_size

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """See the base class."""
        path = self._walk(self._own_key(params.key))
        num_usable, num_on_device = self._usable_depths(path)
        values: list[torch.Tensor] = []
        host_hit_length = 0
        last_device_node = last_host_node = self.root_node
        for depth, node in enumerate(path[:num_usable]):
            if depth < num_on_device and node.value is not None:
                values.append(node.value)
                last_device_node = node
            else:
                host_hit_length += len(node.key)
            if node.backuped:
                last_host_node = node
        return MatchResult(
            device_indices=torch.cat(values) if values else _empty_indices(),
            last_device_node=last_device_node,
            last_host_node=last_host_node,
            best_match_node=path[num_usable - 1] if num_usable else self.root_node,
            host_hit_length=host_hit_length,
            known_len=sum(len(node.key) for node in path),
        )

    def insert(self, params: InsertParams) -> InsertResult:
        """See the base class."""
        key = self._own_key(params.key)
        if len(params.value) < len(key):
            raise ValueError(f"{len(params.value)} slots for a key of {len(key)} units")
        path = self._walk(key)
        offset = 0
        prefix_len = 0
        is_state_taken = False
        if params.state_slot is not None and path:
            # Before the visits: what they back up includes the state.
            if sum(len(node.key) for node in path) == len(key):
                is_state_taken = self._take_state(path[-1], params.state_slot)
        for node in path:
            end = offset + len(node.key)
            slots = params.value[offset:end]
            node.priority = max(node.priority, params.priority)
            if node.evicted:
                # Whoever asks has just computed these tokens: the node takes the fresh slots.
                self._store(node, slots)
            else:
                prefix_len += len(node.key)
            for part in self._keep(node, slots, len(key) - end):
                self._visit(part, params.is_chunked)
            offset = end
        last = path[-1] if path else self.root_node
        if offset < len(key):
            slots = params.value[offset : len(key)]
            last = self._add_leaf(last, key[offset:], slots, params.priority)
            is_state_taken = self._take_state(last, params.state_slot)
            for part in self._keep(last, slots, 0):
                self._visit(part, params.is_chunked)
        return InsertResult(prefix_len=prefix_len, node=last, is_state_taken=is_state_taken)

    def inc_lock_ref(self, node: TreeNode | None) -> int:
        """See the base class; None and the root hold nothing."""
        if node is None:
            return 0
        deltas = {kind: component.lock(node) for kind, component in self.components.items()}
        # Nodes above have a resident child, so only the end can change between leaf and not.
        self._refresh_leaf(node)
        return deltas[ComponentType.FULL]

    def dec_lock_ref(self, node: TreeNode | None) -> int:
        """See the base class."""
        if node is None:
            return 0
        deltas = {kind: component.unlock(node) for kind, component in self.components.items()}
        self._refresh_leaf(node)
        return deltas[ComponentType.FULL]

    def evict(self, params: EvictParams | int) -> EvictResult:
        """See the base class. Not inside a free group: its slots would not come free yet."""
        wanted = params if isinstance(params, int) else params.num_tokens
        started = time.perf_counter()
        with self._evicting():
            freed = self._evict_leaves(wanted)
        if freed:
            self._count("eviction_duration_seconds", time.perf_counter() - started)
        return EvictResult(num_tokens_evicted=freed)

    def _evict_leaves(self, num_tokens: int) -> int:
        freed = 0
        while freed < num_tokens and self._heap:
            old_key, _, node = heapq.heappop(self._heap)
            node.is_in_heap = False
            if node not in self.evictable_leaves:
                continue
            if self._evict_key(node) != old_key:
                self._push(node)
                continue
            freed += self._evict_leaf(node)
        return freed

    def _count(self, name: str, amount: float, **labels: str) -> None:
        """Add to a metric of this cache, or observe a value."""
        self._metrics(name, amount, cache_type=type(self).__name__, **labels)

    def cache_unfinished_req(self, req: CacheableReq, chunked: bool = False) -> None:
        """See the base class."""
        if req.req_pool_idx is None:
            raise RuntimeError(f"request {req.rid} has no row")
        slots = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_committed_len)
        protected = req.cache_protected_len
        key = self._committed_key(req)
        if len(key) > protected and self._may_insert(req):
            # [0, protected)            the tree's, locked by this request
            # [protected, dup_end)      own copies of what the tree has meanwhile: freed
            # [dup_end, len(key))       become the tree's
            # [len(key), committed)     unaligned tail, stays the request's
            # [committed, allocated)    taken in advance, stays the request's
            # More of this request will follow, be it prompt or output.
            result = self._insert_committed(req, key, slots, more_follows=True)
            dup_end = result.prefix_len
            if dup_end > protected:
                self._on_share()
                self.token_to_kv_pool_allocator.free(slots[protected:dup_end])
                of_tree = self._path_indices(result.node)[protected:dup_end]
                self.req_to_token_pool.write(req.req_pool_idx, protected, of_tree)
                slots[protected:dup_end] = of_tree
            self.inc_lock_ref(result.node)
            self.dec_lock_ref(req.last_node)
            req.last_node = result.node
            req.cache_protected_len = len(key)
        req.prefix_indices = slots

    def cache_finished_req(self, req: CacheableReq, is_insert: bool = True) -> None:
        """See the base class."""
        protected = req.cache_protected_len
        if req.req_pool_idx is not None and req.kv_allocated_len > 0:
            slots = self.req_to_token_pool.read(req.req_pool_idx, 0, req.kv_allocated_len)
            # [0, protected)            the tree's: unlocked below
            # [protected, dup_end)      own copies of what the tree has: freed
            # [dup_end, insert_end)     become the tree's
            # [insert_end, allocated)   tail, rejected or taken in advance: freed
            dup_end = insert_end = protected
            key = self._committed_key(req) if is_insert and self._may_insert(req) else None
            # Also where it adds nothing: this is where a request counts as a use of its path.
            if key is not None and len(key) >= max(protected, 1):
                dup_end = self._insert_committed(req, key, slots, more_follows=False).prefix_len
                insert_end = len(key)
            unused = torch.cat([slots[protected:dup_end], slots[insert_end:]])
            self.token_to_kv_pool_allocator.free(unused)
        self.dec_lock_ref(req.last_node)
        self._forget_window(req)
        req.last_node = None
        req.cache_protected_len = 0
        req.kv_committed_len = 0
        req.kv_allocated_len = 0
        req.prefix_indices = _empty_indices()

    # -- hooks of the hierarchical layer ------------------------------------------------------

    def _evicting(self) -> AbstractContextManager[None]:
        """Return a context for taking nodes off the device; what it frees is free behind it."""
        return nullcontext()

    def _save_before_loss(self, node: TreeNode) -> None:
        """See a node, which stays, that is about to lose the device data of some component."""

    def _evict_leaf(self, node: TreeNode) -> int:
        """Take an evictable leaf off the device; return the tokens freed."""
        freed = self._release_device(node)
        self._remove(node)
        return freed

    def _visit(self, node: TreeNode, is_chunked: bool) -> None:
        """Count a use. All inserts of one request are one use together: its last one counts."""
        if not is_chunked:
            node.hit_count += 1
        if self._has_host_tier:
            self._on_insert_visit(node, is_chunked)

    def _keep(self, node: TreeNode, slots: torch.Tensor, units_behind: int) -> Sequence[TreeNode]:
        """Let components take what else belongs to the slots of an insert: ``node``'s tokens.

        ``slots`` are the node's own now, or copies that the caller is about to free;
        ``units_behind``: units of the inserted key that follow. May divide the node, which keeps
        its end; returns its parts, from the root down.
        """
        return (node,)

    def _on_insert_visit(self, node: TreeNode, is_chunked: bool) -> None:
        """See a node that an insert passes, stored and counted; with a host tier only."""

    def _refresh_host_leaf(self, node: TreeNode) -> None:
        """Put a node in or out of the host's leaf set; with a host tier only."""

    def _take_state(self, node: TreeNode, state_slot: torch.Tensor | None) -> bool:
        """Keep a snapshot of the recurrent state at the end of ``node``; False: not kept."""
        return False

    def _capture_state(self, req: CacheableReq, num_tokens: int) -> torch.Tensor | None:
        """Return a snapshot slot with the request's state after so many tokens, if there is one."""
        return None

    def _earlier_states(self, req: CacheableReq, num_tokens: int) -> list[int]:
        """Return where before so many tokens there are snapshots of the request's state, rising."""
        return []

    def _drop_state(self, state_slot: torch.Tensor) -> None:
        """Free a snapshot that the tree did not keep."""

    def _on_share(self) -> None:
        """See that a running request is about to go on with slots of the tree."""

    def _on_split(self, upper: TreeNode, lower: TreeNode) -> None:
        """See a node that was divided, after its data was."""

    # -- walk and structure ---------------------------------------------------------------------

    def _own_key(self, key: RadixKey) -> RadixKey:
        """Return the key in this tree's mode and weights, whole pages only."""
        return key.retargeted(
            lookahead=self.lookahead, weights_fingerprint=self.weights_fingerprint
        ).page_aligned(self.page_size)

    def _walk(self, key: RadixKey) -> list[TreeNode]:
        """Return the nodes, below the root, that cover the longest known prefix of ``key``.

        Splits the last one where the key leaves it, and refreshes the access times.
        """
        self._tick += 1
        path: list[TreeNode] = []
        node = self.root_node
        offset = 0
        num_units = len(key)
        while offset < num_units:
            child = node.children.get(key.child_key(self.page_size, offset))
            if child is None:
                break
            matched = key.match(child.key, self.page_size, offset)
            if matched < len(child.key):
                child = self._split(child, matched)
            child.last_access_time = self._tick
            path.append(child)
            offset += matched
            node = child
        return path

    def _usable_depths(self, path: list[TreeNode]) -> tuple[int, int]:
        """Return how many leading nodes of a path can be used, and used without a load back.

        Each number of nodes ends where every component can go on.
        """
        cursors = [component.match_cursor() for component in self.components.values()]
        # Each cursor sees each node, whatever the others say: it may count.
        verdicts = [False not in [cursor(node) for cursor in cursors] for node in path]
        usable = [depth for depth, is_usable in enumerate(verdicts, start=1) if is_usable]
        for depth in reversed(usable):
            if self._is_on_device(path[depth - 1]):
                return usable[-1], depth
        return (usable[-1], 0) if usable else (0, 0)

    def _is_on_device(self, node: TreeNode) -> bool:
        """Whether a user of ``node`` needs nothing that is not on the device."""
        return all(component.is_on_device(node) for component in self.components.values())

    def _split(self, lower: TreeNode, num_units: int) -> TreeNode:
        """Put a new node over ``lower`` that takes its first ``num_units``; return it."""
        if not 0 < num_units < len(lower.key) or num_units % self.page_size:
            raise InvariantError(f"{lower!r} cannot be split at {num_units}")
        parent = lower.parent
        if parent is None:
            raise InvariantError("the root is never split")
        upper = self._new_node(lower.key[:num_units], parent)
        upper.hit_count = lower.hit_count
        upper.priority = lower.priority
        upper.last_access_time = lower.last_access_time
        upper.creation_time = lower.creation_time
        parent.children[upper.key.child_key(self.page_size)] = upper
        lower.key = lower.key[num_units:]
        lower.parent = upper
        upper.children[lower.key.child_key(self.page_size)] = lower
        num_pages = num_units // self.page_size
        if lower.hash_value is not None:
            upper.hash_value = lower.hash_value[:num_pages]
            lower.hash_value = lower.hash_value[num_pages:]
        upper.told_media = lower.told_media
        if lower.event_hashes is not None:
            upper.event_hashes = lower.event_hashes[:num_pages]
            lower.event_hashes = lower.event_hashes[num_pages:]
        for component in self.components.values():
            component.split(upper, lower, num_units)
        self._on_split(upper, lower)
        return upper

    def _add_leaf(
        self, parent: TreeNode, key: RadixKey, value: torch.Tensor, priority: int
    ) -> TreeNode:
        leaf = self._new_node(key, parent)
        leaf.priority = priority  # before the heap sees it: its key may only rise from there
        leaf.last_access_time = leaf.creation_time = self._tick
        parent.children[key.child_key(self.page_size)] = leaf
        self._store(leaf, value)
        return leaf

    def _store(self, node: TreeNode, value: torch.Tensor) -> None:
        """Give a node without device copy its slots and keep the leaf set exact."""
        self.components[ComponentType.FULL].store(node, value)
        self._report(node, StorageMedium.GPU, is_stored=True)
        self._refresh_leaf(node)
        if node.parent is not None:
            self._refresh_leaf(node.parent)

    def _release_device(self, node: TreeNode) -> int:
        """Free the device copy of all components; return the full-attention tokens freed."""
        self._report(node, StorageMedium.GPU, is_stored=False)
        freed = {
            kind: component.release_device(node) for kind, component in self.components.items()
        }
        self.evictable_leaves.discard(node)
        if node.parent is not None:
            self._refresh_leaf(node.parent)
        if freed[ComponentType.FULL]:
            self._count("evicted_tokens", freed[ComponentType.FULL])
        return freed[ComponentType.FULL]

    def _remove(self, node: TreeNode) -> None:
        """Unlink a node that no tier holds any more."""
        if node.children or node.parent is None:
            raise InvariantError(f"{node!r} has {len(node.children)} children and cannot go")
        del node.parent.children[node.key.child_key(self.page_size)]

    def _new_node(self, key: RadixKey, parent: TreeNode | None) -> TreeNode:
        node = TreeNode(self._next_node_id, key, parent, self._num_data)
        self._next_node_id += 1
        return node

    def _is_evictable_leaf(self, node: TreeNode) -> bool:
        return (
            node.parent is not None
            and node.lock_ref == 0
            and not node.evicted
            and all(child.evicted for child in node.children.values())
        )

    def _refresh_leaf(self, node: TreeNode) -> None:
        """Put a node in or out of the leaf sets as its state says."""
        if self._is_evictable_leaf(node):
            self.evictable_leaves.add(node)
            if not node.is_in_heap:
                self._push(node)
        else:
            self.evictable_leaves.discard(node)
        if self._has_host_tier:
            self._refresh_host_leaf(node)

    def _push(self, node: TreeNode) -> None:
        heapq.heappush(self._heap, (self._evict_key(node), node.id, node))
        node.is_in_heap = True

    # -- page hashes and events -------------------------------------------------------------------

    def page_hashes(self, node: TreeNode) -> list[PageHash]:
        """Return a node's page hashes; those missing on the path are computed from the root down.

        So a chain never begins in the middle, whenever storage was attached.
        """
        return self._chain(node, "hash_value", lambda key: key)

    def event_hashes(self, node: TreeNode) -> list[PageHash]:
        """Return the hashes that events name a node's pages by, as ``page_hashes``.

        Those of pages, but where KV depends on the tokens behind a page: subscribers do not know
        these, so their blocks are named by the page's own tokens and those before.
        """
        if not self.is_eagle:
            return self.page_hashes(node)
        return self._chain(node, "event_hashes", RadixKey.without_lookahead)

    def _chain(
        self, node: TreeNode, name: str, hashed: Callable[[RadixKey], RadixKey]
    ) -> list[PageHash]:
        missing: list[TreeNode] = []
        current = node
        while current.parent is not None and getattr(current, name) is None:
            missing.append(current)
            current = current.parent
        before = getattr(current, name)
        prior = before[-1] if before else None
        for current in reversed(missing):
            seed = self._hash_seed(current.key)
            hashes = hashed(current.key).page_hashes(self.page_size, seed, prior)
            setattr(current, name, hashes)
            prior = hashes[-1]
        return getattr(node, name) or []

    def take_events(self) -> list[KVEvent]:
        """See the base class."""
        return [] if self._events is None else self._events.take()

    def set_weights_fingerprint(self, fingerprint: str | None) -> None:
        """See the base class. Events tell of the present weights' nodes only."""
        is_other = fingerprint != self.weights_fingerprint
        super().set_weights_fingerprint(fingerprint)
        if self._events is None or not is_other:
            return
        self._events.cleared()
        for node in self.iter_nodes():
            node.told_media = frozenset()
            if not node.evicted:
                self._report(node, StorageMedium.GPU, is_stored=True)
            if node.backuped and node.write_through_pending_id is None:
                self._report(node, StorageMedium.CPU, is_stored=True)

    def _hash_seed(self, key: RadixKey) -> bytes:
        """Return the seed of the page-hash chain of a key's namespace."""
        identity = self._hash_identity()
        fingerprint, extra_key = key.namespace
        if fingerprint is not None:
            identity = identity.with_weights(target_fingerprint(fingerprint))
        return identity.with_namespace(extra_key).digest()

    def _is_current(self, node: TreeNode) -> bool:
        """Whether a node's KV is of the present weights."""
        return node.key.weights_fingerprint == self.weights_fingerprint

    def _hash_identity(self) -> CacheIdentity:
        """Return what cached bytes depend on; without further tiers hashes only name tokens."""
        return CacheIdentity(
            model="", weights_fingerprint="", kv_dtype="", page_size=self.page_size, layout=""
        )

    def _report(self, node: TreeNode, medium: StorageMedium, *, is_stored: bool) -> None:
        """Record that a node's pages came to or left a medium, where anybody listens.

        Those of other weights left when the weights did: no request can match them.
        """
        if self._events is None or is_stored == (medium in node.told_media):
            return
        if not is_stored:
            node.told_media -= {medium}
            self._events.removed(self.event_hashes(node), medium)
        elif self._is_current(node):
            node.told_media |= {medium}
            hashes = self.event_hashes(node)
            before = self.event_hashes(node.parent) if node.parent is not None else []
            self._events.stored(node.key, hashes, before[-1] if before else None, medium)

    # -- requests -------------------------------------------------------------------------------

    def _may_insert(self, req: CacheableReq) -> bool:
        """Whether all of the request's KV is of the current weights."""
        return req.kv_fingerprint is None or req.kv_fingerprint == self.weights_fingerprint

    def _committed_key(self, req: CacheableReq) -> RadixKey:
        """Return the key of the committed tokens, whole pages only."""
        num_prompt = min(req.kv_committed_len, len(req.origin_input_ids))
        num_output = req.kv_committed_len - num_prompt
        raw = pack_tokens(req.origin_input_ids[:num_prompt])
        if num_output:
            raw += pack_tokens(req.output_ids[:num_output])
        return self.make_key(raw, req.extra_key).page_aligned(self.page_size)

    def _insert_committed(
        self, req: CacheableReq, key: RadixKey, slots: torch.Tensor, more_follows: bool
    ) -> InsertResult:
        """Insert a request's slots; what it has locked must still be there.

        A snapshot of its state needs a node that ends there, so the key goes in piece by piece.
        """
        known_len: int | None = None  # where the tree began to take slots
        for end in self._earlier_states(req, len(key)):
            piece = self._insert_piece(req, key[:end], slots, more_follows=True)
            if known_len is None and piece.prefix_len < end:
                known_len = piece.prefix_len
        result = self._insert_piece(req, key, slots, more_follows)
        if known_len is not None:
            result = replace(result, prefix_len=known_len)
        if result.prefix_len < req.cache_protected_len:
            raise InvariantError(
                f"request {req.rid} locked {req.cache_protected_len} tokens and the tree has "
                f"{result.prefix_len}"
            )
        return result

    def _insert_piece(
        self, req: CacheableReq, key: RadixKey, slots: torch.Tensor, more_follows: bool
    ) -> InsertResult:
        state_slot = self._capture_state(req, len(key))
        result = self.insert(
            InsertParams(
                key=key,
                value=slots[: len(key)],
                priority=req.priority or 0,
                is_chunked=more_follows,
                state_slot=state_slot,
            )
        )
        if state_slot is not None and not result.is_state_taken:
            self._drop_state(state_slot)
        return result

    def _path_indices(self, node: TreeNode | None) -> torch.Tensor:
        """Return the device slots from the root to the end of ``node``."""
        values: list[torch.Tensor] = []
        while node is not None and node.parent is not None:
            if node.value is None:
                raise InvariantError(f"{node!r} is in use and not on the device")
            values.append(node.value)
            node = node.parent
        return torch.cat(values[::-1]) if values else _empty_indices()

    # -- self-check -----------------------------------------------------------------------------

    def iter_nodes(self) -> Iterator[TreeNode]:
        """Yield every node below the root, parents first."""
        stack = [self.root_node]
        while stack:
            node = stack.pop()
            if node is not self.root_node:
                yield node
            stack.extend(node.children.values())

    def check_invariants(self, num_private_slots: int | None = None) -> None:
        """See the base class."""
        nodes = list(self.iter_nodes())
        for node in nodes:
            self._check_links(node)
            for component in self.components.values():
                component.check_node(node, self.page_size)
        self._check_sizes(nodes)
        self._check_leaves(nodes)
        self._check_slots(nodes)
        if num_private_slots is not None:
            available = self.token_to_kv_pool_allocator.available_size()
            size = self.token_to_kv_pool_allocator.size
            if available + self.total_size() + num_private_slots != size:
                raise InvariantError(
                    f"available {available} + evictable {self.evictable_size()} + protected "
                    f"{self.protected_size()} + private {num_private_slots} != size {size}"
                )

    def _check_links(self, node: TreeNode) -> None:
        num_units = len(node.key)
        if num_units == 0 or num_units % self.page_size:
            raise InvariantError(f"{node!r} has a key of {num_units} units")
        parent = node.parent
        if parent is None or parent.children.get(node.key.child_key(self.page_size)) is not node:
            raise InvariantError(f"{node!r} is not found under its own key")
        if parent is not self.root_node and parent.key.namespace != node.key.namespace:
            raise InvariantError(f"{node!r} is of another namespace than {parent!r}")
        if node.hash_value is not None and len(node.hash_value) != num_units // self.page_size:
            raise InvariantError(f"{node!r} has {len(node.hash_value)} page hashes")

    def _check_sizes(self, nodes: list[TreeNode]) -> None:
        resident = [node for node in nodes if not node.evicted]
        evictable = sum(len(node.key) for node in resident if node.lock_ref == 0)
        protected = sum(len(node.key) for node in resident if node.lock_ref > 0)
        if (evictable, protected) != (self.evictable_size(), self.protected_size()):
            raise InvariantError(
                f"evictable {self.evictable_size()} and protected {self.protected_size()}, "
                f"but the tree holds {evictable} and {protected}"
            )

    def _check_leaves(self, nodes: list[TreeNode]) -> None:
        leaves = {node for node in nodes if self._is_evictable_leaf(node)}
        if leaves != self.evictable_leaves:
            raise InvariantError(
                f"leaf set differs from the tree in {sorted(leaves ^ self.evictable_leaves)}"
            )
        in_heap = sorted(node.id for _, _, node in self._heap)
        marked = sorted({node.id for _, _, node in self._heap if node.is_in_heap})
        if in_heap != marked or not all(node.is_in_heap for node in leaves):
            raise InvariantError(f"heap entries {in_heap}, marked {marked}, leaves {len(leaves)}")

    def _check_slots(self, nodes: list[TreeNode]) -> None:
        values = [node.value for node in nodes if node.value is not None]
        if not values:
            return
        slots = torch.cat(values)
        in_order = np.sort(slots.numpy())
        is_again = in_order[1:] == in_order[:-1]
        if is_again.any():
            raise InvariantError(f"slots in two nodes: {in_order[1:][is_again][:16].tolist()}")
        is_free = self.token_to_kv_pool_allocator.is_free(slots)
        if is_free.any():
            raise InvariantError(f"slots of the tree are free: {slots[is_free][:16].tolist()}")
