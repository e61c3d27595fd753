"""Draft coherence end to end: the draft's KV goes wherever the target's goes.

The mission of this server in one test: a prompt is computed once, its KV goes to storage, the
server is restarted, and the second answer comes from storage with the same accept length, because
the draft's KV came along. The variants look at the same in every tier, layout and algorithm, byte
for byte; two negative controls show that the tests can fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.test.ci.ci_register import register_cpu_ci, register_cuda_ci
from sglang.test.hicache_spec_storage_common import (
    ACCEPT_RATIO,
    EAGLE3_FLAGS,
    LONG_UNIT,
    MIN_ACCEPT_LENGTH,
    MIN_STORAGE_TOKENS,
    PAGE_SIZE,
    PROMPT_LEN,
    RigOptions,
    SpecCacheRig,
    SpecStorageServer,
    SpecWorkerCache,
    check_restored,
    check_same_kv,
    check_tiers,
    repetitive_prompt,
    storage_files,
)

register_cpu_ci(est_time=180, suite="hicache")
register_cuda_ci(est_time=180, suite="hicache")

# The last page of the prompt is computed in any case.
NUM_PAGES = PROMPT_LEN // PAGE_SIZE - 1


@pytest.fixture(scope="module")
def model(small_model: Path) -> str:
    return str(small_model)


@pytest.fixture(scope="module")
def prompt(model: str) -> list[int]:
    return repetitive_prompt(model)


@pytest.fixture(scope="module")
def long_period_prompt(model: str) -> list[int]:
    return repetitive_prompt(model, LONG_UNIT)


@pytest.fixture(scope="module")
def workers() -> Iterator[SpecWorkerCache]:
    yield SpecWorkerCache()


def test_restarted_server_answers_from_storage_at_full_accept_length(
    model: str, tmp_path: Path
) -> None:
    case = SpecStorageServer(model, tmp_path, *EAGLE3_FLAGS)
    with case.start() as server:
        first = case.ask(server)
        assert first.accept_length >= MIN_ACCEPT_LENGTH
        assert first.cached["cached_tokens"] == 0
        case.wait_for_pages(NUM_PAGES, NUM_PAGES)
    pages = storage_files(tmp_path)
    assert pages[0] == pages[1], "a page of the target without its draft, or the other way round"
    with case.start() as server:
        check_restored(first, case.ask(server))
        # And from the device, where it is now.
        again = case.ask(server)
        assert again.output_ids == first.output_ids
        assert again.cached["device"] >= MIN_STORAGE_TOKENS
        assert ACCEPT_RATIO[0] <= again.accept_length / first.accept_length <= ACCEPT_RATIO[1]


# ------------------------------------------------------------------------------------------------
# Every tier, byte for byte
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        RigOptions(layout="page_first"),
        RigOptions(layout="layer_first", chunk_size=256, overlap=True),
        RigOptions(layout="page_first_direct", io_backend="direct", page_size=16),
        RigOptions(topk=4, num_steps=5),
        RigOptions(topk=4, num_steps=5, page_size=1, layout="layer_first", io_backend="direct"),
    ],
    ids=lambda o: f"{o.layout}-{o.io_backend}-page{o.page_size}-topk{o.topk}",
)
def test_every_tier_keeps_tokens_accept_length_and_bytes(
    model: str, prompt: list[int], workers: SpecWorkerCache, tmp_path: Path, options: RigOptions
) -> None:
    rig = SpecCacheRig(model, workers, replace(options, storage=str(tmp_path)))
    try:
        check_tiers(rig, prompt)
    finally:
        rig.close()


def test_without_storage_the_host_keeps_both(
    model: str, prompt: list[int], workers: SpecWorkerCache
) -> None:
    rig = SpecCacheRig(model, workers, RigOptions())
    try:
        check_tiers(rig, prompt)
    finally:
        rig.close()


def test_a_standalone_draft_travels_too(
    model: str, prompt: list[int], workers: SpecWorkerCache, tmp_path: Path
) -> None:
    # A draft as large as its target: half of the prompt takes as long as the others' whole one.
    options = RigOptions(
        algorithm="STANDALONE",
        num_steps=3,
        num_draft_tokens=4,
        draft_path=model,
        storage=str(tmp_path),
    )
    rig = SpecCacheRig(model, workers, options)
    try:
        check_tiers(rig, prompt[: PROMPT_LEN // 2])
    finally:
        rig.close()


def test_storage_attached_late_gets_both(
    model: str, prompt: list[int], workers: SpecWorkerCache, tmp_path: Path
) -> None:
    rig = SpecCacheRig(model, workers, RigOptions())
    try:
        cold = rig.ask(prompt)
        kv = rig.cached_kv(prompt)
        config = f'{{"file_storage_path": "{tmp_path}"}}'
        for _attempt in range(2):  # detached and attached again as well
            success, message = rig.harness.tree.attach_storage_backend(
                storage_backend="file", storage_backend_extra_config_json=config
            )
            assert success, message
            rig.ask(prompt)  # the visit that writes what has not been written
            rig.settle()
            assert storage_files(tmp_path)[0] == storage_files(tmp_path)[1] >= NUM_PAGES
            rig.flush()
            restored = rig.ask(prompt)
            assert restored.cached["storage"] >= MIN_STORAGE_TOKENS
            assert (restored.output_ids, restored.accept_length) == (
                cold.output_ids,
                cold.accept_length,
            )
            check_same_kv(kv, rig.cached_kv(prompt))
            success, message = rig.harness.tree.detach_storage_backend()
            assert success, message
    finally:
        rig.close()


# ------------------------------------------------------------------------------------------------
# A draft page is missing
# ------------------------------------------------------------------------------------------------


def _lose_draft_page(folder: Path, rig: SpecCacheRig, prompt: list[int], page: int) -> None:
    """Delete the draft's half of one page of the prompt."""
    tree = rig.harness.tree
    key = tree.make_key(prompt).page_aligned(rig.options.page_size)
    page_hash = rig.controller.page_hashes(key, None)[page]
    (path,) = folder.glob(f"{page_hash}.draft*.bin")
    path.unlink()


@pytest.mark.parametrize("policy", ["clamp", "best_effort"])
def test_a_lost_draft_page_is_never_replaced_by_old_bytes(
    model: str, prompt: list[int], workers: SpecWorkerCache, tmp_path: Path, policy: str
) -> None:
    lost = 9
    options = RigOptions(storage=str(tmp_path), draft_storage_policy=policy)
    rig = SpecCacheRig(model, workers, options)
    try:
        cold = rig.ask(prompt)
        kv = rig.cached_kv(prompt)[PoolName.DRAFT]
        rig.flush()
        _lose_draft_page(tmp_path, rig, prompt, lost)
        # What lies in the host pool now must not come back as the draft's KV.
        host = rig.controller.mem_pool_host_draft
        assert host is not None
        for index in range(0, host.size, PAGE_SIZE):
            page = host.get_dummy_flat_data_page().fill_(7.0)
            host.set_from_flat_data_page(index, page)
        answer = rig.ask(prompt)
        restored = rig.cached_kv(prompt)[PoolName.DRAFT]
        gone = slice(lost * PAGE_SIZE, (lost + 1) * PAGE_SIZE)
        assert answer.output_ids == cold.output_ids
        if policy == "clamp":
            assert answer.cached["storage"] == lost * PAGE_SIZE
            assert torch.equal(restored[:, :, : gone.start], kv[:, :, : gone.start])
            # Computed again in another piece, which on a GPU adds up in another order.
            torch.testing.assert_close(restored, kv, rtol=1e-3, atol=1e-3)
            assert answer.accept_length == cold.accept_length
        else:
            assert answer.cached["storage"] >= MIN_STORAGE_TOKENS
            assert (restored[:, :, gone] == 0).all()
            assert torch.equal(restored[:, :, : gone.start], kv[:, :, : gone.start])
    finally:
        rig.close()


def test_zeros_in_place_of_a_draft_never_reach_storage(
    model: str, prompt: list[int], workers: SpecWorkerCache, tmp_path: Path
) -> None:
    """Others would take them for the draft's KV, whatever their policy is."""
    lost = 9
    options = RigOptions(storage=str(tmp_path), draft_storage_policy="best_effort")
    rig = SpecCacheRig(model, workers, options)
    try:
        rig.ask(prompt)
        rig.flush()
        _lose_draft_page(tmp_path, rig, prompt, lost)
        assert rig.ask(prompt).cached["storage"] >= MIN_STORAGE_TOKENS
        # A storage that has nothing: everything is written again at the next visit.
        assert rig.harness.tree.detach_storage_backend()[0]
        for file in tmp_path.glob("*.bin"):
            file.unlink()
        success, message = rig.harness.tree.attach_storage_backend(
            storage_backend="file",
            storage_backend_extra_config_json=f'{{"file_storage_path": "{tmp_path}"}}',
        )
        assert success, message
        rig.ask(prompt)
        rig.settle()
        num_target, num_draft = storage_files(tmp_path)
        assert num_target >= NUM_PAGES
        assert num_draft == lost, "zeros, or what was computed behind them, were written"
    finally:
        rig.close()


# ------------------------------------------------------------------------------------------------
# Negative controls
# ------------------------------------------------------------------------------------------------


def test_control_a_zeroed_draft_pool_is_noticed(
    model: str, long_period_prompt: list[int], workers: SpecWorkerCache
) -> None:
    rig = SpecCacheRig(model, workers, RigOptions())
    try:
        cold = rig.ask(long_period_prompt, 60)
        rig.evict_device()
        undo = rig.zero_draft_after_loads()
        broken = rig.ask(long_period_prompt, 60)
        undo()
        assert broken.output_ids == cold.output_ids
        assert broken.accept_length < 0.8 * cold.accept_length
    finally:
        rig.close()


def test_control_without_draft_sync_the_accept_length_collapses(
    model: str, long_period_prompt: list[int], workers: SpecWorkerCache
) -> None:
    rig = SpecCacheRig(model, workers, RigOptions(sync_draft=False))
    try:
        cold = rig.ask(long_period_prompt, 60)
        rig.evict_device()
        # Somebody else uses the slots meanwhile.
        pool = rig.worker.model_runner.token_to_kv_pool  # type: ignore[attr-defined]
        pool.k_data.normal_()
        pool.v_data.normal_()
        broken = rig.ask(long_period_prompt, 60)
        assert broken.output_ids == cold.output_ids
        assert broken.accept_length < 0.8 * cold.accept_length
    finally:
        rig.close()


def test_ngram_has_no_pool_to_carry(model: str, prompt: list[int], tmp_path: Path) -> None:
    case = SpecStorageServer(
        model, tmp_path, "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", 8
    )
    with case.start() as server:
        first = case.ask(server, 64)
        case.wait_for_pages(NUM_PAGES, 0)
        assert storage_files(tmp_path)[1] == 0
        reply = server.post("/flush_cache?timeout=30")
        assert reply.status_code == 200
        second = case.ask(server, 64)
        assert second.output_ids == first.output_ids
        assert second.cached["storage"] >= MIN_STORAGE_TOKENS
