"""Server-sent events, and the one place where handlers' errors become answers.

A stream's first item is awaited before the answer begins, so that a bad request still gets its
status; what fails later becomes an event, followed by `[DONE]`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, cast

import orjson
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Send

from sglang.srt.entrypoints.http_body import BodyError
from sglang.srt.entrypoints.http_errors import validation_error
from sglang.srt.managers.request_errors import RequestError

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
RenderError = Callable[[RequestError], Response]
RenderEvent = Callable[[RequestError], dict[str, Any]]

_DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """One event as it goes over the wire."""
    return b"data: " + orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


class EventStreamResponse(StreamingResponse):
    """Closes its source at the end, whatever the end is: that is what aborts the request."""

    async def stream_response(self, send: Send) -> None:
        async with aclosing(cast("AsyncGenerator[bytes, None]", self.body_iterator)):
            await super().stream_response(send)


async def start_stream(
    source: AsyncIterator[dict[str, Any]], render_event: RenderEvent
) -> Response:
    """Begin the answer with the source's first item. Raises what the source raises before it."""
    generator = cast("AsyncGenerator[dict[str, Any], None]", source)
    first = await anext(generator, None)
    return EventStreamResponse(
        _events(first, generator, render_event), media_type="text/event-stream"
    )


async def _events(
    first: dict[str, Any] | None,
    source: AsyncGenerator[dict[str, Any], None],
    render_event: RenderEvent,
) -> AsyncGenerator[bytes, None]:
    async with aclosing(source):
        try:
            if first is not None:
                yield event(first)
            async for item in source:
                yield event(item)
        except RequestError as exc:
            yield event(render_event(exc))
        except Exception:
            logger.exception("A stream failed")
            failure = RequestError("Internal server error.", status_code=500)
            yield event(render_event(failure))
        yield _DONE


def answers_errors(
    render: RenderError, render_body_error: Callable[[str], Response] = validation_error
) -> Callable[[Handler], Handler]:
    """Decorator of handlers: `RequestError` and `BodyError` become answers."""

    def decorate(handler: Handler) -> Handler:
        @functools.wraps(handler)
        async def run(*args: Any, **kwargs: Any) -> Response:
            try:
                return await handler(*args, **kwargs)
            except BodyError as exc:
                return render_body_error(str(exc))
            except RequestError as exc:
                return render(exc)
            except ClientDisconnect:
                # Nobody reads this; the status is for the access log.
                return Response(status_code=499)

        return cast("Handler", run)

    return decorate
