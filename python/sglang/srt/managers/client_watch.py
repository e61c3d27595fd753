"""Whether the client of a request is still there, asked of its connection now and then.

Used by the tokenizer manager while it waits for the engine, on the event loop's thread.
"""

from __future__ import annotations

import time
from typing import Protocol

from sglang.srt.managers.request_errors import RequestError

# How often a waiting handler looks whether its client is still there, seconds.
DISCONNECT_POLL_S = 1.0


class ClientConnection(Protocol):
    """The part of an HTTP request object that is used here."""

    async def is_disconnected(self) -> bool: ...


class ClientWatch:
    """Looks, at most once a period, whether the client of a request is still there."""

    def __init__(self, connection: ClientConnection | None) -> None:
        """`connection` None: the caller is in this process, and there as long as it waits."""
        self._connection = connection
        self._next_look = time.monotonic() + DISCONNECT_POLL_S

    async def check(self) -> None:
        """Raise RequestError when the client is gone."""
        if self._connection is None or time.monotonic() < self._next_look:
            return
        if await self._connection.is_disconnected():
            raise RequestError("The client disconnected.", status_code=499)
        self._next_look = time.monotonic() + DISCONNECT_POLL_S
