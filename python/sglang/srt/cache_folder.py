"""Where fetched models and compiled kernels are kept.

Scripts read it before anything is installed: it imports nothing of the project.
"""

from __future__ import annotations

import os
from pathlib import Path

SMALL_MODEL = "smollm2-135m-instruct"


def cache_folder() -> Path:
    """$HISPEC_CACHE, or ~/.cache/hispec."""
    return Path(os.environ.get("HISPEC_CACHE") or "~/.cache/hispec").expanduser()


def small_model_folder() -> Path:
    """Where `scripts/fetch_model.py` puts the small real model."""
    return cache_folder() / SMALL_MODEL
