"""More than a hundred thousand checked steps of random lives over the hierarchical caches.

Every tree, write policy, prefetch policy, page size and key mode, one rank and two; storage delays,
fails, truncates and corrupts. The unit suite has a short run of the same model. With `--run-slow`
there are more and longer lives: 260,000 steps.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.hicache_records import PREFETCH_POLICIES, WRITE_POLICIES
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.hicache_model import HiCacheModel, ModelConfig

register_cpu_ci(est_time=75, suite="hicache")

PAGE_SIZES = (1, 4, 16)
TREES = (HiRadixCache, UnifiedRadixCache)


@pytest.fixture
def is_long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--run-slow"))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The faults of the stores are meant."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("prefetch_policy", PREFETCH_POLICIES)
def test_one_rank(write_policy: str, prefetch_policy: str, is_long: bool) -> None:
    """3 x 6 x 1,500 steps of each of two trees and 6 x 6 x 1,500: 108,000; long: 162,000."""
    counts: Counter[str] = Counter()
    has_both = is_long or write_policy == "write_through_selective"
    turn = WRITE_POLICIES.index(write_policy) + PREFETCH_POLICIES.index(prefetch_policy)
    for seed, (page_size, is_eagle) in enumerate(itertools.product(PAGE_SIZES, (False, True))):
        # Each tree with every page size and key mode, under half of the policies. But where few
        # are asked for twice it takes many lives.
        one_of_two = (turn + seed // 2 + is_eagle) % 2
        for make_tree in TREES if has_both else TREES[one_of_two : one_of_two + 1]:
            config = ModelConfig(
                make_tree=make_tree,
                page_size=page_size,
                is_eagle=is_eagle,
                write_policy=write_policy,
                prefetch_policy=prefetch_policy,
                with_faults=seed % 3 != 0,
            )
            model = HiCacheModel(config, 100 + 2 * seed + (make_tree is HiRadixCache))
            model.run(1500)
            counts += model.counts
    # The run is worth nothing unless data went through all tiers, up and down.
    for name in ("hicache_backup", "backuped", "prefetched", "load_back"):
        assert counts[f"{name}_tokens"] > 100, counts


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("prefetch_policy", PREFETCH_POLICIES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_recurrent_state(
    write_policy: str, prefetch_policy: str, num_ranks: int, is_long: bool
) -> None:
    """9 x 3 x 3 x 300 = 24,300 steps on one rank (long: 40,500), 40,500 on each of two."""
    counts: Counter[str] = Counter()
    for page_size, num_states in itertools.product(PAGE_SIZES, (2, 5, 30)):
        config = ModelConfig(
            make_tree=HiMambaRadixCache,
            page_size=page_size,
            is_eagle=num_states == 5,
            write_policy=write_policy,
            prefetch_policy=prefetch_policy,
            num_ranks=num_ranks,
            num_states=num_states,
            num_host_states=8,
            with_faults=num_states != 30,
        )
        model = HiCacheModel(config, page_size + num_states)
        model.run(500 if is_long or num_ranks > 1 else 300)
        counts += model.counts
    # Few of so short lives are asked for twice: that is what the selective policy waits for.
    has_loads = write_policy != "write_through_selective"
    for name in ("hicache_backup_tokens", "backuped_tokens", "load_back_tokens")[: 2 + has_loads]:
        assert counts[name] > 20, counts


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("prefetch_policy", PREFETCH_POLICIES)
def test_two_ranks(write_policy: str, prefetch_policy: str, is_long: bool) -> None:
    """9 x 3 x 350 = 9,450 steps (long: 21,600) on each of two ranks."""
    for page_size in PAGE_SIZES:
        config = ModelConfig(
            make_tree=UnifiedRadixCache,
            page_size=page_size,
            is_eagle=page_size == 4,
            write_policy=write_policy,
            prefetch_policy=prefetch_policy,
            num_ranks=2,
        )
        HiCacheModel(config, 40 + page_size).run(800 if is_long else 350)
