"""A small HTTP/1.1 client for many streamed answers at once.

Owns: connecting, one request per connection, chunked decoding, splitting server-sent events. Does
not own: what the events mean (`backends`). A load generator must cost less than the server it
measures; a general HTTP client spends more on each event than all the rest here. One event loop.

Each request opens its own connection, so that leaving early is simply closing it; connecting is
part of the latency that the caller measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

_READ_BYTES = 1 << 16


class HttpError(Exception):
    """The server answered with a status other than 200, or not in HTTP."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server listens, and the headers that every request carries."""

    host: str
    port: int
    prefix: str
    tls: ssl.SSLContext | None
    headers: bytes

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Endpoint:
        """Read `http[s]://host[:port][/prefix]`. Raises ValueError for anything else."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not the address of a server: {url}")
        secure = parts.scheme == "https"
        lines = f"Host: {parts.netloc}\r\n"
        if api_key:
            lines += f"Authorization: Bearer {api_key}\r\n"
        return cls(
            parts.hostname,
            parts.port or (443 if secure else 80),
            parts.path.rstrip("/"),
            ssl.create_default_context() if secure else None,
            lines.encode(),
        )


async def fetch_json(
    endpoint: Endpoint, method: str, path: str, body: Mapping[str, Any] | None = None
) -> Any:
    """Send one request and return its decoded body, None for an empty one.

    Raises HttpError for a status other than 200 and OSError for a lost connection.
    """
    content = b"" if body is None else orjson.dumps(body)
    async with _exchange(endpoint, method, path, content) as parts:
        text = b"".join([part async for part in parts])
    return orjson.loads(text) if text.strip() else None


async def stream_events(endpoint: Endpoint, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
    """POST a JSON body and yield the `data:` payload of each event of the answer as it arrives.

    Closing the generator closes the connection at once. Raises as `fetch_json`.
    """
    async with _exchange(endpoint, "POST", path, body) as parts:
        rest = b""
        async for part in parts:
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()


@contextlib.asynccontextmanager
async def _exchange(
    endpoint: Endpoint, method: str, path: str, body: bytes
) -> AsyncIterator[AsyncIterator[bytes]]:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=endpoint.tls)
    try:
        writer.write(
            f"{method} {endpoint.prefix}{path} HTTP/1.1\r\n".encode()
            + endpoint.headers
            + b"Content-Type: application/json\r\nConnection: close\r\n"
            + b"Content-Length: %d\r\n\r\n" % len(body)
            + body
        )
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status, headers = _parse_head(head)
        parts = _body_parts(reader, headers)
        if status != 200:
            text = b"".join([part async for part in parts])
            raise HttpError(f"status {status}: {text[:300].decode(errors='replace')}")
        yield parts
    except asyncio.IncompleteReadError as exc:
        raise ConnectionResetError("the server closed the connection early") from exc
    finally:
        writer.transport.abort()


def _parse_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    first, *lines = head.split(b"\r\n")
    words = first.split(b" ", 2)
    if len(words) < 2 or not words[1].isdigit():
        raise HttpError(f"not an HTTP answer: {first[:80]!r}")
    pairs = (line.split(b":", 1) for line in lines if b":" in line)
    return int(words[1]), {name.strip().lower(): value.strip() for name, value in pairs}


async def _body_parts(
    reader: asyncio.StreamReader, headers: Mapping[bytes, bytes]
) -> AsyncIterator[bytes]:
    if headers.get(b"transfer-encoding", b"").lower() == b"chunked":
        while size := int((await reader.readuntil(b"\n")).split(b";", 1)[0], 16):
            part = await reader.readexactly(size + 2)
            yield part[:-2]
        return
    length = headers.get(b"content-length")
    if length is not None:
        yield await reader.readexactly(int(length))
        return
    while part := await reader.read(_READ_BYTES):
        yield part
