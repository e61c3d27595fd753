"""From settings to a hierarchical cache: host pools, controller, identity of the bytes.

Called once per scheduler at start-up, on the scheduler thread. `register_draft` is the part that
`Scheduler._maybe_register_hicache_draft` uses.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import get_tp_group, new_host_group
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import BaseTokenToKVPoolAllocator
from sglang.srt.mem_cache.hicache_records import HiCacheParams
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.host_pool_sizing import (
    MIN_PAGES,
    HostPoolLimits,
    host_memory_info,
    host_pool_tokens,
)
from sglang.srt.mem_cache.hybrid_kv_pool import HybridLinearKVPool
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.mem_cache.memory_pool_host import (
    HostKVCache,
    HostPoolGroup,
    MambaPoolHost,
    PoolEntry,
    make_host_pool,
)
from sglang.srt.mem_cache.page_key import CacheIdentity
from sglang.srt.mem_cache.pool_transfer import PageRule, PoolName
from sglang.srt.mem_cache.storage_control import MinReduce, group_min_reduce
from sglang.srt.mem_cache.swa_pool import SWAKVPool
from sglang.srt.platforms import current_platform

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HiCacheSettings:
    """The part of the server's arguments that the hierarchical cache reads."""

    limits: HostPoolLimits
    layout: str
    io_backend: str
    write_policy: str
    prefetch_policy: str
    draft_storage_policy: str
    served_model_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankReductions:
    """MIN over the TP ranks, for the scheduler thread and for the prefetch thread.

    Each has a group of its own, since their calls interleave. None with one rank.
    """

    min_reduce: MinReduce | None = None
    prefetch_min_reduce: MinReduce | None = None

    @classmethod
    def of_tp_group(cls) -> _RankReductions:
        """Make them. Collective over the TP ranks."""
        group = get_tp_group().cpu_group
        if group is None:
            return cls()
        return cls(
            min_reduce=group_min_reduce(group),
            prefetch_min_reduce=group_min_reduce(new_host_group()),
        )


def build_hicache(
    settings: HiCacheSettings,
    *,
    device_pool: KVCache,
    allocator: BaseTokenToKVPoolAllocator,
    model_config: ModelConfig,
    weights_fingerprint: str,
    draft_token_bytes: int,
    on_progress: Callable[[], None],
) -> HiCacheParams:
    """Allocate the host pool and build the controller. Collective over the TP ranks.

    `draft_token_bytes`: of a draft's KV that will travel along. Raises ValueError, with a sentence
    for the user, when the host pool cannot fit.
    """
    anchor_pool = full_attention_pool(device_pool)
    num_slots = anchor_pool.size + anchor_pool.page_size
    own_bytes = sum(anchor_pool.get_kv_size_bytes()) // num_slots
    own_bytes += side_bytes_per_token(device_pool)
    num_tokens = host_pool_tokens(
        settings.limits,
        device_tokens=anchor_pool.size,
        bytes_per_token=own_bytes + draft_token_bytes,
        page_size=anchor_pool.page_size,
        memory=host_memory_info(),
    )
    ranks = _RankReductions.of_tp_group()
    if ranks.min_reduce is not None:
        # Ranks must agree on the size, or one would evict where another does not.
        num_tokens = ranks.min_reduce([num_tokens])[0]
    group = _make_host_pools(settings, device_pool, num_tokens)
    anchor = group.anchor.host_pool
    controller = HiCacheController(
        allocator,
        group,
        page_size=anchor_pool.page_size,
        platform=current_platform(),
        prefetch_min_reduce=ranks.prefetch_min_reduce,
        storage_config=_storage_config(settings, anchor),
        draft_storage_policy=settings.draft_storage_policy,
        on_progress=on_progress,
    )
    logger.info(
        "Host KV cache: %d tokens (%.2f GB, %s, io %s), %s",
        num_tokens,
        num_tokens * own_bytes / 1e9,
        settings.layout,
        settings.io_backend,
        settings.write_policy,
    )
    side_pools = [entry.host_pool for entry in group.own_slot_entries]
    return HiCacheParams(
        controller=controller,
        identity=make_identity(model_config, anchor, weights_fingerprint, side_pools),
        write_policy=settings.write_policy,
        prefetch_policy=settings.prefetch_policy,
        min_reduce=ranks.min_reduce,
    )


def _make_host_pools(settings: HiCacheSettings, pool: KVCache, num_tokens: int) -> HostPoolGroup:
    """A host pool of `num_tokens` and those beside it, ready to be copied to and from."""
    device_pool = full_attention_pool(pool)
    host_pool = make_host_pool(device_pool, num_tokens, settings.layout)
    if host_pool is None:
        raise ValueError(
            f"--enable-hierarchical-cache does not know the model's kind of KV cache "
            f"({type(device_pool).__name__})."
        )
    anchor = PoolEntry(name=PoolName.KV, host_pool=host_pool, device_pool=device_pool)
    group = HostPoolGroup(anchor, settings.io_backend)
    for entry in make_side_pools(pool, num_tokens, settings.layout):
        group.add(entry)
        logger.info("Host pool %s: %d slots", entry.name, entry.host_pool.size)
    group.warm_up()
    return group


def _storage_config(settings: HiCacheSettings, host_pool: HostKVCache) -> HiCacheStorageConfig:
    tp = get_tp_group()
    return HiCacheStorageConfig(
        tp_rank=tp.rank,
        tp_size=tp.size,
        is_mla_model=host_pool.is_replicated,
        is_page_first_layout=settings.layout != "layer_first",
        model_name=settings.served_model_name,
    )


def full_attention_pool(pool: KVCache) -> KVCache:
    """The pool that has a slot for every token; of a model with other layers it is a part."""
    return pool.full_kv_pool if isinstance(pool, HybridLinearKVPool | SWAKVPool) else pool


def side_bytes_per_token(pool: KVCache) -> int:
    """Bytes in pools with slots of their own for each token of the full-attention pool."""
    if isinstance(pool, HybridLinearKVPool):
        num_bytes = pool.mamba_pool.size * pool.mamba_pool.bytes_per_slot
        return -(-num_bytes // pool.size)
    if isinstance(pool, SWAKVPool):
        return -(-sum(pool.swa_kv_pool.get_kv_size_bytes()) // pool.size)
    return 0


def make_side_pools(pool: KVCache, num_tokens: int, layout: str) -> list[PoolEntry]:
    """Make the host pools with slots of their own beside one of `num_tokens`.

    Each is as much larger than its device pool as that one is.
    """
    if isinstance(pool, SWAKVPool):
        return [_make_window_pool(pool, num_tokens, layout)]
    if not isinstance(pool, HybridLinearKVPool):
        return []
    states = pool.mamba_pool
    if states.size == 0:
        raise ValueError("--enable-hierarchical-cache needs snapshots of the recurrent state.")
    num_slots = max(MIN_PAGES, num_tokens * states.size // pool.size)
    return [
        PoolEntry(
            name=PoolName.MAMBA,
            host_pool=MambaPoolHost(states, num_slots),
            device_pool=states,
            share_indices_with_anchor=False,
            rule=PageRule(trailing=1),
        )
    ]


def _make_window_pool(pool: SWAKVPool, num_tokens: int, layout: str) -> PoolEntry:
    windows, page = pool.swa_kv_pool, pool.page_size
    num_slots = max(MIN_PAGES, num_tokens * windows.size // pool.size // page) * page
    host_pool = make_host_pool(windows, num_slots, layout)
    if host_pool is None:
        raise ValueError(f"no host pool is known for windows in a {type(windows).__name__}")
    return PoolEntry(
        name=PoolName.SWA,
        host_pool=host_pool,
        device_pool=windows,
        share_indices_with_anchor=False,
        rule=PageRule(trailing=max(1, -(-(pool.window - 1) // page))),
    )


def make_identity(
    model_config: ModelConfig,
    host_pool: HostKVCache,
    weights_fingerprint: str,
    side_pools: Sequence[HostKVCache] = (),
) -> CacheIdentity:
    """What the bytes of host pools are a function of, besides the tokens.

    What every rank holds alike is the same for any number of ranks. `side_pools`: those whose pages
    are named by the same hashes.
    """
    tp = get_tp_group()
    shard = (0, 1) if host_pool.is_replicated else (tp.rank, tp.size)
    config = json.dumps(dict(model_config.hf_config), sort_keys=True, default=str)
    digest = hashlib.sha256(config.encode()).hexdigest()[:16]
    return CacheIdentity(
        model=f"{model_config.architectures[0]}/{digest}/{model_config.dtype}",
        weights_fingerprint=weights_fingerprint,
        kv_dtype=str(host_pool.dtype),
        page_size=host_pool.page_size,
        layout=" + ".join(pool.byte_layout_tag() for pool in (host_pool, *side_pools)),
        tp_rank=shard[0],
        tp_size=shard[1],
    )


def register_draft(
    controller: HiCacheController,
    pool: KVCache,
    model_config: ModelConfig,
    fingerprint: Callable[[], str],
) -> bool:
    """Let a draft's KV travel with the target's; False where its kind of pool is not supported.

    Its host pool has the target's number of slots, page size and layout. Of a draft with other
    layers the full-attention ones travel.
    """
    target_host = controller.mem_pool_host
    pool = full_attention_pool(pool)
    host_pool = make_host_pool(pool, target_host.size, target_host.layout)
    if host_pool is None:
        logger.warning(
            "The draft's KV pool (%s) cannot be kept beside the target's: after a cache hit from "
            "host or storage the accept length will be low",
            type(pool).__name__,
        )
        return False
    registered = host_pool

    def digest() -> bytes:
        return make_identity(model_config, registered, fingerprint()).digest()

    controller.set_draft_kv_pool(pool, host_pool, digest)
    controller.host_pools.warm_up()
    logger.info("Draft KV travels with the target's: %d host tokens", host_pool.size)
    return True
