"""Tests of draft coherence over a shared store: what one server computed another one restores.

A test module derives a class from `SharedDraftSuite` and has the module's fixture `servers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.page_key import draft_page_key
from sglang.srt.mem_cache.storage import page_file
from sglang.srt.mem_cache.storage.shared_store import SharedPageStore
from sglang.test.fakes.store_servers import (
    StoreServers,
    put_raw_record,
    raw_record,
    record_name,
)
from sglang.test.hicache_spec_storage_common import (
    EAGLE3_FLAGS,
    MIN_ACCEPT_LENGTH,
    MIN_STORAGE_TOKENS,
    RigOptions,
    SpecCacheRig,
    SpecStorageServer,
    SpecWorkerCache,
    StorageChoice,
    check_restored,
    check_same_kv,
    check_tiers,
    kv_pools,
    repetitive_prompt,
)


class SharedDraftSuite:
    """See the module docstring."""

    @pytest.fixture
    def storage(self, servers: StoreServers) -> StorageChoice:
        return StorageChoice.in_store(servers)

    @pytest.fixture
    def model(self, small_model: Path) -> str:
        return str(small_model)

    @pytest.fixture(scope="class")
    def workers(self) -> Iterator[SpecWorkerCache]:
        yield SpecWorkerCache()

    def test_computed_on_one_server_restored_on_another(
        self, model: str, storage: StorageChoice
    ) -> None:
        case = SpecStorageServer(model, storage, *EAGLE3_FLAGS)
        with case.start() as one, case.start() as other:
            first = case.ask(one)
            assert first.accept_length >= MIN_ACCEPT_LENGTH
            assert first.cached["cached_tokens"] == 0
            reply = one.post("/flush_cache?timeout=60")  # waits until the store has everything
            assert reply.status_code == 200, reply.text
            check_restored(first, case.ask(other), storage.class_name)

    def test_every_tier_and_another_cache_keep_tokens_accept_length_and_bytes(
        self, model: str, storage: StorageChoice, workers: SpecWorkerCache
    ) -> None:
        prompt = repetitive_prompt(model)
        options = RigOptions(storage=storage)
        rig = SpecCacheRig(model, workers, options)
        try:
            check_tiers(rig, prompt)
            kv = rig.cached_kv(prompt)
            computed = rig.ask(prompt)
        finally:
            rig.close()
        for pool in kv_pools(rig.worker).values():
            for buffer in pool.buffers():
                buffer.zero_()
        other = SpecCacheRig(model, workers, options)
        try:
            restored = other.ask(prompt)
            assert restored.cached["storage"] >= MIN_STORAGE_TOKENS
            check_same_kv(kv, other.cached_kv(prompt))
            assert restored.output_ids == computed.output_ids
            assert restored.accept_length == computed.accept_length
        finally:
            other.close()

    def test_control_other_bytes_in_the_store_are_noticed(
        self, model: str, storage: StorageChoice, workers: SpecWorkerCache
    ) -> None:
        """Wrong bytes of the draft under a right checksum: the tests above see them."""
        prompt = repetitive_prompt(model)
        rig = SpecCacheRig(model, workers, RigOptions(storage=storage))
        try:
            cold = rig.ask(prompt)
            kv = rig.cached_kv(prompt)
            rig.flush()
            assert _zero_draft_pages(rig, prompt) >= MIN_STORAGE_TOKENS // rig.options.page_size
            broken = rig.ask(prompt)
            assert broken.output_ids == cold.output_ids
            restored = rig.cached_kv(prompt)
            assert torch.equal(restored[PoolName.KV], kv[PoolName.KV])
            with pytest.raises(AssertionError, match="draft KV changed on its way"):
                check_same_kv(kv, restored)
        finally:
            backend = rig.controller.storage_backend
            assert backend is not None and backend.clear()
            rig.close()


def _zero_draft_pages(rig: SpecCacheRig, prompt: list[int]) -> int:
    """Replace the draft's pages of a prompt in the store, headers fitting; returns how many."""
    store = rig.controller.storage_backend
    digest = rig.controller._draft_digest()
    assert isinstance(store, SharedPageStore) and digest is not None
    key = rig.harness.tree.make_key(prompt).page_aligned(rig.options.page_size)
    num_changed = 0
    for page_hash in rig.controller.page_hashes(key, None):
        name = record_name(store, draft_page_key(page_hash, digest))
        data = raw_record(store, name)
        if data is None:
            continue
        meta = page_file.parse_header(data[: page_file.HEADER_BYTES])
        assert meta is not None
        payload = bytes(meta.payload_bytes)
        checksum = page_file.checksum([memoryview(payload)])
        header = page_file.pack_header(meta._replace(payload_checksum=checksum))
        put_raw_record(store, name, header + payload)
        num_changed += 1
    return num_changed
