"""The storage benchmark runs and writes its report."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[4] / "benchmark" / "bench_hicache_storage.py"


def test_small_form_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "storage.json"
    arguments = ["--small", "--threads", "2", "--folder", str(tmp_path), "--json", str(out)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    num_threads = torch.get_num_threads()
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        torch.set_num_threads(num_threads)
    report = json.loads(out.read_text())
    assert [row["layout"] for row in report["rows"]] == ["page_first", "layer_first"]
    assert all(row["read_gb_s"] > 0 and row["plain_gb_s"] > 0 for row in report["rows"])
    assert "read / plain at worst" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["storage.json"]
