"""The HTTP server: the application object, its start and its end.

`app` serves the routes of the `http_routes_*` modules; handlers find the engine through
`http_state`. `launch_server` starts the children, builds the engine client, and serves until
SIGTERM or SIGINT. Code that embeds the server (trainers) sets the global state itself and runs
`app` under its own uvicorn.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import signal
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from sglang.srt.entrypoints import (
    http_routes_absent,
    http_routes_control,
    http_routes_hicache,
    http_routes_native,
    http_routes_openai,
    http_routes_weights,
)
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.front import make_front
from sglang.srt.entrypoints.http_auth import Access, AuthMiddleware
from sglang.srt.entrypoints.http_errors import http_exception, validation_error
from sglang.srt.entrypoints.http_memory import LargeBodyMiddleware
from sglang.srt.entrypoints.http_routes_native import health_generate
from sglang.srt.entrypoints.http_state import (
    _GlobalState,
    get_global_state,
    get_manager,
    set_global_state,
)
from sglang.srt.entrypoints.launch import (
    LaunchError,
    Launching,
    launch_subprocesses,
)
from sglang.srt.environ import envs
from sglang.srt.managers.tokenizer_manager import SHUTTING_DOWN, ServerStatus, TokenizerManager
from sglang.srt.observability.http_metrics import add_http_metrics
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.common import (
    add_prometheus_middleware,
    kill_process_tree,
)
from sglang.version import __version__

__all__ = [
    "Engine",
    "ServerArgs",
    "ServerStatus",
    "_GlobalState",
    "_launch_subprocesses",
    "app",
    "get_global_state",
    "health_generate",
    "launch_server",
    "set_global_state",
]

logger = logging.getLogger(__name__)

# Where programs that embed a server have looked for it.
_launch_subprocesses = Engine._launch_subprocesses

_WARMUP_PROMPT = "Hi"
_WARMUP_TOKENS = 8
_WARMUP_POLLS = 120
_WARMUP_TIMEOUT_S = 600.0
_KEEP_ALIVE_S = 60
_ERROR_BYTES = 4000
# What clients get to read the error with which the end of the server answers them.
_LAST_WORDS_S = 2
_SIGNAL_POLL_S = 0.1


# ------------------------------------------------------------------------------------------------
# The application
# ------------------------------------------------------------------------------------------------


_CONTROL_ROUTERS = (
    http_routes_control.router,
    http_routes_hicache.router,
    http_routes_weights.router,
    http_routes_absent.control_router,
)
_ROUTERS = (
    http_routes_native.router,
    http_routes_openai.router,
    http_routes_absent.router,
    *_CONTROL_ROUTERS,
)
_ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "The request cannot be served."},
    "5XX": {"description": "The server cannot serve now."},
}


def _control_paths() -> frozenset[str]:
    routes = [route for router in _CONTROL_ROUTERS for route in router.routes]
    return frozenset(route.path for route in routes if isinstance(route, APIRoute))


_CONTROL_PATHS = _control_paths()


def _access_of(method: str, path: str) -> Access:
    """What an endpoint demands of its caller."""
    return Access.ADMIN_OPTIONAL if path.rstrip("/") in _CONTROL_PATHS else Access.NORMAL


@asynccontextmanager
async def _lifespan(application: FastAPI) -> AsyncIterator[None]:
    """Follow the engine's messages on this loop and bring the server up."""
    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    kwargs = getattr(application, "warmup_thread_kwargs", None)
    if kwargs is not None:
        if manager.server_args.skip_server_warmup:
            manager.server_status = ServerStatus.Up
            _announce()
        else:
            thread = threading.Thread(target=_wait_and_warmup, kwargs=kwargs, daemon=True)
            thread.start()
    yield


def _on_validation_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    texts = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors()]
    return validation_error("; ".join(texts))


def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    response = http_exception(str(exc.detail), exc.status_code)
    for name, value in (exc.headers or {}).items():
        response.headers[name] = value
    return response


def _on_failure(request: Request, exc: Exception) -> Response:
    # Starlette logs the traceback itself when it raises the exception again.
    return http_exception("Internal server error.", 500)


def create_app() -> FastAPI:
    """The application with all routes; middleware that depends on settings comes later."""
    application = FastAPI(title="HiSpec", version=__version__, lifespan=_lifespan)
    application.add_middleware(LargeBodyMiddleware)
    application.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_credentials=True,
        allow_methods=["*"],
        allow_headers=["*"],
    )
    application.add_exception_handler(RequestValidationError, _on_validation_error)
    application.add_exception_handler(HTTPException, _on_http_exception)
    application.add_exception_handler(Exception, _on_failure)
    for router in _ROUTERS:
        _add_routes(application, router)
    return application


def _add_routes(application: FastAPI, router: APIRouter) -> None:
    """Put a router's routes on the application itself, one a method.

    Not `include_router`: embedding code looks routes up in `app.routes` by path, and operation ids
    of the published schema must differ between the methods of a path.
    """
    for route in router.routes:
        assert isinstance(route, APIRoute)
        for method in sorted(route.methods or ()):
            application.add_api_route(
                route.path,
                route.endpoint,
                methods=[method],
                response_class=route.response_class,
                deprecated=route.deprecated,
                include_in_schema=route.include_in_schema,
                openapi_extra=route.openapi_extra,
                responses=_ERROR_RESPONSES,
            )


app = create_app()


def configure_app(application: FastAPI, server_args: ServerArgs) -> None:
    """Add the middleware that the settings ask for. Before the application serves."""
    if server_args.enable_metrics:
        add_prometheus_middleware(application, lambda: get_manager().show_held())
        add_http_metrics(application)
    if server_args.api_key is not None or server_args.admin_api_key is not None:
        application.add_middleware(
            AuthMiddleware,
            access_of=_access_of,
            api_key=server_args.api_key,
            admin_api_key=server_args.admin_api_key,
        )


# ------------------------------------------------------------------------------------------------
# Warm-up
# ------------------------------------------------------------------------------------------------


def _announce() -> None:
    logger.info("The server is fired up and ready to roll!")


def _http_json(server_args: ServerArgs, path: str, body: Any | None, timeout_s: float) -> None:
    """One request to ourselves. Raises OSError (URLError included) on any failure."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if server_args.api_key is not None:
        headers["Authorization"] = f"Bearer {server_args.api_key}"
    request = urllib.request.Request(_own_url(server_args) + path, data=data, headers=headers)
    # Our own certificate need not be valid for the loopback address.
    context = ssl._create_unverified_context() if server_args.ssl_certfile else None
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    with opener.open(request, timeout=timeout_s) as reply:
        reply.read()


def _own_url(server_args: ServerArgs) -> str:
    """The base URL by which this process reaches itself."""
    url = server_args.url()
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _warmup_body(server_args: ServerArgs) -> dict[str, Any]:
    """A few tokens for every replica: no more than the smallest configuration can hold."""
    manager = get_global_state().tokenizer_manager
    info = manager.scheduler_infos[0]
    room = min(info.context_len, info.max_total_num_tokens)
    # Ids, so that the length is known here; encoding them makes the tokenizer ready, too.
    ids = manager.tokenizer.encode(_WARMUP_PROMPT) if manager.tokenizer is not None else []
    ids = (ids or [0])[: max(1, info.max_req_input_len)]
    new_tokens = max(1, min(_WARMUP_TOKENS, room - len(ids)))
    return {
        "input_ids": [ids] * server_args.dp_size if server_args.dp_size > 1 else ids,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": new_tokens,
            "min_new_tokens": 0,  # whatever is preferred
        },
        "no_logs": True,
        "log_metrics": False,
    }


def _execute_server_warmup(server_args: ServerArgs) -> bool:
    """Wait until we answer, generate once; whether that worked."""
    for _ in range(_WARMUP_POLLS):
        try:
            _http_json(server_args, "/model_info", None, 5.0)
            break
        except OSError:
            time.sleep(0.2 if _ < 50 else 1.0)
    try:
        _http_json(server_args, "/generate", _warmup_body(server_args), _WARMUP_TIMEOUT_S)
    except urllib.error.HTTPError as exc:
        logger.error("The warm-up request failed: %s", _error_text(exc))
        return False
    except OSError as exc:
        logger.error("The warm-up request failed: %s", exc)
        return False
    return True


def _error_text(error: urllib.error.HTTPError) -> str:
    """The sentence in our own error answer."""
    body = error.read(_ERROR_BYTES).decode("utf-8", "replace")
    try:
        answer = json.loads(body)
        return str(answer.get("message") or answer["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{error} {body}".strip()


def _wait_and_warmup(
    server_args: ServerArgs,
    launch_callback: Callable[[], None] | None = None,
    execute_warmup_func: Callable[[ServerArgs], bool] = _execute_server_warmup,
) -> None:
    """Body of the warm-up thread. A server that cannot generate ends."""
    manager = get_global_state().tokenizer_manager
    if not execute_warmup_func(server_args):
        if manager.gracefully_exit:
            return
        if _server is not None:
            _server.stop_as_failed()
            return
        # The application runs under somebody else's server, which knows nothing of this.
        logger.critical("The server does not work and is stopped")
        kill_process_tree(os.getpid())
        return
    manager.server_status = ServerStatus.Up
    _announce()
    if launch_callback is not None:
        launch_callback()


# ------------------------------------------------------------------------------------------------
# Serving
# ------------------------------------------------------------------------------------------------


class _WithoutCancelled(logging.Filter):
    """Drops the trace of each request that the end of the server cuts off.

    uvicorn says how many it cancels, and then logs a fault of the application for each of them.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log; see `logging.Filter`."""
        kind = record.exc_info[0] if isinstance(record.exc_info, tuple) else None
        return kind is None or not issubclass(kind, asyncio.CancelledError)


class _Server(uvicorn.Server):
    """uvicorn that stops gracefully with exit code 0 and tells the engine client first."""

    def __init__(self, config: uvicorn.Config, manager: TokenizerManager) -> None:
        super().__init__(config)
        self._manager = manager
        self.has_failed = False
        self._is_hurried = False

    def stop_as_failed(self) -> None:
        """From the warm-up thread: leave, and let the launcher report a failure."""
        self.has_failed = True
        self._manager.gracefully_exit = True
        self.should_exit = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        # uvicorn would leave without a word to anybody at a second SIGINT.
        self._is_hurried = self.should_exit
        self._manager.gracefully_exit = True
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does, but whoever has no answer at the end of the time gets an error."""
        drain = asyncio.create_task(self._end_drain())
        try:
            await super().shutdown(sockets)
        finally:
            drain.cancel()
        if self.force_exit:
            # uvicorn leaves it out then, and the application reports that it was cancelled.
            await self.lifespan.shutdown()

    async def _end_drain(self) -> None:
        """Fail what is left when the time to finish is over, or at once by a second signal."""
        end = time.monotonic() + envs.SGLANG_SHUTDOWN_TIMEOUT.get()
        # Looked at from time to time, as uvicorn does: signals do not wake the loop.
        while (left := end - time.monotonic()) > 0 and not self._is_hurried:
            await asyncio.sleep(min(left, _SIGNAL_POLL_S))
        if self._is_hurried:
            logger.warning("A second signal: what still runs is answered with an error now")
        self._manager.mark_dead(SHUTTING_DOWN)
        if self._is_hurried:
            await asyncio.sleep(_LAST_WORDS_S)
            self.force_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Without raising the signals again at the end: leaving is not a failure."""
        signals = (signal.SIGINT, signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_WITHOUT_CANCELLED = _WithoutCancelled()
# The one that runs in this process now; None where other code runs the application.
_server: _Server | None = None


def _setup_and_run_http_server(server_args: ServerArgs, state: _GlobalState) -> None:
    """Serve `app` for this state until a signal comes. Raises LaunchError without a warm-up."""
    set_global_state(state)
    manager = state.tokenizer_manager
    configure_app(app, server_args)
    app.warmup_thread_kwargs = {"server_args": server_args}  # type: ignore[attr-defined]
    config = uvicorn.Config(
        app,
        host=server_args.host,
        port=server_args.port,
        log_level=server_args.log_level_http or server_args.log_level,
        log_config=None,
        access_log=(server_args.log_level_http or server_args.log_level) in ("debug", "info"),
        loop="uvloop",
        http="httptools",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=math.ceil(envs.SGLANG_SHUTDOWN_TIMEOUT.get() + _LAST_WORDS_S),
        ssl_keyfile=server_args.ssl_keyfile,
        ssl_certfile=server_args.ssl_certfile,
        ssl_ca_certs=server_args.ssl_ca_certs,
        ssl_keyfile_password=server_args.ssl_keyfile_password,
    )
    logging.getLogger("uvicorn.error").addFilter(_WITHOUT_CANCELLED)
    global _server
    _server = server = _Server(config, manager)
    try:
        server.run()
    finally:
        _server = None
    if server.has_failed:
        raise LaunchError("its warm-up request failed (see above)")


def launch_server(server_args: ServerArgs, *, launching: Launching | None = None) -> None:
    """Start a server and serve until SIGTERM or SIGINT; then stop its children.

    `launching`: children that were started already. Raises LaunchError when one does not come up.
    """
    started = time.time()
    launched = launch_subprocesses(server_args, launching=launching)
    try:
        if server_args.node_rank != 0:
            launched.wait_children()
            return
        manager, templates = make_front(server_args, launched)
        state = _GlobalState(
            tokenizer_manager=manager,
            template_manager=templates,
            scheduler_info=launched.scheduler_infos[0],
            start_seconds=time.time() - started,
        )
        _setup_and_run_http_server(server_args, state)
    finally:
        launched.shutdown()
