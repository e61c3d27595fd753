"""Folders of processes that were killed are removed by the next one; others are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from sglang.srt.utils import owned_folder
from sglang.srt.utils.owned_folder import make_owned_folder, remove_owned_folder

PREFIX = "owned-test-"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_goes_and_that_of_a_living_one_stays(
    temporary: Path,
) -> None:
    program = (
        "import sys, tempfile, time; tempfile.tempdir = sys.argv[1]\n"
        "from sglang.srt.utils.owned_folder import make_owned_folder\n"
        f"print(make_owned_folder({PREFIX!r}), flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", program, str(temporary)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        (theirs / "socket").touch()
        unknown = temporary / f"{PREFIX}without a lock"
        unknown.mkdir()
        for folder in (theirs, unknown):
            os.utime(folder, (0, 0))
        ours = make_owned_folder(PREFIX)
        assert theirs.exists() and unknown.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        again = make_owned_folder(PREFIX)
        assert not theirs.exists() and unknown.exists() and Path(ours).exists()
    for made in (ours, again, ours):
        remove_owned_folder(made)
    assert sorted(path.name for path in temporary.iterdir()) == [unknown.name]


def test_a_folder_that_is_being_made_is_left_alone(temporary: Path) -> None:
    young = temporary / f"{PREFIX}young"
    young.mkdir()
    (young / "owner.lock").touch()
    assert owned_folder.remove_abandoned_folders(PREFIX) == 0
    os.utime(young, (0, 0))
    assert owned_folder.remove_abandoned_folders(PREFIX) == 1
