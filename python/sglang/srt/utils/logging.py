"""Logging of every process: one format, the rank in front of the message, to stderr.

`configure_logger` is called once at the start of each process.
"""

from __future__ import annotations

import logging
import sys
import warnings

# Loggers that write one line a request or a weight file at info; nobody asked for those.
_NOISY_LOGGERS = ("httpx", "httpcore", "urllib3", "filelock", "asyncio", "fsspec")


def configure_logger(log_level: str, prefix: str = "") -> None:
    """Set up the root logger of this process.

    `log_level` is a name such as "info"; `prefix` (for example " DP1 TP0") goes into every line.
    Raises ValueError on an unknown level.
    """
    level = logging.getLevelName(log_level.upper())
    if not isinstance(level, int):
        raise ValueError(f"unknown log level {log_level!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"[%(asctime)s{prefix}] %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"
        )
    )
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def suppress_noisy_warnings() -> None:
    """Hide deprecation warnings of third-party packages, which no user of the server can act on."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\..*")
