"""Helpers without knowledge of the server. Only documented import names are re-exported.

Nothing here loads torch: the names that need it are loaded when they are asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

from sglang.srt.utils.common import (
    add_prometheus_middleware,
    assert_pkg_version,
    get_device,
    get_exception_traceback,
    is_cuda,
    is_hip,
    is_npu,
    kill_process_tree,
    set_prometheus_multiproc_dir,
    set_ulimit,
)
from sglang.srt.utils.logging import configure_logger, suppress_noisy_warnings
from sglang.srt.utils.network import (
    NetworkAddress,
    get_free_port,
    get_open_port,
    is_port_available,
)

__all__ = [
    "NetworkAddress",
    "add_prometheus_middleware",
    "assert_pkg_version",
    "configure_logger",
    "get_device",
    "get_exception_traceback",
    "get_free_port",
    "get_open_port",
    "is_cuda",
    "is_hip",
    "is_npu",
    "is_port_available",
    "kill_process_tree",
    "set_prometheus_multiproc_dir",
    "set_ulimit",
    "suppress_noisy_warnings",
]

_NEED_TORCH = {
    "MultiprocessingSerializer": "sglang.srt.utils.serialization",
    "init_custom_process_group": "sglang.srt.utils.process_group",
}


def __getattr__(name: str) -> Any:
    module = _NEED_TORCH.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)
