"""The real scheduler over the real tiers, with a fake model whose KV is the token in each slot.

For tests of what only both together can get wrong: a slot that was restored, evicted or retracted
wrongly changes the tokens that come out (`fake_worker.oracle`). Transfers move only when the test
says so, in any order (`move`), and so does the clock of their limits.
"""

from __future__ import annotations

import random
from typing import Any

from sglang.srt.managers.hicache_control import HiCacheControl
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import GenerationBatchResult, LayerLoadCounter
from sglang.srt.mem_cache.hicache_base import HiCacheTreeBase
from sglang.srt.mem_cache.hicache_records import HiCacheParams
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.mem_cache.memory_pool_host import HostPoolGroup, MHATokenToKVPoolHost, PoolEntry
from sglang.srt.mem_cache.page_key import CacheIdentity
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.platforms.cpu import CpuPlatform
from sglang.test.fakes.controller_rig import MemoryStore
from sglang.test.fakes.fake_kv import FakeKV
from sglang.test.fakes.fake_worker import FakeModelWorker, FakeSpeculativeWorker
from sglang.test.fakes.hicache_engine import ManualClock
from sglang.test.fakes.scheduler_harness import SchedulerHarness
from sglang.test.fakes.stepped_controller import SteppedController

_NUM_LAYERS = 2


class _WithTiers(FakeModelWorker):
    """A fake worker whose tokens lie in a KV pool, so that the tiers move them."""

    def __init__(self, *, num_slots: int, page_size: int, **sizes: Any) -> None:
        super().__init__(num_slots=num_slots, page_size=page_size, **sizes)
        self.kv = FakeKV(num_slots, page_size, layer_num=_NUM_LAYERS)
        self.kv.k_data.fill_(-1)
        self.slot_tokens = self.kv.k_buffer[_NUM_LAYERS - 1].numpy().reshape(-1)
        self._counter: LayerLoadCounter | None = None

    def register_hicache_layer_transfer_counter(self, counter: LayerLoadCounter) -> None:
        self._counter = counter
        self.kv.register_layer_transfer_counter(counter)

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        """As a model does: wait for each layer that is being loaded."""
        if self._counter is not None:
            self._counter.set_consumer(batch.hicache_consumer_index)
        for layer in range(_NUM_LAYERS):
            self.kv.get_key_buffer(layer)
        return super().forward_batch_generation(batch)


class _SpeculativeWithTiers(FakeSpeculativeWorker, _WithTiers):
    """The same with steps of several tokens."""


class TieredScheduler:
    """A harness with a host pool and a store of pages in memory."""

    def __init__(
        self,
        *,
        num_slots: int = 64,
        page_size: int = 1,
        host_slots: int = 128,
        max_requests: int = 8,
        context_len: int = 96,
        speculative: bool = False,
        store: HiCacheStorage | None = None,
        write_policy: str = "write_through",
        prefetch_policy: str = "best_effort",
        prefetch_threshold: int = 1,
        weights_fingerprint: str = "A",
        **options: Any,
    ) -> None:
        """`options`: further fields of `HarnessOptions`. Slots are multiples of the page size."""
        kind = _SpeculativeWithTiers if speculative else _WithTiers
        self.worker = kind(
            num_slots=num_slots,
            page_size=page_size,
            max_requests=max_requests,
            context_len=context_len,
        )
        host = MHATokenToKVPoolHost(self.worker.kv, host_slots, "page_first")
        entry = PoolEntry(name=PoolName.KV, host_pool=host, device_pool=self.worker.kv)
        self.store = store if store is not None else MemoryStore()
        self.clock = ManualClock()
        self.controller = SteppedController(
            self.worker.allocator,
            HostPoolGroup(entry, "direct"),
            page_size=page_size,
            platform=CpuPlatform(),
            backend_factory=lambda name, config: self.store,
            join_timeout_s=0.3,
        )
        params = HiCacheParams(
            controller=self.controller,
            identity=CacheIdentity(
                model="fake",
                weights_fingerprint=weights_fingerprint,
                kv_dtype="int64",
                page_size=page_size,
                layout="page_first",
            ),
            clock=self.clock,
            write_policy=write_policy,
            prefetch_policy=prefetch_policy,
            load_back_threshold=1,
        )
        self.harness = SchedulerHarness(
            worker=self.worker,
            hicache=params,
            hicache_control=lambda tree: HiCacheControl(
                tree,
                served_model_name="fake",
                storage_backend="memory",
                extra_config=f'{{"prefetch_threshold": {prefetch_threshold}}}',
                prefetch_policy=prefetch_policy,
                write_policy=write_policy,
            ),
            num_slots=num_slots,
            page_size=page_size,
            max_requests=max_requests,
            context_len=context_len,
            **options,
        )
        self.scheduler = self.harness.scheduler

    @property
    def tree(self) -> HiCacheTreeBase:
        """The cache of the scheduler."""
        tree = self.harness.tree
        assert isinstance(tree, HiCacheTreeBase)
        return tree

    def move(self, rng: random.Random, most: int = 5) -> None:
        """Let some transfers make a step each, in any order."""
        controller = self.controller
        for _ in range(rng.randint(0, most)):
            step = rng.choice(
                (
                    controller.write_engine.step,
                    controller.load_engine.step,
                    controller.step_query,
                    controller.step_read,
                    controller.step_backup,
                )
            )
            step()

    def move_before_each_step(self, rng: random.Random) -> None:
        """From now on do so whenever the scheduler looks for messages; time passes, too."""
        receive = self.harness.receiver.recv

        def recv(**fields: Any) -> Any:
            self.move(rng)
            self.clock.now += 0.3 * rng.random()
            return receive(**fields)

        self.harness.receiver.recv = recv  # type: ignore[method-assign]

    def settle(self, rounds: int = 10) -> None:
        """Let everything that is under way come to its end."""
        for _ in range(rounds):
            self.controller.step_all()
            self.harness.step()
