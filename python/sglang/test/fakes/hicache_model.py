"""Random lives over hierarchical caches, checked after every step.

``HiCacheModel`` takes one or several ranks and lets the same requests, evictions, resets,
attachments and weight updates happen on all of them, while copies and storage move at each rank's
own random pace and with its own faults. What it checks: ``check_invariants``, the content of
running requests and what the tree's events tell after each step, host pages and the equality of
ranks every few steps, and against an oracle (the set of prefixes ever computed) that nothing is
found which nobody computed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from sglang.srt.mem_cache.cache_metrics import ignore_metric
from sglang.srt.mem_cache.hicache_storage import StorageError
from sglang.srt.mem_cache.pool_transfer import PoolName
from sglang.srt.mem_cache.tree_components.base import ComponentType
from sglang.test.fakes.event_oracle import EventOracle
from sglang.test.fakes.fault_store import Fault, FaultStore
from sglang.test.fakes.hicache_engine import HiCacheEngine, HiReq, TreeFactory

_PAGE_FAULTS = (Fault.FALSE, Fault.TRUNCATE, Fault.FLIP, Fault.VANISH)


class ChaosStore(FaultStore):
    """A store in memory where any call or page may fail, each time anew."""

    def __init__(self, seed: int, call_rate: float = 0.03, page_rate: float = 0.03) -> None:
        super().__init__(seed=seed)
        self.call_rate = call_rate
        self.page_rate = page_rate

    def _begin(self, call: str) -> None:
        if self._random.random() < self.call_rate:
            raise StorageError(f"{call} fails")

    def _draw(self, call: str, name: PoolName | None) -> Fault | None:
        if self._random.random() < self.page_rate:
            return self._random.choice(_PAGE_FAULTS)
        return None


class Reduction:
    """MIN over ranks that run in threads of one process; counts its calls."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=20)
        self._values: list[list[int]] = [[] for _ in range(num_ranks)]
        self.num_calls = [0] * num_ranks

    def of_rank(self, rank: int) -> Callable[[list[int]], list[int]]:
        """Return the function that this rank calls."""

        def reduce(values: list[int]) -> list[int]:
            self.num_calls[rank] += 1
            self._values[rank] = values
            self._barrier.wait()
            lengths = {len(vector) for vector in self._values}
            assert len(lengths) == 1, f"vectors of different lengths: {self._values}"
            result = [min(column) for column in zip(*self._values)]
            self._barrier.wait()
            return result

        return reduce

    def abort(self) -> None:
        """Let nobody wait: a rank has failed."""
        self._barrier.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One kind of cache under test."""

    make_tree: TreeFactory
    page_size: int = 1
    is_eagle: bool = False
    write_policy: str = "write_through"
    prefetch_policy: str = "best_effort"
    num_ranks: int = 1
    device_pages: int = 20
    host_pages: int = 24
    with_faults: bool = True
    eviction_policy: str = "lru"
    num_states: int = 0  # recurrent states; 0: a model without
    num_host_states: int | None = None  # None: as many
    window: int = 0  # tokens that some layers look back on; 0: a model without
    window_pages: int = 0  # of those layers; and on the host
    host_window_pages: int = 0
    forget_weight: float = 0.8  # how often only storage is left with what nobody uses


class HiCacheModel:
    """See the module docstring. One thread, but for the collectives of several ranks."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config = config
        self.rng = random.Random(seed)
        num_ranks = config.num_ranks
        self.ticks = Reduction(num_ranks)
        self.queries = Reduction(num_ranks)
        self.paces = [random.Random(seed * 100 + rank) for rank in range(num_ranks)]
        self.engines = [self._make_engine(rank, seed) for rank in range(num_ranks)]
        self.events = EventOracle(self.engines[0].tree)
        self._late_hits: list[list[Any]] = [[] for _ in range(num_ranks)]
        self._pool = ThreadPoolExecutor(num_ranks) if num_ranks > 1 else None
        self.known: set[tuple[Any, ...]] = set()
        self.num_steps = 0
        self.num_reused = 0
        self.counts: Counter[str] = Counter()  # of what the first rank's tree reports
        self._next_rid = 0
        self._prompts: list[list[int]] = []
        self._fingerprint = "w0"
        self._is_attached = True

    def _make_engine(self, rank: int, seed: int) -> HiCacheEngine:
        config, page = self.config, self.config.page_size
        several = config.num_ranks > 1
        rate = 0.03 if config.with_faults else 0.0
        options = {"prefetch_min_reduce": self.queries.of_rank(rank)} if several else {}
        return HiCacheEngine(
            config.make_tree,
            size=config.device_pages * page,
            host_size=config.host_pages * page,
            page_size=page,
            num_reqs=5,
            max_context_len=20 * page + 40,
            is_eagle=config.is_eagle,
            store=ChaosStore(seed * 7 + rank, rate, rate),
            extra_config=f'{{"prefetch_threshold": {page}, "prefetch_timeout_base": 1,'
            ' "hicache_storage_pass_prefix_keys": true}',
            controller_options=options,
            write_policy=config.write_policy,
            prefetch_policy=config.prefetch_policy,
            load_back_threshold=2 * page,
            min_reduce=self.ticks.of_rank(rank) if several else None,
            eviction_policy=config.eviction_policy,
            metrics=self._count if rank == 0 else ignore_metric,
            enable_kv_cache_events=rank == 0,
            num_states=config.num_states,
            num_host_states=config.num_host_states,
            window=config.window,
            num_window_rows=config.window_pages * page,
            num_host_window_rows=config.host_window_pages * page,
        )

    def _count(self, name: str, amount: float, **labels: str) -> None:
        self.counts[name] += int(amount)

    # -- driving -----------------------------------------------------------------------------------

    def run(self, num_steps: int) -> None:
        """Do so many random steps, checking after each, then let everything end and check."""
        actions = (
            (self.submit, 6),
            (self.admit, 8),
            (self.extend, 8),
            (self.finish, 4),
            (self.abort_waiting, 1),
            (self.abort_running, 1),
            (self.tick, 12),
            (self.move, 14),
            (self.evict, 2),
            (self.evict_host, 1),
            (self.forget, self.config.forget_weight),
            (self.pass_time, 3),
            (self.reset, 0.4),
            (self.attach_or_detach, 0.5),
            (self.update_weights, 0.15),
            (self.clear_storage, 0.05),
        )
        functions = [function for function, _ in actions]
        weights = [weight for _, weight in actions]
        for function in self.rng.choices(functions, weights, k=num_steps):
            function()
            self.num_steps += 1
            self._check(deeply=self.num_steps % 16 == 0)
        self.end()

    def _check(self, deeply: bool) -> None:
        self.events.follow()
        for engine in self.engines:
            engine.check()
            if deeply:
                engine.check_host()
        if deeply or self.config.num_ranks > 1:
            dumps = [engine.dump() for engine in self.engines]
            for dump in dumps:
                apart = [pair for pair in zip_longest(dumps[0], dump) if pair[0] != pair[1]]
                assert not apart, f"ranks are out of step: {apart}"
            assert len(set(self.ticks.num_calls)) == 1, self.ticks.num_calls

    def _on_all(self, function: Callable[[int, HiCacheEngine], Any]) -> list[Any]:
        """Run a collective on all ranks at once."""
        if self._pool is None:
            return [function(0, self.engines[0])]

        def guarded(rank: int) -> Any:
            try:
                return function(rank, self.engines[rank])
            except BaseException:
                self.ticks.abort()
                self.queries.abort()
                raise

        return list(self._pool.map(guarded, range(len(self.engines))))

    def _same(self, results: list[Any]) -> Any:
        assert all(result == results[0] for result in results), f"ranks decide apart: {results}"
        return results[0]

    def end(self) -> None:
        """Let all requests and transfers end; then nothing may be held by anybody."""
        for index in reversed(range(len(self.engines[0].running))):
            for engine in self.engines:
                engine.finish(engine.running[index])
        while self.engines[0].waiting:
            for engine in self.engines:
                engine.abort_waiting(engine.waiting[0])
        for _ in range(8):
            self._move_everything()
            self.tick()
        self._check(deeply=True)
        fetched = self.counts["prefetched_tokens"]
        missed = self.counts["storage_prefetch_unfulfilled_tokens"]
        assert self.counts["storage_prefetch_hit_tokens"] == fetched + missed, self.counts
        for engine in self.engines:
            tree, host = engine.tree, engine.host
            assert not tree.has_pending_transfers()
            assert tree.prefetch_tokens_occupied == 0
            assert tree.protected_size() == 0
            assert all(node.lock_ref == 0 for node in tree.iter_nodes())
            in_tree = sum(len(node.key) for node in tree.iter_nodes() if node.backuped)
            assert host.available_size() + in_tree == host.size
            if engine.windows is not None:
                rows = [node.data[ComponentType.SWA].host_value for node in tree.iter_nodes()]
                num_rows = sum(len(of_node) for of_node in rows if of_node is not None)
                windows = engine.windows.host
                assert windows.available_size() + num_rows == windows.size
                assert tree.swa_protected_size() == 0
        self.reset()
        for engine in self.engines:
            assert engine.allocator.available_size() == engine.allocator.size
            if engine.windows is not None:
                allocator = engine.windows.allocator
                assert allocator.available_swa_size() == allocator.size_swa
        if self._pool is not None:
            self._pool.shutdown()

    # -- the scheduler's actions -------------------------------------------------------------------

    def _prompt(self) -> list[int]:
        """A path through a small forest, so that prompts share beginnings.

        With recurrent states most continue an earlier one: elsewhere there is nothing to reuse.
        """
        has_ends = self.config.num_states or self.config.window
        if has_ends and self._prompts and self.rng.random() < 0.7:
            earlier = self.rng.choice(self._prompts[-6:])
            extended = earlier + [self.rng.randrange(2) for _ in range(self.rng.randint(1, 3))]
            prompt = extended[: 9 * self.config.page_size]
        else:
            prompt = self._fresh_prompt()
        self._prompts.append(prompt)
        return prompt

    def _fresh_prompt(self) -> list[int]:
        page, rng = self.config.page_size, self.rng
        num_tokens = rng.randint(1, 9 * page)
        tokens: list[int] = []
        branch = rng.choice((0, 0, 1))
        while len(tokens) < num_tokens:
            tokens += [branch * 1000 + len(tokens) + i for i in range(page)]
            if rng.random() < 0.2:
                branch = rng.randrange(3)
        return tokens[:num_tokens]

    def submit(self) -> None:
        if len(self.engines[0].waiting) >= 4:
            return
        # A request that was taken back may come again under its old name.
        if self.rng.random() < 0.8:
            self._next_rid += 1
        rid = f"r{self._next_rid}"
        taken = {req.rid for req in (*self.engines[0].waiting, *self.engines[0].running)}
        if rid in taken:
            return
        prompt = self._prompt()
        namespace = self.rng.choice([None, None, None, "a"])
        for engine in self.engines:
            engine.submit(HiReq(rid=rid, origin_input_ids=prompt, extra_key=namespace))

    def admit(self) -> None:
        waiting = self.engines[0].waiting
        if not waiting:
            return
        index = self.rng.randrange(len(waiting))
        if not self._same([engine.admit(engine.waiting[index]) for engine in self.engines]):
            return
        reqs = [engine.running[-1] for engine in self.engines]
        num_cached = self._same([len(req.prefix_indices) for req in reqs])
        req = reqs[0]
        self.num_reused += num_cached
        assert num_cached % self.config.page_size == 0
        assert num_cached < len(req.all_ids)
        if num_cached:
            key = (self._fingerprint, req.extra_key, *req.all_ids[:num_cached])
            assert key in self.known, "found what nobody has computed"

    def extend(self) -> None:
        running = self.engines[0].running
        if not running:
            return
        index = self.rng.randrange(len(running))
        req = running[index]
        left = len(req.origin_input_ids) - req.kv_committed_len
        if left <= 0:
            self._decode(index)
            return
        page = self.config.page_size
        is_last = self.rng.random() < 0.6
        num_tokens = left if is_last else min(left, self.rng.randint(1, 3) * page)
        results = [engine.extend(engine.running[index], num_tokens) for engine in self.engines]
        if not self._same(results):
            self._end_running(index, is_insert=False)
            return
        self._note(req)
        is_chunked = num_tokens < left
        if is_chunked or self.rng.random() < 0.7:
            for engine in self.engines:
                engine.tree.cache_unfinished_req(engine.running[index], chunked=is_chunked)

    def _decode(self, index: int) -> None:
        token = self.rng.randrange(5)
        for engine in self.engines:
            engine.running[index].output_ids.append(token)
        if not self._same([engine.extend(engine.running[index], 1) for engine in self.engines]):
            for engine in self.engines:
                engine.running[index].output_ids.pop()
            self._end_running(index, is_insert=True)
            return
        self._note(self.engines[0].running[index])

    def _note(self, req: Any) -> None:
        tokens = req.all_ids[: req.kv_committed_len]
        page = self.config.page_size
        for end in range(page, len(tokens) + 1, page):
            self.known.add((req.kv_fingerprint, req.extra_key, *tokens[:end]))

    def _end_running(self, index: int, is_insert: bool) -> None:
        for engine in self.engines:
            engine.finish(engine.running[index], is_insert=is_insert)

    def finish(self) -> None:
        running = self.engines[0].running
        if running:
            self._end_running(self.rng.randrange(len(running)), is_insert=True)

    def abort_running(self) -> None:
        running = self.engines[0].running
        if running:
            self._end_running(self.rng.randrange(len(running)), is_insert=False)

    def abort_waiting(self) -> None:
        waiting = self.engines[0].waiting
        if waiting:
            index = self.rng.randrange(len(waiting))
            for engine in self.engines:
                engine.abort_waiting(engine.waiting[index])

    def tick(self) -> None:
        self._on_all(lambda rank, engine: engine.tick())

    # -- what moves by itself ----------------------------------------------------------------------

    def move(self) -> None:
        """Let something happen behind the scheduler's back, on each rank something else."""
        if self.rng.random() < 0.5:
            self._query()
        for rank, engine in enumerate(self.engines):
            controller, pace = engine.controller, self.paces[rank]
            for _ in range(pace.randint(0, 6)):
                pace.choice(
                    (
                        controller.write_engine.step,
                        controller.load_engine.step,
                        controller.step_read,
                        controller.step_backup,
                    )
                )()
            if self._late_hits[rank] and pace.random() < 0.5:
                controller.prefetch_hit_queue.put(self._late_hits[rank].pop(0))

    def _query(self) -> None:
        """One look-up, on all ranks since they agree on it; its result may come late."""
        if not self._on_all(lambda rank, engine: engine.controller.step_query())[0]:
            return
        for rank, engine in enumerate(self.engines):
            hits = engine.controller.prefetch_hit_queue
            if hits.qsize() and len(self.engines) > 1:
                waiting_first = self._late_hits[rank]
                if waiting_first or self.paces[rank].random() < 0.5:
                    items = [hits.get_nowait() for _ in range(hits.qsize())]
                    # Only the newest is held back; those before it are out already.
                    waiting_first.append(items.pop())
                    for item in items:
                        hits.put(item)

    def _release_late_hits(self) -> None:
        for rank, engine in enumerate(self.engines):
            for hit in self._late_hits[rank]:
                engine.controller.prefetch_hit_queue.put(hit)
            self._late_hits[rank].clear()

    def _move_everything(self) -> None:
        while self.engines[0].controller.prefetch_queue.qsize():
            self._query()
        self._release_late_hits()
        for engine in self.engines:
            engine.controller.start_writing()
            engine.controller.step_all()

    def pass_time(self) -> None:
        # Clocks of ranks differ.
        for rank, engine in enumerate(self.engines):
            engine.clock.now += 2 * self.paces[rank].random()

    # -- rare events -------------------------------------------------------------------------------

    def evict(self) -> None:
        num_tokens = self.rng.randint(1, self.config.device_pages) * self.config.page_size
        self._same([engine.tree.evict(num_tokens).num_tokens_evicted for engine in self.engines])

    def evict_host(self) -> None:
        num_tokens = self.rng.randint(1, 6) * self.config.page_size
        self._same([engine.tree.evict_host(num_tokens) for engine in self.engines])

    def forget(self) -> None:
        """Leave only storage with what nobody uses, after it has got it."""
        self._move_everything()
        self.tick()
        self._move_everything()
        self.tick()
        size = self.config.host_pages * self.config.page_size
        self._same([engine.tree.evict(size).num_tokens_evicted for engine in self.engines])
        self._same([engine.tree.evict_host(size) for engine in self.engines])

    def _abort_everything(self) -> None:
        while self.engines[0].running:
            self._end_running(0, is_insert=self.rng.random() < 0.5)
        while self.engines[0].waiting:
            for engine in self.engines:
                engine.abort_waiting(engine.waiting[0])

    def reset(self) -> None:
        self._abort_everything()
        if self.rng.random() < 0.7:
            # What was computed reaches storage first, so that it comes back from there.
            self._move_everything()
            self.tick()
            self._move_everything()
        for engine in self.engines:
            engine.flush()
            assert engine.tree.prefetch_tokens_occupied == 0
            assert engine.tree.total_size() == 0
            assert engine.allocator.available_size() == engine.allocator.size

    def attach_or_detach(self) -> None:
        if self._is_attached and self.rng.random() < 0.7:
            return  # attached most of the time
        self._abort_everything()
        if self._is_attached:
            while self.engines[0].controller.prefetch_queue.qsize():
                self._query()  # as stopping threads do, all ranks together
            self._release_late_hits()
            results = self._on_all(lambda rank, engine: engine.tree.detach_storage_backend())
        else:
            results = self._on_all(
                lambda rank, engine: engine.tree.attach_storage_backend(
                    storage_backend="memory",
                    storage_backend_extra_config_json='{"prefetch_threshold": 1}',
                )
            )
        assert all(success for success, _ in results), results
        self._is_attached = not self._is_attached

    def update_weights(self) -> None:
        for engine in self.engines:
            engine.tree.prepare_weights_update()
        if self.rng.random() < 0.5:
            self.tick()
        self._fingerprint = self.rng.choice(["w0", "w1", "w2"])
        for engine in self.engines:
            engine.tree.finish_weights_update(self._fingerprint)
        # What began before ends: it can be neither continued nor inserted.
        for index in reversed(range(len(self.engines[0].running))):
            if self.engines[0].running[index].kv_fingerprint != self._fingerprint:
                self._end_running(index, is_insert=True)

    def clear_storage(self) -> None:
        self._same([engine.tree.clear_storage_backend() for engine in self.engines])
