"""Random lives over every tree, policy, page size and key mode; see ``hicache_model``.

A short run of each; ``test/registered/hicache`` has the long one.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

import pytest

from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.hicache_records import PREFETCH_POLICIES, WRITE_POLICIES
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.fakes.hicache_model import HiCacheModel, ModelConfig

NUM_STEPS = 90


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The faults of the stores are meant."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("make_tree", [HiRadixCache, UnifiedRadixCache])
@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("prefetch_policy", PREFETCH_POLICIES)
def test_random_lives(make_tree: type, write_policy: str, prefetch_policy: str) -> None:
    for seed, (page_size, is_eagle) in enumerate(itertools.product((1, 4, 16), (False, True))):
        config = ModelConfig(
            make_tree=make_tree,
            page_size=page_size,
            is_eagle=is_eagle,
            write_policy=write_policy,
            prefetch_policy=prefetch_policy,
        )
        HiCacheModel(config, seed).run(NUM_STEPS)


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("num_states", [3, 20])
def test_random_lives_with_recurrent_state(write_policy: str, num_states: int) -> None:
    for page_size in (1, 4, 16):
        config = ModelConfig(
            make_tree=HiMambaRadixCache,
            page_size=page_size,
            write_policy=write_policy,
            num_states=num_states,
        )
        HiCacheModel(config, page_size).run(NUM_STEPS)


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("prefetch_policy", PREFETCH_POLICIES)
def test_two_ranks_stay_in_step(write_policy: str, prefetch_policy: str) -> None:
    """Copies and storage move at their own pace on each rank; trees and collectives are equal."""
    config = ModelConfig(
        make_tree=HiRadixCache,
        page_size=4,
        write_policy=write_policy,
        prefetch_policy=prefetch_policy,
        num_ranks=2,
    )
    HiCacheModel(config, 1).run(NUM_STEPS)


@pytest.mark.parametrize("eviction_policy", ["lfu", "slru", "fifo", "filo", "priority"])
def test_random_lives_under_other_eviction_policies(eviction_policy: str) -> None:
    config = ModelConfig(make_tree=HiRadixCache, page_size=4, eviction_policy=eviction_policy)
    HiCacheModel(config, 7).run(2 * NUM_STEPS)
