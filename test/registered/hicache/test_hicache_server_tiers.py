"""A real model behind a real server: the same tokens from every tier, and over a restart.

The counters of each answer say where its prompt came from. Several ranks are in the tests marked
slow, but for two ranks of a tiny model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.small_server import SmallServer, metric, serve

register_cpu_ci(est_time=70, suite="hicache")

NEW_TOKENS = 16
GREEDY = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}


class Tiers:
    """A served model, one prompt, and other prompts that push it off the device.

    The device holds three prompts, the host six.
    """

    def __init__(self, server: SmallServer, page: int, length: int) -> None:
        self.server = server
        self.length = length
        self.full = (length - 1) // page * page

    def prompt(self, number: int) -> list[int]:
        return [3 + (number * 31 + 7 * i + i * i // 7) % 190 for i in range(self.length)]

    def ask(self, number: int = 0) -> tuple[list[int], dict[str, int]]:
        answer = self.server.generate(input_ids=self.prompt(number), sampling_params=GREEDY)
        details = answer["meta_info"]["cached_tokens_details"] or {}
        counts = {tier: details.get(tier, 0) for tier in ("device", "host", "storage")}
        assert answer["meta_info"]["cached_tokens"] == sum(counts.values())
        return answer["output_ids"], counts

    def only(self, tier: str) -> dict[str, int]:
        return {"device": 0, "host": 0, "storage": 0, tier: self.full}

    def flush(self) -> None:
        reply = self.server.post("/flush_cache?timeout=30")
        assert reply.status_code == 200, reply.text


@contextmanager
def serve_tiers(
    model: str, folder: Path, page: int, length: int, *flags: str | int | float
) -> Iterator[Tiers]:
    config = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": page})
    room = 3 * length + 4 * page + 64
    with serve(
        model,
        *("--max-total-tokens", room // page * page, "--page-size", page, "--enable-metrics"),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2, "--grammar-backend", "none"),
        *("--hicache-storage-backend", "file"),
        *("--hicache-storage-prefetch-policy", "wait_complete"),
        *("--hicache-storage-backend-extra-config", config),
        *flags,
    ) as server:
        yield Tiers(server, page, length)


def check_all_tiers(
    model: str, folder: Path, page: int, length: int, *flags: str | int | float
) -> None:
    """Cold, device, host, storage, storage after a restart and from a second server beside it."""
    with serve_tiers(model, folder, page, length, *flags) as tiers:
        cold, counts = tiers.ask()
        assert counts == {"device": 0, "host": 0, "storage": 0}
        assert tiers.ask() == (cold, tiers.only("device"))
        for number in (1, 2, 3, 4):
            assert sum(tiers.ask(number)[1].values()) == 0
        assert tiers.ask() == (cold, tiers.only("host"))
        tiers.flush()
        assert tiers.ask() == (cold, tiers.only("storage"))
        server = tiers.server
        assert metric(server, "sglang:backuped_tokens_total") >= 5 * tiers.full
        assert metric(server, "sglang:hicache_backup_tokens_total") >= 5 * tiers.full
        assert metric(server, "sglang:prefetched_tokens_total") == tiers.full
        assert metric(server, "sglang:load_back_tokens_total") == 2 * tiers.full
        for source, times in (("device", 1), ("host", 1), ("storage", 1), ("total", 3)):
            counted = metric(server, "sglang:cached_tokens_total", cache_source=source)
            assert counted == times * tiers.full, source
        with serve_tiers(model, folder, page, length, *flags) as second:
            assert second.ask() == (cold, second.only("storage"))
            other = second.ask(7)[0]
            second.flush()
            assert tiers.ask(7) == (other, tiers.only("storage"))
    with serve_tiers(model, folder, page, length, *flags) as tiers:
        assert tiers.ask() == (cold, tiers.only("storage"))


@pytest.mark.timeout(200)
def test_a_real_model(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_ON_CPU", "1")
    flags: list[Any] = [
        *("--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct"),
        *("--chunked-prefill-size", 128),
    ]
    check_all_tiers(str(small_model), tmp_path, 64, 330, *flags)


@pytest.mark.timeout(200)
def test_two_ranks(tmp_path: Path) -> None:
    model = make_tiny_checkpoint(tmp_path / "tiny")
    check_all_tiers(str(model), tmp_path / "l3", 16, 200, "--tp", 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("overlap", ["0", "1"])
@pytest.mark.parametrize(
    "layout", [("layer_first", "kernel"), ("page_first", "kernel"), ("page_first_direct", "direct")]
)
@pytest.mark.parametrize("tp", [1, 3])
def test_the_real_model_on_ranks(
    small_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tp: int,
    layout: tuple[str, str],
    overlap: str,
) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_ON_CPU", overlap)
    flags = ["--hicache-mem-layout", layout[0], "--hicache-io-backend", layout[1], "--tp", str(tp)]
    check_all_tiers(str(small_model), tmp_path, 64, 330, *flags)
