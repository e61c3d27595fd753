"""Counters of the HTTP layer: requests, answers by status, requests in progress.

A plain ASGI middleware (no body is touched, so streams pass through). The endpoint label is the
path of a declared route; every other path counts as "other", so that scanners cannot create
time series without limit.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from sglang.srt.observability.metric_factory import MetricFactory

if TYPE_CHECKING:
    from fastapi import FastAPI

OTHER_ENDPOINT = "other"
_METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class HttpMetricsMiddleware:
    """Wraps an ASGI application. Event loop thread only."""

    def __init__(self, app: Any, endpoints: Collection[str]) -> None:
        self._app = app
        self._endpoints = frozenset(endpoints)
        make = MetricFactory({})
        self._requests = make.counter("http_requests", "HTTP requests.", "endpoint", "method")
        self._responses = make.counter(
            "http_responses", "HTTP answers.", "endpoint", "status_code", "method"
        )
        self._active = make.gauge("http_requests_active", "HTTP requests in progress.")
        self._num_active = 0

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        endpoint = path if path in self._endpoints else OTHER_ENDPOINT
        method = method if method in _METHODS else OTHER_ENDPOINT
        # An application that fails before its first byte answers 500 further outside.
        status = 500

        async def send_and_note(message: dict[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._requests.labels(endpoint=endpoint, method=method).inc()
        self._change_active(1)
        try:
            await self._app(scope, receive, send_and_note)
        finally:
            self._change_active(-1)
            self._responses.labels(endpoint=endpoint, status_code=str(status), method=method).inc()

    def _change_active(self, step: int) -> None:
        self._num_active += step
        self._active.set(self._num_active)


def add_http_metrics(app: FastAPI) -> None:
    """Install the middleware; call after all routes are declared and before the server starts."""
    endpoints = {path for route in app.routes if (path := getattr(route, "path", ""))}
    app.add_middleware(HttpMetricsMiddleware, endpoints=endpoints)
