"""Latent KV through all tiers: the same bytes and tokens, alone and beside a draft of either kind.

One buffer a pool, every rank the same: storage holds one copy, written by the first rank, under
keys that do not know the number of ranks. A draft with heads of its own is stored by every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import PoolRows, ServedScheduler
from sglang.test.fakes.tiny_drafts import add_tiny_nextn_layer, make_tiny_draft
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.small_server import serve

register_cpu_ci(est_time=30, suite="hicache")

PROMPT = [3 + (7 * i + i * i // 5) % 190 for i in range(90)]
NEW_TOKENS = 16

# (family, page size, layout, io, draft)
CASES = [
    ("deepseek_v2", 1, "layer_first", "kernel", "none"),
    ("deepseek_v2", 16, "page_first", "direct", "mha"),
    ("deepseek_v3", 4, "page_first_direct", "direct", "none"),
    ("deepseek_v3", 4, "page_first", "kernel", "mha"),
    ("deepseek_v3", 4, "layer_first", "kernel", "latent"),
    ("deepseek_v3", 1, "page_first_direct", "direct", "latent"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    made = {
        family: make_tiny_checkpoint(root / family, family, num_hidden_layers=6)
        for family in ("deepseek_v2", "deepseek_v3")
    }
    add_tiny_nextn_layer(made["deepseek_v3"])
    return {**made, "mha": make_tiny_draft(root / "draft")}


def cache_flags(folder: Path, page: int, layout: str, io: str) -> list[str | int]:
    return [
        *("--page-size", page, "--max-total-tokens", 320, "--max-running-requests", 2),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--hicache-mem-layout", layout, "--hicache-io-backend", io),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        "--hicache-storage-backend-extra-config",
        f'{{"file_storage_path": "{folder}", "prefetch_threshold": 1, "max_size": 100000000}}',
    ]


def draft_flags(kind: str, folders: Mapping[str, Path]) -> list[str | int]:
    if kind == "none":
        return []
    algorithm: list[str | int] = ["--speculative-algorithm", "NEXTN"]
    if kind == "mha":
        path = str(folders[kind])
        algorithm = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", path]
    return [
        *algorithm,
        *("--speculative-num-steps", 3, "--speculative-eagle-topk", "2"),
        *("--speculative-num-draft-tokens", 6),
    ]


def serve_again(
    served: ServedScheduler, tier: str, least: int, tokens: list[int], rows: PoolRows
) -> None:
    """The prompt once more, from the tier named; the same tokens, the same bytes."""
    answer = served.answer(PROMPT, NEW_TOKENS)
    assert answer.tokens == tokens, tier
    assert answer.sources.get(tier, 0) >= least, (tier, answer.sources)
    found = served.device_kv(PROMPT)
    assert found.keys() == rows.keys()
    count = answer.cached_tokens
    for name, pool in found.items():
        assert torch.equal(pool[:, :, :count], rows[name][:, :, :count]), (tier, name)
    served.settle()


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_tier_restores_latent_kv(
    case: tuple[str, int, str, str, str], folders: Mapping[str, Path], tmp_path: Path
) -> None:
    family, page, layout, io, draft = case
    flags = cache_flags(tmp_path, page, layout, io) + draft_flags(draft, folders)
    full = (len(PROMPT) - 1) // page * page
    with ServedScheduler(folders[family], "--disable-radix-cache") as served:
        expected = served.answer(PROMPT, NEW_TOKENS).tokens
    with ServedScheduler(folders[family], *flags) as served:
        pool = served.tree.cache_controller.mem_pool_device
        assert isinstance(pool, MLATokenToKVPool)
        first = served.answer(PROMPT, NEW_TOKENS)
        assert first.cached_tokens == 0 and first.tokens == expected
        rows = served.device_kv(PROMPT)
        assert set(rows) == ({"kv"} if draft == "none" else {"kv", "draft"})
        serve_again(served, "device", full, expected, rows)
        served.evict_device()
        serve_again(served, "host", full, expected, rows)
        served.evict_device()
        served.flush()
        serve_again(served, "storage", full, expected, rows)
    with ServedScheduler(folders[family], *flags) as served:
        serve_again(served, "storage", full, expected, rows)


@pytest.mark.timeout(240)
def test_servers_of_one_and_of_two_ranks_share_storage(
    folders: Mapping[str, Path], tmp_path: Path
) -> None:
    page, model = 4, folders["deepseek_v3"]
    flags = cache_flags(tmp_path, page, "page_first", "kernel") + draft_flags("latent", folders)
    full = (len(PROMPT) - 1) // page * page
    with ServedScheduler(model, *flags) as served:
        alone = served.answer(PROMPT[:40], NEW_TOKENS)
        served.settle()
    num_alone = len(list(tmp_path.glob("*.bin")))
    body = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    with serve(str(model), *flags, "--tp", 2, "--device", "cpu", "--random-seed", 1) as server:
        short = server.generate(input_ids=PROMPT[:40], sampling_params=body)
        assert short["output_ids"] == alone.tokens
        assert short["meta_info"]["cached_tokens_details"]["storage"] >= 36
        whole = server.generate(input_ids=PROMPT, sampling_params=body)
        assert server.post("/flush_cache?timeout=30").status_code == 200
    names = [path.name for path in tmp_path.glob("*.bin")]
    assert len(names) > num_alone
    # One copy of a page, whichever rank and however many there were.
    pages = {(name.partition("_")[0]) for name in names}
    assert len(pages) == len(names)
    with ServedScheduler(model, *flags) as served:
        again = served.answer(PROMPT, NEW_TOKENS)
        assert again.tokens == whole["output_ids"]
        assert again.sources.get("storage", 0) >= full
