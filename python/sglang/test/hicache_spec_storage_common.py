"""Shared part of the tests that the draft's KV goes wherever the target's goes.

Two ways to look at the same thing: `SpecStorageServer`, a real server that is restarted over one
storage folder, and `SpecCacheRig`, the same parts in this process, where KV can be compared byte
for byte and things can be broken on purpose.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.hicache_control import HiCacheControl
from sglang.srt.managers.hicache_setup import HiCacheSettings, build_hicache
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.host_pool_sizing import HostPoolLimits
from sglang.srt.mem_cache.memory_pool import KVCache
from sglang.srt.model_executor.model_runner import ModelRunner, RunnerConfig, kv_bytes_per_token
from sglang.srt.platforms import init_platform
from sglang.srt.speculative.base_spec_worker import AcceptanceRule, BaseSpecWorker
from sglang.srt.speculative.eagle_worker import DraftModelWorker
from sglang.srt.speculative.spec_info import DraftShape, SpeculativeAlgorithm
from sglang.srt.speculative.worker_factory import (
    SpecSettings,
    create_draft_worker,
    draft_positions,
    plan_draft,
)
from sglang.srt.utils.tokenizer import get_tokenizer
from sglang.test.fakes.scheduler_harness import SchedulerHarness
from sglang.test.fakes.store_servers import StoreServers
from sglang.test.small_server import SmallServer, serve
from sglang.test.test_utils import SMALL_EAGLE3_DRAFT

PROMPT_LEN = 1024
PAGE_SIZE = 64
# The target goes on with this sentence for ever; all its tokens are in the draft's vocabulary.
REPEATED_UNIT = " The quick brown fox jumps over the lazy dog."
# So long that the part of a prompt that is computed in any case does not hold all of it: what the
# draft needs to go on is in the restored KV alone.
LONG_UNIT = (
    "The quick brown fox jumps over the lazy dog. The apple is red and the sky is blue. "
    "I will not talk in class. Please remember to water the plants, feed the cat, lock the back "
    "door and leave the key under the blue flower pot. Speculative decoding uses a small draft "
    "model to propose several tokens and a large target model to verify them in parallel. "
)
MIN_ACCEPT_LENGTH = 7.0
# A few tokens at the end are computed in any case: the last page, and the token that is sampled.
MIN_STORAGE_TOKENS = PROMPT_LEN - 2 * PAGE_SIZE
ACCEPT_RATIO = (0.99, 1.01)


def repetitive_prompt(model: str, unit: str = REPEATED_UNIT, length: int = PROMPT_LEN) -> list[int]:
    """`length` token ids: the start token, then the unit again and again."""
    tokenizer = get_tokenizer(model)
    ids = tokenizer.encode(unit)
    start = tokenizer.encode("<|im_start|>")[:1]
    return (start + ids * (length // len(ids) + 1))[:length]


def storage_files(folder: str | Path) -> tuple[int, int]:
    """(pages of the target, pages of the draft) in a storage folder."""
    names = [path.name for path in Path(folder).glob("*.bin")]
    drafts = sum(f".{PoolName.DRAFT}" in name for name in names)
    return len(names) - drafts, drafts


@dataclass(frozen=True)
class StorageChoice:
    """A storage backend as tests choose one; ``config``: its extra config, JSON."""

    backend: str
    class_name: str
    config: str
    folder: Path | None = None  # of the file backend

    @classmethod
    def in_folder(cls, folder: str | Path) -> StorageChoice:
        """Pages in files."""
        config = json.dumps({"file_storage_path": str(folder)})
        return cls("file", "HiCacheFile", config, Path(folder))

    @classmethod
    def in_store(cls, servers: StoreServers) -> StorageChoice:
        """Pages in a shared store."""
        return cls(servers.backend, servers.class_name, json.dumps(servers.extra_config()))


EAGLE3_FLAGS = (
    "--speculative-algorithm",
    "EAGLE3",
    "--speculative-draft-model-path",
    str(SMALL_EAGLE3_DRAFT),
    "--speculative-num-steps",
    7,
    "--speculative-eagle-topk",
    1,
    "--speculative-num-draft-tokens",
    8,
)


@dataclass(frozen=True)
class Answer:
    """One greedy answer and where its prompt came from."""

    output_ids: list[int]
    accept_length: float
    cached: dict[str, Any] = field(default_factory=dict)


# ------------------------------------------------------------------------------------------------
# A real server
# ------------------------------------------------------------------------------------------------


class SpecStorageServer:
    """Starts servers over one storage, one after the other or side by side."""

    def __init__(
        self, model: str, storage: str | Path | StorageChoice, *flags: str | int | float
    ) -> None:
        self.model = model
        if not isinstance(storage, StorageChoice):
            storage = StorageChoice.in_folder(storage)
        self.storage = storage
        self.flags = flags
        self.prompt = repetitive_prompt(model)

    @contextmanager
    def start(self) -> Iterator[SmallServer]:
        """A server with the cache, the storage and the page size of these tests."""
        options = {**json.loads(self.storage.config), "hicache_storage_pass_prefix_keys": True}
        with serve(
            self.model,
            "--page-size",
            PAGE_SIZE,
            "--grammar-backend",
            "none",
            "--enable-hierarchical-cache",
            "--hicache-ratio",
            1.2,
            "--hicache-storage-backend",
            self.storage.backend,
            "--hicache-storage-prefetch-policy",
            "wait_complete",
            "--hicache-storage-backend-extra-config",
            json.dumps(options),
            *self.flags,
        ) as server:
            yield server

    def ask(self, server: SmallServer, num_tokens: int = 200) -> Answer:
        """Greedy answer to the repetitive prompt."""
        reply = server.generate(
            input_ids=self.prompt,
            sampling_params={"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True},
        )
        meta = reply["meta_info"]
        return Answer(
            reply["output_ids"],
            meta.get("spec_accept_length", 1.0),
            {"cached_tokens": meta["cached_tokens"], **(meta["cached_tokens_details"] or {})},
        )

    def wait_for_pages(self, num_target: int, num_draft: int, timeout_s: float = 30.0) -> None:
        """Until both kinds of pages are in the folder. Raises AssertionError in the end."""
        folder = self.storage.folder
        assert folder is not None, "only files can be counted"
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = storage_files(folder)
            if found[0] >= num_target and found[1] >= num_draft:
                return
            time.sleep(0.1)
        raise AssertionError(f"{storage_files(folder)} pages in storage after {timeout_s} s")


def check_restored(first: Answer, second: Answer, class_name: str = "HiCacheFile") -> None:
    """The second answer came from storage, at full speed."""
    assert second.output_ids == first.output_ids
    assert second.cached["storage_backend"] == class_name
    assert second.cached["storage"] >= MIN_STORAGE_TOKENS, second.cached
    assert second.accept_length >= MIN_ACCEPT_LENGTH
    ratio = second.accept_length / first.accept_length
    assert ACCEPT_RATIO[0] <= ratio <= ACCEPT_RATIO[1], ratio


# ------------------------------------------------------------------------------------------------
# The same in this process
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RigOptions:
    """What a `SpecCacheRig` is made of. `storage`: a text is a folder of the file backend."""

    algorithm: str = "EAGLE3"
    num_steps: int = 7
    topk: int = 1
    num_draft_tokens: int = 8
    draft_path: str = str(SMALL_EAGLE3_DRAFT)
    page_size: int = PAGE_SIZE
    layout: str = "page_first"
    io_backend: str = "kernel"
    max_total_tokens: int = 4096
    host_ratio: float = 2.0
    chunk_size: int | None = None
    overlap: bool = False
    storage: str | StorageChoice | None = None
    draft_storage_policy: str = "clamp"
    sync_draft: bool = True


class SpecWorkerCache:
    """Loads each pair of models once a process: weights are never written here."""

    def __init__(self) -> None:
        self._workers: dict[Any, tuple[BaseSpecWorker, SpecSettings]] = {}

    def get(self, model: str, options: RigOptions) -> BaseSpecWorker:
        """The worker of these options, its pools empty."""
        key = dataclasses.replace(
            options,
            layout="",
            io_backend="",
            host_ratio=0.0,
            chunk_size=None,
            storage=None,
            draft_storage_policy="",
            sync_draft=True,
        )
        if (model, key) not in self._workers:
            self._workers[(model, key)] = _make_worker(model, options)
        worker = self._workers[(model, key)][0]
        rows, allocator = worker.get_memory_pool()
        rows.clear()
        allocator.clear()
        for pool in kv_pools(worker).values():
            pool.register_layer_transfer_counter(None)
        return worker


def _make_worker(model: str, options: RigOptions) -> tuple[BaseSpecWorker, SpecSettings]:
    platform = init_platform("cuda" if torch.cuda.is_available() else "cpu")
    config = ModelConfig.from_path(
        model, dtype="float32", device=platform.name, context_length=2048
    )
    settings = SpecSettings(
        algorithm=SpeculativeAlgorithm.from_string(options.algorithm),
        shape=DraftShape(
            num_steps=options.num_steps,
            topk=options.topk,
            num_draft_tokens=options.num_draft_tokens,
        ),
        rule=AcceptanceRule(),
        draft_model_path=options.draft_path,
        overlap=options.overlap,
    )
    plan = plan_draft(settings, config, torch.float32)
    runner_config = RunnerConfig(
        load_format="auto",
        attention_backend=platform.default_attention_backend
        if platform.graph_capture_supported
        else "torch_native",
        page_size=options.page_size,
        mem_fraction_static=None,
        max_total_tokens=options.max_total_tokens,
        max_running_requests=8,
        kv_cache_dtype="auto",
        random_seed=1,
        use_decode_runner=platform.graph_capture_supported,
        draft_token_bytes=plan.token_bytes if plan is not None else 0,
        draft_positions=draft_positions(settings),
    )
    target = TpModelWorker(ModelRunner(config, runner_config))
    return create_draft_worker(settings, plan, target, runner_config), settings


def kv_pools(worker: BaseSpecWorker) -> dict[PoolName, KVCache]:
    """The KV pools of a worker by name."""
    pools = {PoolName.KV: worker.target_runner.token_to_kv_pool}
    if isinstance(worker, DraftModelWorker):
        pools[PoolName.DRAFT] = worker.model_runner.token_to_kv_pool
    return pools


class SchedulerWithoutDraftSync(Scheduler):
    """What happens elsewhere: the target's KV travels alone."""

    def _maybe_register_hicache_draft(self) -> None:
        return


class SpecCacheRig:
    """Scheduler, speculative worker and hierarchical cache in this process, without sockets."""

    def __init__(self, model: str, workers: SpecWorkerCache, options: RigOptions) -> None:
        self.options = options
        self.worker = workers.get(model, options)
        runner = self.worker.target_runner
        draft_bytes = 0
        if isinstance(self.worker, DraftModelWorker):
            draft = self.worker.model_runner
            draft_bytes = kv_bytes_per_token(draft.model_config, 1, draft.kv_dtype)
        self.params = build_hicache(
            HiCacheSettings(
                limits=HostPoolLimits(ratio=options.host_ratio),
                layout=options.layout,
                io_backend=options.io_backend,
                write_policy="write_through",
                prefetch_policy="wait_complete",
                draft_storage_policy=options.draft_storage_policy,
                served_model_name="small",
            ),
            device_pool=runner.token_to_kv_pool,
            allocator=runner.token_to_kv_pool_allocator,
            model_config=runner.model_config,
            weights_fingerprint=runner.weights_fingerprint,
            draft_token_bytes=draft_bytes,
            on_progress=lambda: None,
        )
        self.controller = self.params.controller
        self.harness = self._make_harness()
        self._num_asked = 0

    def _make_harness(self) -> SchedulerHarness:
        options = self.options
        return SchedulerHarness(
            worker=self.worker,
            page_size=options.page_size,
            chunk_size=options.chunk_size,
            overlap=options.overlap,
            max_requests=8,
            context_len=2048,
            vocab_size=self.worker.target_runner.model_config.vocab_size,
            max_prefill_tokens=8192,
            hicache=self.params,
            is_eagle=SpeculativeAlgorithm.from_string(options.algorithm).is_eagle(),
            hicache_control=self._control,
            scheduler_class=Scheduler if options.sync_draft else SchedulerWithoutDraftSync,
        )

    def _control(self, tree: Any) -> HiCacheControl:
        storage = self.options.storage
        if isinstance(storage, str):
            storage = StorageChoice.in_folder(storage)
        return HiCacheControl(
            tree,
            served_model_name="small",
            storage_backend=None if storage is None else storage.backend,
            extra_config=None if storage is None else storage.config,
            prefetch_policy="wait_complete",
            write_policy="write_through",
        )

    def ask(self, prompt: Sequence[int], num_tokens: int = 48) -> Answer:
        """Greedy answer; steps until everything has ended, copies included."""
        self._num_asked += 1
        rid = f"r{self._num_asked}"
        self.harness.generate(rid, prompt, num_tokens, ignore_eos=True)
        self.harness.run_until_idle(20_000_000)
        self.settle()
        last = self.harness.outputs[rid][-1]
        first = self.harness.outputs[rid][0]
        spec = last.spec or {}
        return Answer(
            self.harness.tokens(rid),
            spec.get("spec_accept_length", 1.0),
            {"cached_tokens": first.cached_tokens, **(first.cached_tokens_details or {})},
        )

    def settle(self, timeout_s: float = 30.0) -> None:
        """Step until no copy and no storage operation is under way."""
        deadline = time.monotonic() + timeout_s
        while self.harness.tree.has_pending_transfers():
            if time.monotonic() > deadline:
                raise AssertionError("transfers do not end")
            self.harness.step()
            time.sleep(0.001)

    def evict_device(self) -> int:
        """Take everything off the device that the host holds; returns the tokens."""
        return self.harness.tree.evict(self.harness.tree.evictable_size()).num_tokens_evicted

    def flush(self) -> None:
        """Empty L1 and L2."""
        assert self.harness.scheduler.flush_cache()

    def cached_kv(self, prompt: Sequence[int]) -> dict[PoolName, torch.Tensor]:
        """KV of the prompt's reusable pages on the device, [layers, 2, tokens, ...] by pool.

        Without the last token, which is computed in any case, and its page with it.
        """
        tree = self.harness.tree
        match = tree.match_prefix(MatchPrefixParams(key=tree.make_key(list(prompt[:-1]))))
        slots = match.device_indices
        return {
            name: torch.stack([buffer[:, slots] for buffer in pool.buffers()], dim=1).cpu()
            for name, pool in kv_pools(self.worker).items()
        }

    def zero_draft_after_loads(self) -> Callable[[], None]:
        """From now on each load leaves the draft's slots empty; returns what undoes that."""
        group = self.controller.host_pools
        load_layer = group.load_layer
        draft = kv_pools(self.worker)[PoolName.DRAFT]

        def broken(layer: int, host: torch.Tensor, device: torch.Tensor, *rest: Any) -> None:
            load_layer(layer, host, device, *rest)
            for buffer in draft.buffers():
                buffer[:, device] = 0

        vars(group)["load_layer"] = broken

        def undo() -> None:
            del vars(group)["load_layer"]

        return undo

    def close(self) -> None:
        """Stop threads, give the host memory back."""
        self.harness.tree.shutdown()
        self.controller.host_pools.destroy()


def check_same_kv(
    before: dict[PoolName, torch.Tensor], after: dict[PoolName, torch.Tensor]
) -> None:
    """The same bytes in all pools."""
    assert before.keys() == after.keys()
    for name, kv in before.items():
        assert kv.shape == after[name].shape
        assert torch.equal(kv, after[name]), f"{name} KV changed on its way"


def check_tiers(rig: SpecCacheRig, prompt: list[int]) -> None:
    """Cold, device, host and storage give the same tokens, accept lengths and bytes."""
    num_reusable = len(prompt) - PROMPT_LEN + MIN_STORAGE_TOKENS
    cold = rig.ask(prompt)
    kv = rig.cached_kv(prompt)
    assert kv[PoolName.KV].shape[2] >= num_reusable
    answers: list[tuple[str, Answer]] = [("device", rig.ask(prompt))]
    assert rig.evict_device() >= num_reusable
    answers.append(("host", rig.ask(prompt)))
    check_same_kv(kv, rig.cached_kv(prompt))
    if rig.options.storage is not None:
        rig.flush()
        answers.append(("storage", rig.ask(prompt)))
        check_same_kv(kv, rig.cached_kv(prompt))
    for tier, answer in answers:
        assert answer.output_ids == cold.output_ids
        assert answer.cached[tier] >= num_reusable, (tier, answer.cached)
        assert answer.accept_length == cold.accept_length
