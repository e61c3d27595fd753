"""The published OpenAPI schema drives a fuzzer against a real server: no request may break it.

Requests that fit the schema and requests that break it, 15 each an operation; a failing one is
shown as a curl command.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.environ import envs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.small_server import SmallServer, serve

register_cpu_ci(est_time=120, suite="basic")

# Leaving the server paused, slow or profiled is what these are for; they have tests of their own.
NOT_FUZZED = frozenset(
    {
        "/pause_generation",
        "/slow_down",
        "/start_profile",
        "/stop_profile",
        "/freeze_gc",
        "/configure_logging",
        "/health",
        "/health_generate",
    }
)
EXAMPLES = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


def _operations() -> list[Any]:
    schema = schemathesis.openapi.from_dict(create_app().openapi())
    results: list[Any] = list(schema.get_all_operations())
    found = [result.ok() for result in results]
    return [operation for operation in found if operation.path not in NOT_FUZZED]


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[SmallServer]:
    flags = ("--max-running-requests", 16, "--context-length", 128, "--max-queued-requests", 500)
    with envs.SGLANG_MAX_N.override(4), serve(str(small_model), *flags) as running:
        before = running.children()
        yield running
        assert running.children() == before
        running.post("/abort_request", json={"abort_all": True})
        answer = running.generate(
            text="The capital of France is", sampling_params={"temperature": 0, "max_new_tokens": 4}
        )
        assert "Paris" in answer["text"]


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("operation", _operations(), ids=lambda operation: operation.label)
def test_no_request_is_a_server_error(
    server: SmallServer, operation: Any, mode: GenerationMode
) -> None:
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
        pytest.skip("nothing to get wrong: the operation takes no input")

    @EXAMPLES
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        response = case.call(base_url=server.url, timeout=60)
        shown = case.as_curl_command()
        assert response.status_code < 500, f"{response.text}\n{shown}"
        assert response.status_code != 422, shown
        # Flush refusals and the like are text; every error says something.
        assert response.status_code < 400 or response.content, shown

    run()
