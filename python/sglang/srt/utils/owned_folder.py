"""Temporary folders that last as long as the process that made them, also where it was killed.

Owns a lock file in each folder: the kernel lets go of it when the owner dies, however it dies and
whatever process ids mean to others who see the folder (containers). Whoever makes the next folder
removes those without an owner. Any thread.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_LOCK_NAME = "owner.lock"
# Between a folder's birth and its lock; nobody takes that long.
_YOUNG_S = 60.0
_held: dict[str, int] = {}  # folder -> descriptor of its lock


def make_owned_folder(prefix: str) -> str:
    """Make an empty folder (but for the lock) in the temporary folder; `prefix` of its name.

    Removes abandoned ones of the same prefix. Raises OSError.
    """
    remove_abandoned_folders(prefix)
    folder = tempfile.mkdtemp(prefix=prefix)
    descriptor = os.open(os.path.join(folder, _LOCK_NAME), os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _held[folder] = descriptor
    return folder


def remove_owned_folder(folder: str) -> None:
    """Delete a folder; idempotent."""
    shutil.rmtree(folder, ignore_errors=True)
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def remove_abandoned_folders(prefix: str) -> int:
    """Delete the folders of a prefix whose owners are gone; return how many."""
    num_removed = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
            num_removed += 1
    return num_removed


def _is_abandoned(folder: Path) -> bool:
    """Not where we may not look, nor where there is no lock: somebody else knows about it."""
    try:
        if time.time() - folder.stat().st_mtime < _YOUNG_S:
            return False
        descriptor = os.open(folder / _LOCK_NAME, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
