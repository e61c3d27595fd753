"""Connecting to a Mooncake Store in a process of its own first, with a limit of time.

The client's `setup` lets no other thread of its process run and cannot be interrupted: towards a
master that does not answer it takes minutes, in which a server would stand still. So a short-lived
process tries the same first, without lending memory; where that works, ours connects at once.
Called by ``mooncake_store.py`` before it connects.
"""

from __future__ import annotations

import subprocess
import sys

from sglang.srt.mem_cache.hicache_storage import StorageError
from sglang.srt.mem_cache.storage.mooncake_options import MooncakeOptions

REHEARSAL_TIMEOUT_S = 10.0
_MARK = "setup returned "
_PROGRAM = f"""
import os, sys
from mooncake.store import MooncakeDistributedStore

host, metadata, buffer_bytes, protocol, devices, master = sys.argv[1:]
client = MooncakeDistributedStore()
code = client.setup(host, metadata, 0, int(buffer_bytes), protocol, devices, master)
print("{_MARK}%d" % code, flush=True)
os._exit(0)  # the client's own end takes a while
"""


def rehearse(options: MooncakeOptions, timeout_s: float = REHEARSAL_TIMEOUT_S) -> None:
    """Raise StorageError, with the reason, where the store cannot be connected to in time.

    The environment holds Mooncake's own settings already (time limits, log).
    """
    command = [
        *(sys.executable, "-c", _PROGRAM, options.local_hostname, options.metadata_server),
        *(str(options.buffer_bytes), options.protocol, options.devices, options.master),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise StorageError(
            f"{_who(options)} did not answer within {timeout_s:g} s: {_blame(options)}"
        ) from error
    code = done.stdout.rpartition(_MARK)[2].strip()
    if code != "0":
        what = f"failed with {code}" if code else f"ended with {done.returncode}"
        raise StorageError(
            f"connecting to {_who(options)} {what}: {_blame(options)} "
            "(MC_LOG_LEVEL=INFO shows what Mooncake says)"
        )


def _who(options: MooncakeOptions) -> str:
    return f"the Mooncake master at {options.master}"


def _blame(options: MooncakeOptions) -> str:
    """What may be wrong, besides a master that hangs."""
    parts = [f"metadata_server {options.metadata_server!r}", f"protocol {options.protocol}"]
    return f"is it a master, and do {' and '.join(parts)} fit?"
