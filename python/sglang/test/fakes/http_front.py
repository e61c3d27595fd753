"""The real HTTP application on a real socket, with a fake scheduler behind it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests
import uvicorn

from sglang.srt.entrypoints.http_server import (
    _GlobalState,
    configure_app,
    create_app,
    set_global_state,
)
from sglang.srt.entrypoints.openai.template_manager import TemplateManager
from sglang.srt.utils.network import get_free_port
from sglang.test.fakes.fake_scheduler import FakeScheduler
from sglang.test.fakes.front import Front, make_front


@dataclass
class HttpFront:
    """A running server."""

    front: Front
    url: str

    @property
    def scheduler(self) -> FakeScheduler:
        return self.front.scheduler

    def request(self, method: str, path: str, **kwargs: Any) -> requests.Response:
        return requests.request(method, self.url + path, timeout=30, **kwargs)

    def get(self, path: str, **kwargs: Any) -> requests.Response:
        return self.request("GET", path, **kwargs)

    def post(self, path: str, **kwargs: Any) -> requests.Response:
        return self.request("POST", path, **kwargs)


@contextmanager
def serve_fake(folder: Path, **args: Any) -> Iterator[HttpFront]:
    """Serve a tiny model; `args` go to ServerArgs. One server a process at a time."""
    with make_front(folder, **args) as front:
        manager = front.manager
        app = create_app()
        configure_app(app, manager.server_args)
        templates = TemplateManager(manager.tokenizer, manager.server_args.chat_template)
        set_global_state(
            _GlobalState(
                tokenizer_manager=manager,
                template_manager=templates,
                scheduler_info=manager.scheduler_infos[0],
            )
        )
        port = get_free_port()
        config = uvicorn.Config(
            app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning"
        )
        config.timeout_graceful_shutdown = 1
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield HttpFront(front, f"http://127.0.0.1:{port}")
        finally:
            server.should_exit = True
            thread.join()
