"""The package. `sglang.Engine` and `sglang.ServerArgs` are loaded at first use.

Child processes import this package too, so it must stay empty of weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.version import __version__

if TYPE_CHECKING:
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

__all__ = ["Engine", "ServerArgs", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Engine":
        from sglang.srt.entrypoints.engine import Engine

        return Engine
    if name == "ServerArgs":
        from sglang.srt.server_args import ServerArgs

        return ServerArgs
    raise AttributeError(f"module 'sglang' has no attribute {name!r}")
