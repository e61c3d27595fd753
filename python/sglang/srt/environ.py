"""Every `SGLANG_*` environment variable, once: name, type, default, meaning.

`envs.NAME.get()` reads the process environment at the time of the call; a value that does not
parse raises `EnvValueError`, it is never replaced by the default. `.set()` writes the
environment (children inherit it), `.override()` does so for the length of a `with` block.
Variables of other programs (`OMP_NUM_THREADS`, `PROMETHEUS_MULTIPROC_DIR`) are not listed here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")

_TRUE = frozenset({"1", "true", "yes", "on", "y"})
_FALSE = frozenset({"0", "false", "no", "off", "n", ""})


class EnvValueError(ValueError):
    """An environment variable holds text that its type does not allow."""


def parse_bool(text: str) -> bool:
    """Read a switch: 1/true/yes/on or 0/false/no/off, any case; anything else raises."""
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("expected one of 1, true, yes, on, 0, false, no, off")


_BYTE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BYTE_UNITS |= {f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)}


def parse_bytes(text: str) -> int:
    """Read a size: a number with an optional unit, `1500`, `64GB` (10**9) or `64GiB` (2**30)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower(), re.ASCII)
    if match is None:
        raise ValueError("expected bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB, TiB")
    size = float(match[1]) * _BYTE_UNITS[match[2] or ""]
    if not math.isfinite(size):
        raise ValueError("the size is too large")
    return int(size)


class EnvVar(Generic[T]):
    """One variable. The name is filled in by the class that holds it."""

    def __init__(self, parse: Callable[[str], T], default: T, doc: str) -> None:
        self._parse = parse
        self.default = default
        self.__doc__ = doc
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def get(self) -> T:
        """Return the parsed value, or the default when unset. Raises EnvValueError."""
        raw = os.environ.get(self.name)
        if raw is None:
            return self.default
        try:
            return self._parse(raw)
        except ValueError as error:
            raise EnvValueError(f"{self.name}={raw!r} is not valid: {error}") from error

    def is_set(self) -> bool:
        """Whether the environment has the variable, whatever its value."""
        return self.name in os.environ

    def set(self, value: T) -> None:
        """Write the value to this process's environment."""
        if isinstance(value, bool):
            os.environ[self.name] = "1" if value else "0"
        else:
            os.environ[self.name] = str(value)

    def clear(self) -> None:
        """Remove the variable, so that the default applies."""
        os.environ.pop(self.name, None)

    @contextmanager
    def override(self, value: T) -> Iterator[None]:
        """Set the value inside a `with` block and put the former state back."""
        before = os.environ.get(self.name)
        self.set(value)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(self.name, None)
            else:
                os.environ[self.name] = before


def _switch(default: bool, doc: str) -> EnvVar[bool]:
    return EnvVar(parse_bool, default, doc)


def _int(default: int, doc: str) -> EnvVar[int]:
    return EnvVar(int, default, doc)


def _float(default: float, doc: str) -> EnvVar[float]:
    return EnvVar(float, default, doc)


def _text(doc: str) -> EnvVar[str | None]:
    return EnvVar(str, None, doc)


def _bytes(doc: str) -> EnvVar[int | None]:
    return EnvVar(parse_bytes, None, doc)


class Envs:
    """The table. Read through the instance `envs`."""

    # Configuration
    SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN = _switch(
        False, "Accept a --context-length greater than the model's own."
    )
    SGLANG_ENABLE_DETERMINISTIC_INFERENCE = _switch(
        False, "Same effect as --enable-deterministic-inference."
    )
    SGLANG_ENABLE_OVERLAP_ON_CPU = _switch(
        False, "Use the overlapped scheduler loop on CPU too (tests; no gain there)."
    )

    SGLANG_SIMULATE_ACC_LEN = EnvVar[float | None](
        float,
        None,
        "Mean accept length of speculative steps, whatever the drafts: output is garbage, for "
        "measurements only.",
    )
    SGLANG_SPECULATIVE_MAX_VERIFY_TOKENS = _int(
        512,
        "Most tokens that a step with a draft model verifies; larger batches take one token of "
        "each request a step until they are smaller.",
    )

    SGLANG_TORCH_PROFILER_DIR = EnvVar(
        str, "/tmp", "Where /stop_profile writes traces when the request names no folder."
    )

    # Front
    SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION = _switch(
        True, "/health generates a token; false: it only looks at the server status."
    )
    SGLANG_HEALTH_CHECK_TIMEOUT = _float(
        20.0, "Seconds without any message from the engine after which /health is 503."
    )
    SGLANG_MAX_N = _int(1024, "Greatest accepted `n` of one request.")
    SGLANG_MAX_TOP_LOGPROBS = _int(
        2048, "Greatest accepted `top_logprobs_num`; the vocabulary's size if that is less."
    )
    SGLANG_MAX_BATCH_SIZE = _int(65536, "Greatest accepted number of prompts in one request.")
    SGLANG_CONTROL_TIMEOUT = _float(
        600.0,
        "Seconds that the front waits for a scheduler's reply to a control request; what was done "
        "counts also where the reply comes later.",
    )
    SGLANG_WEIGHT_GROUP_JOIN_TIMEOUT = _float(
        240.0,
        "Seconds within which a trainer's group must be complete; requests are served meanwhile.",
    )
    SGLANG_WEIGHT_RECEIVE_TIMEOUT = _float(
        240.0, "Seconds that a scheduler waits for the tensors of one weight update."
    )
    SGLANG_REQ_WAITING_TIMEOUT = _float(
        -1.0,
        "Seconds of waiting, pauses left out, after which a request without output ends with 503; "
        "< 0: off.",
    )
    SGLANG_REQ_RUNNING_TIMEOUT = _float(
        -1.0,
        "Seconds of running, pauses and waiting left out, after which a request is aborted with "
        "503; < 0: off.",
    )
    SGLANG_ENGINE_PAUSE_TIMEOUT = _float(
        -1.0, "Seconds after which a paused engine continues on its own; < 0: never."
    )

    # Storage of the hierarchical cache in files; each goes before the extra config's key
    SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR = _text(
        "Folder of the pages; else `file_storage_path`, else `hicache` in the temporary folder."
    )
    SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE = _bytes(
        "Most bytes of all pages in the folder (`64GB`, `60GiB`), whoever wrote them; 0: no limit. "
        "Else `max_size`, else 64 GB or a tenth of the room on the file system if that is less."
    )
    SGLANG_HICACHE_FILE_BACKEND_EVICTION_RATIO = EnvVar[float | None](
        float, None, "Share of the limit that eviction leaves; else `eviction_ratio`, else 0.9."
    )
    SGLANG_HICACHE_FILE_BACKEND_MIN_FREE_SPACE = _bytes(
        "Bytes of the file system left to others; else `min_free_space`, else 1 GiB or a "
        "twentieth of the file system if that is less."
    )

    # Storage of the hierarchical cache in shared stores; the extra config goes first
    SGLANG_HICACHE_MOONCAKE_CONFIG_PATH = _text(
        "JSON file with options of the Mooncake backend; it goes before the MOONCAKE_* variables."
    )
    SGLANG_HICACHE_REDIS_URL = _text("Address of the RESP server; else `redis://127.0.0.1:6379/0`.")

    # Processes
    SGLANG_STARTUP_TIMEOUT = _float(
        1800.0, "Seconds within which every child process must report that it is ready."
    )
    SGLANG_SHUTDOWN_TIMEOUT = _float(
        5.0,
        "Seconds that requests get to finish after SIGTERM before they are answered with an error; "
        "then that children get to leave on their own before they are killed.",
    )
    SGLANG_BLOCK_NONZERO_RANK_CHILDREN = _switch(
        True, "On nodes with rank > 0 the launcher stays until its scheduler processes end."
    )
    SGLANG_WAIT_PORT_TIMEOUT = _float(
        10.0, "Seconds to wait for a busy HTTP port to become free at start."
    )

    def all(self) -> list[EnvVar]:
        """Every variable of the table, in the order of declaration."""
        return [value for value in vars(type(self)).values() if isinstance(value, EnvVar)]


envs = Envs()
