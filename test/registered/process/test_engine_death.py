"""A killed scheduler: waiting clients get an answer, health says so, the process tree ends."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.small_server import serve

register_cpu_ci(est_time=20, suite="basic")

ENDLESS = {"max_new_tokens": 400, "ignore_eos": True}


def test_waiting_clients_hear_of_the_schedulers_death(tmp_path: Path) -> None:
    make_tiny_checkpoint(tmp_path, "llama")
    with serve(str(tmp_path)) as server, ThreadPoolExecutor(8) as pool:
        server.post("/slow_down", json={"forward_sleep_time": 0.05})
        calls: list[tuple[str, dict[str, Any]]] = [
            ("/generate", {"text": "hi", "sampling_params": ENDLESS}),
            ("/v1/completions", {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}),
        ]
        futures = [pool.submit(server.post, path, json=body) for path, body in calls]
        stream_body = {"text": "hi", "sampling_params": ENDLESS, "stream": True}
        streamed = server.post("/generate", json=stream_body, stream=True)
        events = (line.decode() for line in streamed.iter_lines() if line)
        next(events)  # its answer has begun
        while server.num_requests() < len(calls) + 1:
            time.sleep(0.02)
        # The child with the most memory is the scheduler: it alone loads torch.
        children = psutil.Process(server.pid).children(recursive=True)
        max(children, key=lambda child: child.memory_info().rss).kill()
        died = time.monotonic()
        probe = pool.submit(server.get, "/health", timeout=5)
        whole, completion = (future.result() for future in futures)
        assert whole.status_code == 503 and "killed" in whole.json()["message"]
        *_, last, done = events
        assert done == "data: [DONE]"
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == 503
        assert completion.status_code == 503 and completion.json()["code"] == 503
        assert probe.result().status_code == 503
        assert time.monotonic() - died < 5
        psutil.Process(server.pid).wait(10)
        with pytest.raises(requests.exceptions.ConnectionError):
            server.get("/health", timeout=2)
