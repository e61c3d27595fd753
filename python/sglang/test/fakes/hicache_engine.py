"""A hierarchical cache with tiny pools and the steps of a scheduler over it.

``HiCacheEngine`` extends ``FakeEngine``: requests wait for their prefetch, load what the host has,
run and end; ``tick`` is the scheduler's. Content is checked on the device for running requests and,
by ``check_host``, on the host for every node.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import create_token_to_kv_pool_allocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheInitParams,
    LoadBackParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_metrics import MetricsHook, ignore_metric
from sglang.srt.mem_cache.hicache_base import HiCacheTreeBase
from sglang.srt.mem_cache.hicache_records import HiCacheParams
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.mamba_radix_cache import MambaRadixCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.memory_pool_host import (
    HostPoolGroup,
    MHATokenToKVPoolHost,
    PoolEntry,
)
from sglang.srt.mem_cache.page_key import CacheIdentity
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.tree_components.base import ComponentType, TreeNode
from sglang.srt.platforms.cpu import CpuPlatform
from sglang.test.fakes.controller_rig import MemoryStore
from sglang.test.fakes.fake_kv import FakeEngine, FakeKV, FakeReq, prefix_checksums
from sglang.test.fakes.fake_states import TieredStates
from sglang.test.fakes.fake_windows import FakeWindows
from sglang.test.fakes.stepped_controller import SteppedController

TreeFactory = Callable[[CacheInitParams], HiCacheTreeBase]


class ManualClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@functools.lru_cache(maxsize=50_000)
def _checksums(
    tokens: tuple[int, ...], namespace: str | None, fingerprint: str | None, layer: int
) -> torch.Tensor:
    return prefix_checksums(tokens, namespace, fingerprint, layer)


class CachedFakeKV(FakeKV):
    """``FakeKV`` that remembers what it computed: a model test asks for the same over and over."""

    def _expected(
        self,
        token_ids: Sequence[int],
        namespace: str | None,
        fingerprint: str | None,
        layer: int,
    ) -> torch.Tensor:
        return _checksums(tuple(token_ids), namespace, fingerprint, layer)


@dataclass(eq=False)
class HiReq(FakeReq):
    """A request with what the tiers add."""

    consumer_index: int = -1  # load that its first forward waits for
    is_loading: bool = False
    loaded_tokens: int = 0  # from storage
    host_tokens: int = 0  # copied from the host
    done_tokens: int = field(default=0)


def _fake_identity(page_size: int) -> CacheIdentity:
    return CacheIdentity(
        model="fake",
        weights_fingerprint="",
        kv_dtype="int64",
        page_size=page_size,
        layout="page_first",
    )


class HiCacheEngine(FakeEngine):
    """A stepped cache over the three tiers. ``store``: shared by engines that are one fleet."""

    tree: HiCacheTreeBase

    def __init__(
        self,
        make_tree: TreeFactory = HiRadixCache,
        *,
        size: int = 64,
        host_size: int = 64,
        page_size: int = 1,
        num_reqs: int = 8,
        max_context_len: int = 256,
        is_eagle: bool = False,
        weights_fingerprint: str | None = "w0",
        store: HiCacheStorage | None = None,
        storage_backend: str | None = "memory",
        extra_config: str | None = '{"prefetch_threshold": 1}',
        controller_options: dict[str, Any] | None = None,
        controller_class: type[HiCacheController] = SteppedController,
        enable_kv_cache_events: bool = False,
        metrics: MetricsHook = ignore_metric,
        eviction_policy: str = "lru",
        num_states: int = 0,
        num_host_states: int | None = None,
        window: int = 0,
        num_window_rows: int = 0,
        num_host_window_rows: int = 0,
        **hicache: Any,
    ) -> None:
        self.page_size = page_size
        self.kv = CachedFakeKV(size, page_size)
        self.allocator = create_token_to_kv_pool_allocator(size, page_size)
        self.req_pool = ReqToTokenPool(num_reqs, max_context_len, "cpu")
        self.host = MHATokenToKVPoolHost(self.kv, host_size, "page_first")
        self.store = store or MemoryStore()
        self.clock = ManualClock()
        # Recurrent states, one slot each, as many on the host; 0: the model has none.
        self.states: TieredStates | None = None
        if num_states:
            self.states = TieredStates(self.kv, num_states, num_host_states or num_states)
        # Layers with a sliding window beside the others; 0: the model has none.
        self.windows: FakeWindows | None = None
        if window:
            self.windows = FakeWindows(self.kv, num_window_rows, num_host_window_rows, window)
            self.allocator = self.windows.allocator
        # Copies and storage move when told to, unless a test wants real threads.
        self.any_controller = controller_class(
            self.allocator,
            self._host_pools(),
            page_size=page_size,
            platform=CpuPlatform(),
            backend_factory=lambda name, config: self.store,
            join_timeout_s=0.3,
            **(controller_options or {}),
        )
        self.tree = make_tree(
            CacheInitParams(
                req_to_token_pool=self.req_pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                is_eagle=is_eagle,
                weights_fingerprint=weights_fingerprint,
                enable_kv_cache_events=enable_kv_cache_events,
                metrics=metrics,
                eviction_policy=eviction_policy,
                state_allocator=self.states.allocator if self.states is not None else None,
                capture_state=self.capture_state,
                hicache=HiCacheParams(
                    controller=self.any_controller,
                    identity=_fake_identity(page_size),
                    storage_backend=storage_backend,
                    storage_extra_config=extra_config,
                    clock=self.clock,
                    **hicache,
                ),
            )
        )
        self.running: list[FakeReq] = []
        self.waiting: list[HiReq] = []

    def _host_pools(self) -> HostPoolGroup:
        anchor = PoolEntry(name=PoolName.KV, host_pool=self.host, device_pool=self.kv)
        group = HostPoolGroup(anchor, "direct")
        for beside in (self.states, self.windows):
            if beside is not None:
                group.add(beside.entry())
        return group

    def capture_state(self, req: Any, num_tokens: int) -> torch.Tensor | None:
        """Make a snapshot of a request's state; a state is named by all tokens before it."""
        if self.states is None:
            return None
        slot = self.states.allocator.alloc(1)
        if slot is None and isinstance(self.tree, MambaRadixCache):
            self.tree.free_state_slots(1)
            slot = self.states.allocator.alloc(1)
        if slot is not None:
            self.states.pool.write_state(
                slot, req.all_ids[:num_tokens], req.extra_key, req.kv_fingerprint
            )
        return slot

    def _verify_state(self, req: FakeReq) -> None:
        """Raise unless the state that a request begins with is the one after its prefix."""
        num_tokens = len(req.prefix_indices)
        if self.states is None or num_tokens == 0:
            return
        assert req.last_node is not None
        slot = req.last_node.data[ComponentType.MAMBA].value
        assert slot is not None, f"{req.last_node!r} has no state to begin with"
        self.states.pool.verify_state(
            slot, req.all_ids[:num_tokens], req.extra_key, req.kv_fingerprint
        )

    @property
    def controller(self) -> SteppedController:
        """The controller of a stepped engine."""
        assert isinstance(self.any_controller, SteppedController)
        return self.any_controller

    # -- a scheduler's steps -----------------------------------------------------------------------

    def tick(self) -> None:
        """What a scheduler loop begins with."""
        self.tree.check_hicache_events()

    def settle(self, num_ticks: int = 6) -> None:
        """Let everything under way end."""
        for _ in range(num_ticks):
            self.controller.start_writing()
            self.controller.step_all()
            self.tick()

    def cap(self, req: FakeReq) -> int:
        """How many tokens the key of a match may have: one token at least is computed."""
        return len(req.all_ids) - 1 + (1 if self.tree.is_eagle else 0)

    def submit(self, req: HiReq) -> None:
        """Put a request into the waiting queue, its prefetch begun."""
        self.waiting.append(req)
        self._prefetch(req)

    def _prefetch(self, req: HiReq) -> None:
        match = self._match(req)
        num_matched = len(match.device_indices) + match.host_hit_length
        self.tree.prefetch_from_storage(
            req.rid,
            match.last_host_node,
            req.all_ids[num_matched : self.cap(req)],
            extra_key=req.extra_key,
            matched_node=match.best_match_node,
        )

    def _match(self, req: FakeReq) -> Any:
        key = self.tree.make_key(req.all_ids[: self.cap(req)], req.extra_key)
        return self.tree.match_prefix(MatchPrefixParams(key=key))

    def abort_waiting(self, req: HiReq) -> None:
        """Take a request out of the waiting queue."""
        self.waiting.remove(req)
        self.tree.release_aborted_request(req.rid)

    def admit(self, req: FakeReq) -> bool:
        """Admit if its prefetch lets it: match, lock, load back, row; False when it must wait."""
        assert isinstance(req, HiReq)
        if not self.tree.check_prefetch_progress(req.rid):
            return False
        if self.tree.has_followed_prefetch(req.rid):
            self._prefetch(req)
            if not self.tree.check_prefetch_progress(req.rid):
                return False
        rows = self.req_pool.alloc(1)
        if rows is None:
            return False
        req.loaded_tokens += self.tree.pop_prefetch_loaded_tokens(req.rid)
        req.kv_fingerprint = self.tree.weights_fingerprint
        match = self._match(req)
        self.tree.inc_lock_ref(match.last_device_node)
        loaded = self.tree.init_load_back(
            LoadBackParams(
                best_match_node=match.best_match_node,
                last_device_node=match.last_device_node,
                host_hit_length=match.host_hit_length,
            )
        )
        self.tree.inc_lock_ref(loaded.last_node)
        self.tree.dec_lock_ref(match.last_device_node)
        indices = torch.cat([match.device_indices, loaded.device_indices])
        req.req_pool_idx = rows[0]
        req.prefix_indices = indices
        req.last_node = loaded.last_node
        req.host_tokens = len(loaded.device_indices)
        req.cache_protected_len = req.kv_committed_len = req.kv_allocated_len = len(indices)
        self.req_pool.write(rows[0], 0, indices)
        req.consumer_index = self.tree.ready_to_load_host_cache()
        req.is_loading = len(indices) > 0
        self.running.append(req)
        if req in self.waiting:
            self.waiting.remove(req)
        return True

    def extend(self, req: FakeReq, num_tokens: int, over_allocate: int = 0) -> bool:
        """See ``FakeEngine``; the first forward waits for what is being loaded."""
        assert isinstance(req, HiReq)
        if req.is_loading:
            self.controller.set_consumer(req.consumer_index)
            for layer in range(self.kv.layer_num):
                self.kv.get_key_buffer(layer)  # waits, as attention does
            if self.windows is not None:
                for layer in range(self.windows.rows.layer_num):
                    self.windows.rows.get_key_buffer(layer)
            self.controller.set_consumer(-1)
            while self.controller.load_engine.step():
                pass  # an earlier batch's load is older on the same stream
            req.is_loading = False
            self._verify_state(req)
        if self.windows is None:
            return super().extend(req, num_tokens, over_allocate)
        assert req.req_pool_idx is not None
        self.tree.release_out_of_window(self.running)
        done = req.kv_committed_len
        if done and num_tokens:
            self.windows.verify(req, self.req_pool.read(req.req_pool_idx, 0, done))
        if not super().extend(req, num_tokens, over_allocate):
            return False
        slots = self.req_pool.read(req.req_pool_idx, done, req.kv_committed_len)
        self.windows.compute(req, slots, done)
        return True

    def serve(
        self, token_ids: Sequence[int], extra_key: str | None = None, rid: str = "run"
    ) -> HiReq:
        """Serve a whole request, waiting for its prefetch; it has ended afterwards."""
        req = HiReq(rid=rid, origin_input_ids=list(token_ids), extra_key=extra_key)
        self.submit(req)
        for _ in range(8):
            if self.admit(req):
                break
            self.controller.step_all()
            self.tick()
        assert req in self.running, "never admitted"
        req.done_tokens = req.kv_committed_len
        assert self.extend(req, len(token_ids) - req.kv_committed_len)
        self.check()
        self.finish(req)
        return req

    def run(self, token_ids: Sequence[int], extra_key: str | None = None) -> int:
        """Serve a whole request without asking storage; return how many tokens were cached."""
        req = HiReq(rid="run", origin_input_ids=list(token_ids), extra_key=extra_key)
        assert self.admit(req)
        num_hit = req.kv_committed_len
        assert self.extend(req, len(token_ids) - num_hit)
        self.finish(req)
        return num_hit

    def cached(self, token_ids: Sequence[int], extra_key: str | None = None) -> tuple[int, int]:
        """Return (device, host) tokens that a match of exactly these tokens finds."""
        key = self.tree.make_key(list(token_ids), extra_key)
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        return len(match.device_indices), match.host_hit_length

    def evict_all(self) -> None:
        """Take everything that is not locked off the device."""
        self.tree.evict(self.allocator.size)

    def flush(self) -> None:
        """What a flush of an idle scheduler does."""
        assert not self.running
        for req in list(self.waiting):
            self.abort_waiting(req)
        self.tree.reset()
        self.allocator.clear()
        self.req_pool.clear()
        if self.states is not None:
            self.states.allocator.clear()

    # -- checks ------------------------------------------------------------------------------------

    def check(self) -> None:
        """See ``FakeEngine``; requests whose prefix is still on its way are left out."""
        self.tree.check_invariants(self.num_private_slots())
        for req in self.running:
            assert isinstance(req, HiReq) and req.req_pool_idx is not None
            if not req.is_loading:
                slots = self.req_pool.read(req.req_pool_idx, 0, req.kv_committed_len)
                self.kv.verify_prefix(slots, req.all_ids, req.extra_key, req.kv_fingerprint)
                if self.windows is not None:
                    self.windows.verify(req, slots)
        assert self.req_pool.available_size() == self.req_pool.size - len(self.running)
        if self.states is not None:
            states = [node.data[ComponentType.MAMBA] for node in self.tree.iter_nodes()]
            on_device = sum(data.value is not None for data in states)
            of_states = self.states.allocator
            assert of_states.available_size() + on_device == of_states.size

    def check_host(self) -> None:
        """Compare every settled host copy with what its tokens should give."""
        for node in self.tree.iter_nodes():
            if node.host_value is not None and node.write_through_pending_id is None:
                self.verify_host(node)

    def verify_host(self, node: TreeNode) -> None:
        """Raise unless the node's host pages hold its tokens' KV."""
        tokens: list[int] = []
        current: TreeNode | None = node
        end = 0
        while current is not None and current.parent is not None:
            units = list(current.key.token_ids)[: len(current.key)]
            tokens = units + tokens
            end += len(units)
            current = current.parent
        fingerprint, namespace = node.key.namespace
        state = node.data[ComponentType.MAMBA].host_value if self.states is not None else None
        if self.states is not None and state is not None:
            want_bytes = self.states.pool.page_bytes(tokens, namespace, fingerprint)
            got_bytes = b"".join(bytes(part) for part in self.states.host.page_buffers(int(state)))
            assert got_bytes == want_bytes, f"host state of {node!r} is wrong"
        host_value = node.host_value
        assert host_value is not None
        start = end - len(node.key)
        rows = node.data[ComponentType.SWA].host_value if self.windows is not None else None
        if self.windows is not None and rows is not None:
            self._verify_host_pages(node, self.windows.host, rows, tokens, start)
        self._verify_host_pages(node, self.host, host_value, tokens, start)

    def _verify_host_pages(
        self,
        node: TreeNode,
        host: MHATokenToKVPoolHost,
        host_value: torch.Tensor,
        tokens: list[int],
        start: int,
    ) -> None:
        fingerprint, namespace = node.key.namespace
        num_layers = host.layer_num
        for layer in range(num_layers):
            want = _checksums(tuple(tokens), namespace, fingerprint, layer)[start:]
            pages = [
                host.get_data_page(int(index), flat=False)
                for index in host_value[:: self.page_size]
            ]
            # page_first: [layer, kv, token, head, dim]
            got = torch.cat([page.reshape(num_layers, 2, -1)[layer, 0] for page in pages])
            assert torch.equal(got.flatten(), want), f"host content of {node!r} is wrong"

    def dump(self) -> list[tuple[Any, ...]]:
        """Return the tree as data, without slots: equal on ranks that are in step."""
        return [
            (
                node.id,
                node.key.raw,
                node.key.namespace,
                node.evicted,
                node.backuped,
                node.lock_ref,
                node.data[0].host_lock_ref,
                node.hit_count,
                node.write_through_pending_id is None,
                node.storage_op_id,
                node.unstored_from,
                [(d.value is None, d.host_value is None, d.host_lock_ref) for d in node.data[1:]],
            )
            for node in sorted(self.tree.iter_nodes())
        ]
