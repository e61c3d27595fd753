"""The command line over a storage folder."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.page_key import draft_page_key
from sglang.srt.mem_cache.storage.folder_quota import FolderQuota
from sglang.srt.mem_cache.storage.inspect import main
from sglang.test.fakes.host_pages import fill_page, make_file_store, make_host_pool, page_hash, put
from sglang.test.fakes.host_pages import transfer as make_transfer

SUFFIX = "_org-model_0_1.bin"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pool = make_host_pool()
    store = make_file_store(tmp_path, pool)
    put(store, pool, range(4))
    store.register_mem_host_pool_v2(pool, PoolName.DRAFT)
    fill_page(pool, 0, "draft")
    key = draft_page_key(page_hash(0), bytes(32))
    store.batch_set_v2([make_transfer(pool, [0], [key], PoolName.DRAFT)])
    store.close()
    other = make_file_store(tmp_path, pool, model_name="b", is_mla_model=True)
    put(other, pool, [7])
    other.close()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    status = main([*map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_pages_are_listed_by_owner_and_pool(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = run(capsys, folder)
    assert status == 0
    assert report["pages"] == 6
    groups = {(g["model"], g["rank"], g["pool"]): g["pages"] for g in report["groups"]}
    assert groups == {
        ("org-model", "0/1", "kv"): 4,
        ("org-model", "0/1", "draft"): 1,
        ("b", "all", "kv"): 1,
    }
    assert main([str(folder), "--verify"]) == 0
    text = capsys.readouterr().out
    assert "6 pages" in text
    assert "every page is whole" in text


def test_damage_is_found_by_header_and_by_content(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, flipped = (folder / (page_hash(seed) + SUFFIX) for seed in (0, 1))
    short.write_bytes(short.read_bytes()[:100])
    data = flipped.read_bytes()
    flipped.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    (folder / (page_hash(2) + SUFFIX)).rename(folder / (page_hash(99) + SUFFIX))
    status, report = run(capsys, folder)
    assert (status, report["damaged"]) == (1, [short.name])
    status, report = run(capsys, folder, "--verify")
    assert status == 1
    assert report["damaged"] == sorted([short.name, flipped.name])
    assert report["foreign"] == [page_hash(99) + SUFFIX]
    status, report = run(capsys, folder, "--verify", "--remove-damaged")
    assert (status, report["removed"], report["pages"]) == (0, 3, 3)
    assert run(capsys, folder, "--verify")[0] == 0


def test_pruning_by_size_and_age(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = time.time() - 3 * 86400
    for seed in (1, 2):
        os.utime(folder / (page_hash(seed) + SUFFIX), (old, old + seed))
    status, report = run(capsys, folder, "--prune", "--max-size", "5kB")
    assert (status, report["removed"], report["pages"]) == (0, 2, 4)
    os.utime(folder / (page_hash(3) + SUFFIX), (old, old))
    status, report = run(capsys, folder, "--prune", "--older-than", "2d")
    assert (status, report["removed"]) == (0, 1)
    assert not (folder / (page_hash(3) + SUFFIX)).exists()
    assert report["bytes"] == sum(path.stat().st_size for path in folder.glob("*.bin"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--prune"],
        ["--max-size", "5kB"],
        ["--prune", "--max-size", "much"],
        ["--prune", "--older-than", "2"],
        ["--threads", "0"],
    ],
)
def test_wrong_arguments_end_with_status_2(folder: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(folder), *arguments])
    assert ended.value.code == 2


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert "--remove-damaged" in text
    assert "exit status" in text


@pytest.mark.parametrize("verify", [[], ["--verify"]])
def test_what_is_no_file_is_damaged_and_never_read(
    folder: Path, capsys: pytest.CaptureFixture[str], verify: list[str]
) -> None:
    """A pipe would wait for a writer for ever, a device may never end, a link leads elsewhere."""
    names = sorted(page_hash(seed) + SUFFIX for seed in (90, 91, 92))
    os.mkfifo(folder / names[0])
    (folder / names[1]).symlink_to("/dev/zero")
    (folder / names[2]).symlink_to(folder / (page_hash(0) + SUFFIX))
    status, report = run(capsys, folder, *verify)
    assert (status, report["damaged"], report["left"]) == (1, names, names)
    status, report = run(capsys, folder, *verify, "--remove-damaged")
    assert (status, report["removed"], report["left"]) == (0, 3, [])
    assert not any(os.path.lexists(folder / name) for name in names)
    assert run(capsys, folder, "--verify")[0] == 0


def test_a_file_of_another_size_is_not_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder / (page_hash(0) + SUFFIX)
    os.truncate(path, 1 << 40)
    status, report = run(capsys, folder, "--verify")
    assert (status, report["damaged"]) == (1, [path.name])


@pytest.mark.parametrize("failure", [PermissionError(1, "Operation not permitted"), None])
def test_damage_that_cannot_be_removed_is_named(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failure: OSError | None,
) -> None:
    path = folder / (page_hash(0) + SUFFIX)
    path.write_bytes(path.read_bytes()[:100])

    def remove(quota: FolderQuota, path: str, inode: int) -> bool:
        if failure is not None:
            raise failure
        return False

    monkeypatch.setattr(FolderQuota, "remove", remove)
    status, report = run(capsys, folder, "--remove-damaged")
    assert (status, report["not_removed"], report["left"]) == (2, [path.name], [path.name])
    assert main([str(folder), "--remove-damaged"]) == 2
    assert f"1 left that could not be removed:\n  {path.name}" in capsys.readouterr().out
