"""The radix benchmark runs and writes its report."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmark" / "bench_radix_cache.py"


def test_small_form_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "radix.json"
    monkeypatch.setattr(
        sys, "argv", [str(SCRIPT), "--small", "--page-sizes", "1", "16", "--json", str(out)]
    )
    num_threads = torch.get_num_threads()
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        torch.set_num_threads(num_threads)
    report = json.loads(out.read_text())
    assert report["sizes"]["num_nodes"] == 500
    assert all(count >= 500 for count in report["nodes"].values())
    assert {row["page_size"] for row in report["rows"]} == {1, 16}
    assert report["worst_match_insert_ms"] > 0
    assert "match + insert at worst" in capsys.readouterr().out
