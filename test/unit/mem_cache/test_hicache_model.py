"""Random lives over every tree, policy, page size and key mode; see ``hicache_model``.

A short run of each; ``test/registered/hicache`` has the long one.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache
from sglang.srt.mem_cache.hicache_records import PREFETCH_POLICIES, WRITE_POLICIES
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.fakes.hicache_model import HiCacheModel, ModelConfig

NUM_STEPS = 60


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


def state_config(page_size: int, **options: Any) -> ModelConfig:
    """A cache of a hybrid model; the smaller the page, the scarcer the states."""
    num_states, num_host_states = {1: (3, 4), 4: (6, 5), 16: (20, 8)}[page_size]
    return ModelConfig(
        make_tree=HiMambaRadixCache,
        page_size=page_size,
        num_states=num_states,
        num_host_states=num_host_states,
        forget_weight=1.2,
        **options,
    )


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("prefetch_policy", PREFETCH_POLICIES)
def test_random_lives_with_recurrent_state(write_policy: str, prefetch_policy: str) -> None:
    for page_size, is_eagle in ((1, False), (4, True), (16, False)):
        config = state_config(
            page_size,
            is_eagle=is_eagle,
            write_policy=write_policy,
            prefetch_policy=prefetch_policy,
        )
        HiCacheModel(config, 10 * page_size + is_eagle).run(3 * NUM_STEPS)


@pytest.mark.parametrize("write_policy", WRITE_POLICIES)
@pytest.mark.parametrize("prefetch_policy", PREFETCH_POLICIES)
def test_two_ranks_with_recurrent_state_stay_in_step(
    write_policy: str, prefetch_policy: str
) -> None:
    """Each rank has states of its own in storage, and loses others than the other rank does."""
    config = state_config(
        4, write_policy=write_policy, prefetch_policy=prefetch_policy, num_ranks=2
    )
    HiCacheModel(config, 3).run(3 * NUM_STEPS)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_states_come_back_from_storage(num_ranks: int) -> None:
    """Lives that get much out of every tier, or the ones above would prove nothing."""
    config = state_config(
        4, prefetch_policy="wait_complete", with_faults=False, num_ranks=num_ranks
    )
    model = HiCacheModel(config, 7)
    model.run(540)
    assert model.counts["prefetched_tokens"] > 20, model.counts
    assert model.counts["load_back_tokens"] > 20, model.counts


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
