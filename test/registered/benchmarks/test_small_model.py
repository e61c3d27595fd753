"""The benchmark that takes the fetched model by default finds it where the cache is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import bench_draft_coherence
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="benchmarks")


def test_the_default_is_the_model_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "smollm2-135m-instruct"
    folder.mkdir()
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench_draft_coherence.py", "--small"])
    assert bench_draft_coherence.parse_args().model == str(folder)


def test_a_model_that_was_not_fetched_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["bench_draft_coherence.py", "--small"])
    with pytest.raises(SystemExit):
        bench_draft_coherence.parse_args()
    assert "scripts/fetch_model.py" in capsys.readouterr().err
