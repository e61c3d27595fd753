"""How a launch of the attention kernel is divided, and what it may overlap with, on Hopper.

What the choices are worth is measured by `benchmark/bench_attention.py`; these are checks that the
measured ones are taken.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sglang.srt.layers.attention.triton_ops import paged_attention as launcher

HEADS, KV_HEADS = 32, 8


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(launcher, "supports_early_launch", lambda device: True)


def config(requests: int, tokens: int = 1, head_dim: int = 128) -> launcher.LaunchConfig:
    """Chosen for `tokens` new ones of each request."""
    keys = torch.empty((1, KV_HEADS, head_dim), dtype=torch.bfloat16)
    lens = torch.zeros(requests, dtype=torch.int64)
    return launcher.choose_config(
        launcher.PagedAttentionInputs(
            queries=torch.empty((requests * tokens, HEADS, head_dim), dtype=torch.bfloat16),
            keys=keys,
            values=keys,
            table=torch.zeros((1, 1), dtype=torch.int32),
            table_rows=lens,
            seq_lens=lens,
            query_lens=None,
            tree_mask=None,
            scaling=1.0,
            window=None,
        )
    )


@pytest.mark.parametrize("requests", [1, 2, 16])
@pytest.mark.parametrize(("head_dim", "early_next"), [(64, True), (128, False), (256, True)])
def test_decode_of_few_requests_starts_when_the_product_before_has_ended(
    requests: int, head_dim: int, early_next: bool
) -> None:
    """And what comes next may start early only where the tiles leave it room."""
    chosen = config(requests, head_dim=head_dim)
    assert not chosen.early
    assert chosen.early_next is early_next


@pytest.mark.parametrize(("requests", "tokens"), [(64, 1), (256, 1), (1, 4), (8, 4), (1, 64)])
def test_other_steps_overlap_on_both_sides(requests: int, tokens: int) -> None:
    chosen = config(requests, tokens)
    assert chosen.early
    assert chosen.early_next


def test_verification_of_few_drafts_takes_small_blocks() -> None:
    verification, decode = config(1, tokens=4), config(1)
    assert (verification.block_m, verification.block_n, verification.num_warps) == (16, 64, 2)
    assert (decode.block_m, decode.block_n, decode.num_warps) == (16, 128, 4)
    assert verification.share_target == 2 * decode.share_target + 1 == 2 * 132 // KV_HEADS


def test_nothing_overlaps_where_the_device_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "supports_early_launch", lambda device: False)
    for requests, tokens in ((1, 1), (64, 1), (1, 4)):
        chosen = config(requests, tokens)
        assert not chosen.early
        assert not chosen.early_next
