"""KV whose content tells what it belongs to, and a small driver of request lives over a cache.

``FakeKV`` is a real pool of int64: the content of a slot is a checksum of the token prefix that it
stands for, the namespace, the weights fingerprint and the layer. Any mix-up of slots shows as a
wrong number. ``FakeEngine`` does with a prefix cache what a scheduler does, one call per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

from sglang.srt.mem_cache.allocator import create_token_to_kv_pool_allocator
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    CacheInitParams,
    EvictParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.registry import create_tree_cache
from sglang.srt.mem_cache.tree_components.base import TreeNode

_MASK = (1 << 62) - 1
_MULTIPLIER = 6364136223846793005
_INCREMENT = 1442695040888963407


def prefix_checksums(
    token_ids: Sequence[int],
    namespace: str | None = None,
    fingerprint: str | None = None,
    layer: int = 0,
) -> torch.Tensor:
    """Return int64 [num_tokens]: entry i depends on tokens [0, i] and all other arguments."""
    state = layer + 1
    for byte in f"{namespace!r}/{fingerprint!r}".encode():
        state = (state * _MULTIPLIER + byte + _INCREMENT) & _MASK
    checksums = []
    for token in token_ids:
        state = (state * _MULTIPLIER + token + _INCREMENT) & _MASK
        checksums.append(state)
    return torch.tensor(checksums, dtype=torch.int64)


class FakeKV(MHATokenToKVPool):
    """One int64 per slot and layer; V is the complement of K.

    ``is_draft``: the content at position i also depends on token i+1, as with an EAGLE draft.
    """

    def __init__(
        self, size: int, page_size: int, layer_num: int = 2, is_draft: bool = False
    ) -> None:
        super().__init__(
            size=size,
            page_size=page_size,
            dtype=torch.int64,
            head_num=1,
            head_dim=1,
            layer_num=layer_num,
            device="cpu",
        )
        self.is_draft = is_draft

    def _expected(
        self,
        token_ids: Sequence[int],
        namespace: str | None,
        fingerprint: str | None,
        layer: int,
    ) -> torch.Tensor:
        checksums = prefix_checksums(token_ids, namespace, fingerprint, layer)
        # Position i of a draft is named by the checksum that includes token i+1.
        return checksums[1:] if self.is_draft else checksums

    def write_prefix(
        self,
        slots: torch.Tensor,
        token_ids: Sequence[int],
        start: int = 0,
        namespace: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Compute positions [start, start + len(slots)) of ``token_ids`` into ``slots``.

        A draft needs ``token_ids`` to reach one token further.
        """
        for layer in range(self.layer_num):
            content = self._expected(token_ids, namespace, fingerprint, layer)
            content = content[start : start + len(slots)].reshape(-1, 1, 1)
            self.set_kv_buffer(SimpleNamespace(layer_id=layer), slots, content, ~content)

    def verify_prefix(
        self,
        slots: torch.Tensor,
        token_ids: Sequence[int],
        namespace: str | None = None,
        fingerprint: str | None = None,
    ) -> None:
        """Raise AssertionError unless ``slots`` hold positions [0, len(slots)) of these tokens."""
        where = slots.numpy()  # so small arrays take NumPy half of PyTorch's time
        for layer in range(self.layer_num):
            want = self._expected(token_ids, namespace, fingerprint, layer)[: len(slots)].numpy()
            keys = self.get_key_buffer(layer).numpy().ravel()[where]
            values = self.get_value_buffer(layer).numpy().ravel()[where]
            if not np.array_equal(keys, want) or not np.array_equal(values, ~want):
                position = int(((keys != want) | (values != ~want)).argmax())
                raise AssertionError(
                    f"layer {layer}, position {position}, slot {int(slots[position])} holds "
                    f"{int(keys[position])}, not {int(want[position])}"
                )


@dataclass(eq=False)
class FakeReq:
    """A request as far as a cache is concerned."""

    rid: str
    origin_input_ids: list[int]
    extra_key: str | None = None
    priority: int | None = None
    output_ids: list[int] = field(default_factory=list)
    req_pool_idx: int | None = None
    prefix_indices: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    last_node: TreeNode | None = None
    cache_protected_len: int = 0
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    kv_fingerprint: str | None = None

    @property
    def all_ids(self) -> list[int]:
        """Prompt and output."""
        return self.origin_input_ids + self.output_ids


class FakeEngine:
    """A cache with its pools and the request steps of a scheduler; ``check`` after each step."""

    def __init__(
        self,
        size: int = 64,
        page_size: int = 1,
        num_reqs: int = 8,
        max_context_len: int = 256,
        eviction_policy: str = "lru",
        disable: bool = False,
        is_eagle: bool = False,
        weights_fingerprint: str | None = None,
        lookahead: int | None = None,
    ) -> None:
        self.page_size = page_size
        self.kv = FakeKV(size, page_size)
        self.allocator = create_token_to_kv_pool_allocator(size, page_size)
        self.req_pool = ReqToTokenPool(num_reqs, max_context_len, "cpu")
        self.tree: BasePrefixCache = create_tree_cache(
            CacheInitParams(
                req_to_token_pool=self.req_pool,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                disable=disable,
                eviction_policy=eviction_policy,
                is_eagle=is_eagle,
                lookahead=lookahead,
                weights_fingerprint=weights_fingerprint,
            )
        )
        self.running: list[FakeReq] = []

    def num_private_slots(self) -> int:
        """Slots of running requests that are not the tree's, in whole pages."""
        lens = [req.kv_allocated_len - req.cache_protected_len for req in self.running]
        return sum(-(-num // self.page_size) * self.page_size for num in lens)

    def check(self) -> None:
        """Check the tree, the pool equation and the content of every running request."""
        self.tree.check_invariants(self.num_private_slots())
        for req in self.running:
            row = req.req_pool_idx
            assert row is not None
            slots = self.req_pool.read(row, 0, req.kv_committed_len)
            self.kv.verify_prefix(slots, req.all_ids, req.extra_key, req.kv_fingerprint)
        assert self.req_pool.available_size() == self.req_pool.size - len(self.running)

    def admit(self, req: FakeReq) -> bool:
        """Match, lock and give a row; False when no row is free."""
        rows = self.req_pool.alloc(1)
        if rows is None:
            return False
        req.kv_fingerprint = self.tree.weights_fingerprint
        key = self.tree.make_key(req.all_ids[:-1], req.extra_key)
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        self.tree.inc_lock_ref(match.last_device_node)
        req.req_pool_idx = rows[0]
        req.prefix_indices = match.device_indices
        req.last_node = match.last_device_node
        num_hit = len(match.device_indices)
        req.cache_protected_len = req.kv_committed_len = req.kv_allocated_len = num_hit
        self.req_pool.write(rows[0], 0, match.device_indices)
        self.running.append(req)
        return True

    def extend(self, req: FakeReq, num_tokens: int, over_allocate: int = 0) -> bool:
        """Compute ``num_tokens`` more; take ``over_allocate`` more slots; False when full."""
        row = req.req_pool_idx
        assert row is not None
        start, done = req.kv_allocated_len, req.kv_committed_len
        end = done + num_tokens + over_allocate
        if end > start:
            last_loc = int(self.req_pool.req_to_token_cpu[row, start - 1]) if start else -1
            slots = self._alloc(start, end, last_loc)
            if slots is None:
                return False
            self.req_pool.write(row, start, slots)
            req.kv_allocated_len = end
        req.kv_committed_len = done + num_tokens
        self.kv.write_prefix(
            self.req_pool.read(row, done, req.kv_committed_len),
            req.all_ids,
            done,
            req.extra_key,
            self.tree.weights_fingerprint,
        )
        return True

    def _alloc(self, start: int, end: int, last_loc: int) -> torch.Tensor | None:
        page = self.page_size
        need = (-(-end // page) + start // -page) * page
        shortfall = max(0, need - self.allocator.available_size())
        free_swa = self.allocator.available_swa_size()
        missing_swa = 0 if free_swa is None else max(0, need - free_swa)
        if shortfall or missing_swa:
            self.tree.evict(EvictParams(num_tokens=shortfall, num_swa_tokens=missing_swa))
        return self.allocator.alloc_extend([start], [end], [last_loc])

    def finish(self, req: FakeReq, is_insert: bool = True) -> None:
        """End a request for whatever reason."""
        self.tree.cache_finished_req(req, is_insert=is_insert)
        assert req.req_pool_idx is not None
        self.req_pool.free(req.req_pool_idx)
        req.req_pool_idx = None
        self.running.remove(req)

    def run(self, token_ids: Sequence[int], extra_key: str | None = None) -> int:
        """Serve a whole request of these tokens; return how many were cached."""
        req = FakeReq(rid="run", origin_input_ids=list(token_ids), extra_key=extra_key)
        assert self.admit(req)
        num_hit = req.kv_committed_len
        assert self.extend(req, len(token_ids) - num_hit)
        self.finish(req)
        return num_hit
