"""Settings and fixtures of all tests: few threads, no hub, the small model fetched on demand."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Set before any test imports torch, which reads it once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A name that is no folder must fail at once, not after minutes of asking a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Each server that a test starts is several processes: without compiled files every one of them
# compiles the package anew, and so does each worker with the tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).resolve().parent.parent
# Servers that tests start import the package from this tree, installed or not.
_PYTHON_PATH = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PYTHON_PATH))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine or this run is not meant for, and say why."""
    needs_cuda = [item for item in items if item.get_closest_marker("cuda")]
    if needs_cuda and not _cuda_is_available():
        for item in needs_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if hasattr(config, "workerinput"):
        # The longest files first, so that no worker is left with one while the others are idle.
        items.sort(key=lambda item: -_est_time(item.path))
    if not config.getoption("--run-slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow; run it with --run-slow"))


def pytest_configure() -> None:
    """Let imports run without garbage collections: they make objects that stay to the end."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave those objects out of all collections from here on."""
    gc.freeze()
    gc.enable()


@functools.cache
def _est_time(path: Path) -> float:
    """Seconds that a registered file says it takes; where it says nothing, what many take."""
    said = re.search(r"^register_cpu_ci\(est_time=([\d.]+)", path.read_text("utf-8"), re.MULTILINE)
    return float(said[1]) if said else 45.0


def _cuda_is_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def small_model() -> Path:
    """Return the folder of the small real model: HISPEC_MODEL_DIR, or fetched into the cache."""
    named = os.environ.get("HISPEC_MODEL_DIR")
    if named:
        folder = Path(named).expanduser()
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"HISPEC_MODEL_DIR={named} holds no config.json")
        return folder
    return _fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma_model() -> Path:
    """Return the folder of Gemma 3 270M (base), fetched into the cache: its licence keeps it there.

    HISPEC_GEMMA_DIR names a folder to take instead.
    """
    named = os.environ.get("HISPEC_GEMMA_DIR")
    return Path(named).expanduser() if named else _fetch("gemma-3-270m")


def _fetch(model: str) -> Path:
    fetched = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "fetch_model.py"), "--model", model],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        check=True,
    )
    return Path(fetched.stdout.strip().splitlines()[-1])
