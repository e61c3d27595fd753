"""One HTTP server with a fake scheduler for all tests of this folder that change nothing in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang.test.fakes.http_front import HttpFront, serve_fake


@pytest.fixture(scope="session")
def http_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpFront]:
    with serve_fake(tmp_path_factory.mktemp("model"), served_model_name="tiny/one") as http:
        yield http


@pytest.fixture
def http(http_session: HttpFront) -> Iterator[HttpFront]:
    """The shared server, its fake back to normal after each test."""
    yield http_session
    scheduler = http_session.scheduler
    scheduler.script, scheduler.refuse, scheduler.step_s = None, None, 0.0
    scheduler.silent, scheduler.flush_ok = False, True
    http_session.post("/continue_generation")
    scheduler.received.clear()
