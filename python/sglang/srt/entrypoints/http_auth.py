"""Who may call what: the bearer keys of the server.

`--api-key` opens inference, `--admin-api-key` opens control. Without keys everything is open and
the middleware is not installed at all. Pure ASGI: it sees the scope only, never the body.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from enum import Enum
from typing import Any

import orjson

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Access(Enum):
    """What an endpoint demands."""

    NORMAL = "normal"  # the API key, if the server has one
    ADMIN_OPTIONAL = "admin_optional"  # the admin key if there is one, else the API key
    ADMIN_FORCE = "admin_force"  # the admin key; refused on servers without one


# Prefixes that stay open so that probes and scrapers need no key.
_OPEN_PREFIXES = ("/health", "/ready", "/metrics")


def decide(
    access: Access, token: str | None, api_key: str | None, admin_api_key: str | None
) -> int:
    """200 to let the request through, else 401 or 403."""
    if access is Access.ADMIN_FORCE and admin_api_key is None:
        return 403
    if access is Access.NORMAL:
        wanted = api_key
    else:
        wanted = admin_api_key if admin_api_key is not None else api_key
    if wanted is None:
        return 200
    if token is not None and secrets.compare_digest(token.encode(), wanted.encode()):
        return 200
    return 401


def bearer_token(scope: Scope) -> str | None:
    """The token of `Authorization: Bearer <token>`; the scheme's case does not matter."""
    for name, value in scope.get("headers", ()):
        if name.lower() == b"authorization":
            scheme, _, token = value.decode("latin-1").partition(" ")
            return token.strip() if scheme.lower() == "bearer" else None
    return None


class AuthMiddleware:
    """Refuses requests without the right key before they reach a handler."""

    def __init__(
        self,
        app: App,
        *,
        access_of: Callable[[str, str], Access],
        api_key: str | None,
        admin_api_key: str | None,
    ) -> None:
        """`access_of(method, path)` tells what an endpoint demands."""
        self._app = app
        self._access_of = access_of
        self._api_key = api_key
        self._admin_api_key = admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        access = self._access_of(scope["method"], scope["path"])
        status = decide(access, bearer_token(scope), self._api_key, self._admin_api_key)
        if status == 200:
            await self._app(scope, receive, send)
            return
        await _refuse(send, status)

    @staticmethod
    def _is_open(scope: Scope) -> bool:
        return scope["method"] == "OPTIONS" or scope["path"].startswith(_OPEN_PREFIXES)


async def _refuse(send: Send, status: int) -> None:
    body = orjson.dumps({"error": "Unauthorized" if status == 401 else "Forbidden"})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
