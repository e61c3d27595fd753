"""How fast a busy server stands still, and how fast it goes on.

A batch decodes; one of its requests streams. `/pause_generation` in mode `in_place`: time until its
answer, which comes when the last step is done, and until the last token that still arrives.
`/continue_generation`: time until the next token is at the client. In units of a step as the same
stream shows it while nothing is paused. One thread reads the stream, one waits for the others.
"""

from __future__ import annotations

import bisect
import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import requests

_READ_BYTES = 1 << 16
_TIMEOUT_S = 60
_HOLD_S = 0.04  # paused; tokens that are still under way have arrived by then
_POLL_S = 0.0002


class TokenStream(threading.Thread):
    """One streamed request; `moments` are the times at which pieces of its answer came."""

    def __init__(self, url: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        super().__init__(daemon=True, name="token-stream")
        self._url = urlsplit(url)
        self._body = json.dumps(_request(prompt, max_new_tokens) | {"stream": True})
        self.moments: list[float] = []
        self.error: str | None = None

    def run(self) -> None:
        """Read until the answer ends."""
        connection = http.client.HTTPConnection(self._url.netloc, timeout=_TIMEOUT_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", "/generate", self._body, headers)
            reply = connection.getresponse()
            if reply.status != 200:
                self.error = f"{reply.status} {reply.read()!r}"
                return
            while reply.read1(_READ_BYTES):
                self.moments.append(time.perf_counter())
        except (OSError, http.client.HTTPException) as error:
            self.error = str(error)
        finally:
            connection.close()

    def next_after(self, moment: float) -> float:
        """When the first piece after `moment` came. Raises RuntimeError where none comes."""
        deadline = time.perf_counter() + _TIMEOUT_S
        while not self.moments or self.moments[-1] <= moment:
            if not self.is_alive() or time.perf_counter() > deadline:
                raise RuntimeError(f"the stream ended or stands still: {self.error}")
            time.sleep(_POLL_S)
        return self.moments[bisect.bisect_right(self.moments, moment)]


def _request(prompt: Sequence[int] | list[list[int]], max_new_tokens: int) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "ignore_eos": True,
        },
    }


class Load:
    """A batch that decodes until it is left: one stream, the others without."""

    def __init__(self, url: str, prompts: list[list[int]], max_new_tokens: int) -> None:
        self._url = url
        self.stream = TokenStream(url, prompts[0], max_new_tokens)
        others = _request(prompts[1:], max_new_tokens)
        self._others = threading.Thread(
            target=lambda: requests.post(url + "/generate", json=others, timeout=600), daemon=True
        )

    def __enter__(self) -> Load:
        self._others.start()
        self.stream.start()
        return self

    def __exit__(self, *error: object) -> None:
        requests.post(self._url + "/continue_generation", json={}, timeout=_TIMEOUT_S)
        requests.post(self._url + "/abort_request", json={"abort_all": True}, timeout=_TIMEOUT_S)
        self.stream.join(_TIMEOUT_S)
        self._others.join(_TIMEOUT_S)

    def step_s(self, seconds: float) -> float:
        """Median time between tokens of the stream over the next `seconds`."""
        start = time.perf_counter()
        time.sleep(seconds)
        seen = [m for m in self.stream.moments if m >= start]
        if len(seen) < 4:
            raise RuntimeError(f"{len(seen)} tokens in {seconds} s: {self.stream.error}")
        return statistics.median(b - a for a, b in zip(seen, seen[1:]))


def measure(
    url: str,
    *,
    num_requests: int,
    input_len: int,
    max_new_tokens: int,
    vocab_size: int,
    cycles: int,
    window_s: float = 1.0,
) -> dict[str, float]:
    """Times of `cycles` pauses and continues under load, in ms and in steps."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(3, vocab_size) for _ in range(input_len)] for _ in range(num_requests)
    ]
    pauses, lates, continues, steps = [], [], [], []
    with Load(url, prompts, max_new_tokens) as load, requests.Session() as session:
        load.stream.next_after(0.0)
        time.sleep(window_s)  # until the whole batch decodes
        steps.append(load.step_s(window_s))
        for _ in range(cycles):
            time.sleep(rng.uniform(0.01, 0.03))
            start = time.perf_counter()
            _must(session, url + "/pause_generation", {"mode": "in_place"})
            paused = time.perf_counter()
            time.sleep(_HOLD_S)
            last = load.stream.moments[-1]
            start_again = time.perf_counter()
            _must(session, url + "/continue_generation", {})
            continues.append(load.stream.next_after(start_again) - start_again)
            pauses.append(paused - start)
            lates.append(max(0.0, last - paused))
        steps.append(load.step_s(window_s))
    step = statistics.median(steps)
    return {
        "cycles": float(cycles),
        "step_ms": step * 1e3,
        **_summary("pause", pauses, step),
        **_summary("late_token", lates, step),
        **_summary("continue", continues, step),
        "pause_over_one_step_ms": (statistics.median(pauses) - step) * 1e3,
    }


def _must(session: requests.Session, url: str, body: dict[str, Any]) -> None:
    reply = session.post(url, json=body, timeout=_TIMEOUT_S)
    if reply.status_code != 200:
        raise RuntimeError(f"{url}: {reply.status_code} {reply.text}")


def _summary(name: str, seconds: list[float], step: float) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        f"{name}_ms": statistics.median(ordered) * 1e3,
        f"{name}_p90_ms": ordered[int(0.9 * (len(ordered) - 1))] * 1e3,
        f"{name}_worst_ms": ordered[-1] * 1e3,
        f"{name}_steps": statistics.median(ordered) / step,
    }
