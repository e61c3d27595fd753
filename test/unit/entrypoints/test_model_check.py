"""What is said about a model before any process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.entrypoints.model_check import check_model
from sglang.srt.server_args import ServerArgs
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

WINDOWS: dict[str, Any] = {"swa_full_tokens_ratio": 0.5, "disable_hybrid_swa_memory": True}
STATES: dict[str, Any] = {"mamba_track_interval": 16, "max_mamba_cache_size": 9}


@pytest.mark.parametrize(
    ("family", "flags", "sentences"),
    [
        ("llama", {}, []),
        ("llama", WINDOWS, ["--swa-full-tokens-ratio, --disable-hybrid-swa-memory: no effect"]),
        (
            "gemma3",
            WINDOWS | STATES,
            ["--max-mamba-cache-size, --mamba-track-interval: no effect"],
        ),
        ("qwen3_next", STATES | {"mamba_full_memory_ratio": 0.5}, []),
        ("qwen3_next", {"swa_full_tokens_ratio": 0.5}, ["--swa-full-tokens-ratio: no effect"]),
    ],
)
def test_settings_of_another_family_are_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    family: str,
    flags: dict[str, Any],
    sentences: list[str],
) -> None:
    folder = make_tiny_checkpoint(tmp_path, family)
    check_model(ServerArgs(model_path=str(folder), device="cpu", **flags))
    messages = [m for m in caplog.messages if "no effect" in m]
    assert len(messages) == len(sentences)
    assert all(said.startswith(wanted) for said, wanted in zip(messages, sentences))
