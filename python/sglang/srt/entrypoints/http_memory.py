"""Middleware that counts the bytes of request bodies and has memory given back after large ones."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.utils.memory_return import MemoryReturner

LARGE_BODY_BYTES = 1 << 20


class LargeBodyMiddleware:
    """Asks `MemoryReturner` once the answer to a request with a large body has been sent."""

    def __init__(self, app: ASGIApp, returner: MemoryReturner | None = None) -> None:
        self._app = app
        self._returner = returner or MemoryReturner()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = 0

        async def count() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body") or b"")
            return message

        try:
            await self._app(scope, count, send)
        finally:
            if num_bytes > LARGE_BODY_BYTES:
                self._returner.request()
