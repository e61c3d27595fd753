"""The published OpenAPI schema drives a fuzzer against a real server: no request may break it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.small_server import SmallServer, serve

register_cpu_ci(est_time=120, suite="basic")

# Leaving the server paused, slow or profiled is what these are for; they have tests of their own.
NOT_FUZZED = (
    "/pause_generation",
    "/slow_down",
    "/start_profile",
    "/stop_profile",
    "/freeze_gc",
    "/configure_logging",
    "/health",
    "/health_generate",
)


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[SmallServer]:
    flags = ("--max-running-requests", 16, "--context-length", 128, "--max-queued-requests", 500)
    with serve(str(small_model), *flags) as running:
        before = running.children()
        yield running
        assert running.children() == before
        running.post("/abort_request", json={"abort_all": True})
        answer = running.generate(
            text="The capital of France is", sampling_params={"temperature": 0, "max_new_tokens": 4}
        )
        assert "Paris" in answer["text"]


@pytest.fixture(scope="module")
def api_schema(server: SmallServer) -> schemathesis.BaseSchema:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    return schema.exclude(path=list(NOT_FUZZED))


schema = schemathesis.pytest.from_fixture("api_schema")


@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_a_server_error(case: schemathesis.Case) -> None:
    """4xx is fine, 5xx and a broken connection are not."""
    response = case.call(timeout=60)
    not_a_server_error(None, response, case)  # type: ignore[arg-type]
    assert response.status_code != 422
    if response.status_code >= 400:
        assert response.content
