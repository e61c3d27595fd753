"""Multi-turn load for replicas behind a router: who asks, what came back, from which tier.

Owns: conversations that grow turn by turn, clients in threads that ask them, the record of every
request. Does not own: servers (`sglang.test.replicas`), what is done to them meanwhile. All token
ids, greedy, so that the same prompt must get the same answer from whichever replica and tier.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests

TIERS = ("device", "host", "storage")
_TOKENS = range(3, 200)  # of a tiny model: its bytes, none of which ends an answer
_MAX_RESENDS = 3


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Lengths in tokens. Conversation i begins with head i modulo `num_heads`."""

    num_conversations: int = 40
    num_heads: int = 8
    turns: int = 5
    head_len: int = 160
    ask_len: int = 24
    answer_len: int = 16


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What came back for one request, or why nothing did."""

    start_s: float
    seconds: float
    prompt_tokens: int = 0
    cached: Counter[str] = field(default_factory=Counter)  # by tier
    weight_versions: tuple[str, ...] = ()  # of its tokens, in their order
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    resends: int = 0  # streams that broke off after they had begun, which no router can repair
    error: str = ""


class Conversation:
    """One conversation; turn n asks for what turns 0 to n-1 have said and a new question."""

    def __init__(self, shape: Shape, number: int, seed: int) -> None:
        head = random.Random(f"{seed} head {number % shape.num_heads}")
        asks = random.Random(f"{seed} asks {number}")
        self._history = [head.choice(_TOKENS) for _ in range(shape.head_len)]
        self._asks = [
            [asks.choice(_TOKENS) for _ in range(shape.ask_len)] for _ in range(shape.turns)
        ]

    def ask(self, turn: int) -> list[int]:
        self._history += self._asks[turn]
        return list(self._history)

    def hear(self, output: Sequence[int]) -> None:
        self._history += output


class Client:
    """Sends requests to one address. Safe from several threads."""

    def __init__(self, url: str, answer_len: int, timeout_s: float = 60.0) -> None:
        self._url = url + "/generate"
        self._timeout_s = timeout_s
        self._sampling = {"temperature": 0, "max_new_tokens": answer_len, "ignore_eos": True}

    def send(self, prompt: Sequence[int], stream: bool = False) -> Turn:
        """One request. A stream that breaks off is sent again, at most three times."""
        body = {"input_ids": list(prompt), "sampling_params": self._sampling, "stream": stream}
        start = time.time()
        begin = time.perf_counter()
        answer: dict[str, Any] = {}
        error, resends = "", -1
        while resends < _MAX_RESENDS:
            resends += 1
            try:
                answer, error = self._stream(body) if stream else self._whole(body)
                break
            except requests.exceptions.RequestException as exc:
                error = f"{type(exc).__name__}: {exc}"
                if not stream:
                    break
        seconds = time.perf_counter() - begin
        if error:
            return Turn(start_s=start, seconds=seconds, error=error, resends=resends)
        meta = answer["meta_info"]
        details = meta["cached_tokens_details"] or {}
        return Turn(
            start_s=start,
            seconds=seconds,
            prompt_tokens=meta["prompt_tokens"],
            cached=Counter({tier: details.get(tier, 0) for tier in TIERS}),
            weight_versions=tuple(span["version"] for span in meta["weight_versions"]),
            prompt=tuple(prompt),
            output=tuple(answer["output_ids"]),
            resends=resends,
        )

    def _whole(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        reply = requests.post(self._url, json=body, timeout=self._timeout_s)
        if reply.status_code != 200:
            return {}, f"status {reply.status_code}: {reply.text[:200]}"
        return reply.json(), ""

    def _stream(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """The last event. Raises RequestException where the stream ends before `[DONE]`."""
        last: dict[str, Any] = {}
        with requests.post(self._url, json=body, stream=True, timeout=self._timeout_s) as reply:
            if reply.status_code != 200:
                return {}, f"status {reply.status_code}: {reply.text[:200]}"
            for line in reply.iter_lines():
                data = line.removeprefix(b"data: ")
                if data == b"[DONE]":
                    return last, ""
                if line.startswith(b"data: "):
                    last = json.loads(data)
                    if "error" in last:
                        raise requests.exceptions.ChunkedEncodingError(str(last["error"])[:200])
        raise requests.exceptions.ChunkedEncodingError("the stream ended before its end")


def run_rounds(client: Client, shape: Shape, seed: int, num_clients: int) -> list[Turn]:
    """All first turns, then all second turns ...: every conversation stays alive all the time."""
    talks = [Conversation(shape, number, seed) for number in range(shape.num_conversations)]
    done: list[Turn] = []
    with ThreadPoolExecutor(num_clients) as pool:
        for number in range(shape.turns):
            turns = list(pool.map(client.send, [talk.ask(number) for talk in talks]))
            for talk, turn in zip(talks, turns, strict=True):
                talk.hear(turn.output)
            done += turns
    return done


class SteadyLoad:
    """Clients that hold conversations until told to stop, each at most one request at a time.

    The same conversations come back again and again. Every `stream_every`-th request is a stream
    (0: none). `pause_s` lies between the requests of a client. A context manager: its end stops
    the clients also where something failed.
    """

    def __init__(
        self,
        client: Client,
        shape: Shape,
        *,
        num_clients: int,
        pause_s: float,
        seed: int = 0,
        stream_every: int = 4,
    ) -> None:
        self.turns: list[Turn] = []
        self._client = client
        self._shape = shape
        self._pause_s = pause_s
        self._seed = seed
        self._stream_every = stream_every
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(num_clients)
        self._running = [self._pool.submit(self._talk, number) for number in range(num_clients)]

    def __enter__(self) -> SteadyLoad:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def stop(self) -> list[Turn]:
        """End after the requests that are under way; raises what a client raised."""
        self._stop.set()
        for running in self._running:
            running.result()
        return self.turns

    def _talk(self, number: int) -> None:
        rng = random.Random(f"{self._seed} client {number}")
        for count, (talk, turn) in enumerate(self._endless(rng)):
            is_stream = self._stream_every > 0 and count % self._stream_every == 0
            result = self._client.send(talk.ask(turn), is_stream)
            talk.hear(result.output)
            self.turns.append(result)
            if self._stop.wait(self._pause_s):
                return

    def _endless(self, rng: random.Random) -> Iterator[tuple[Conversation, int]]:
        while True:
            number = rng.randrange(self._shape.num_conversations)
            talk = Conversation(self._shape, number, self._seed)
            for turn in range(self._shape.turns):
                yield talk, turn


def contradictions(turns: Sequence[Turn]) -> int:
    """Prompts that got different answers under the same weights."""
    answers: dict[Any, set[tuple[int, ...]]] = defaultdict(set)
    for turn in turns:
        # Where the weights changed within an answer, what it says depends on when they did.
        if not turn.error and len(turn.weight_versions) == 1:
            answers[turn.weight_versions, turn.prompt].add(turn.output)
    return sum(len(outputs) > 1 for outputs in answers.values())


@dataclass(frozen=True)
class Shares:
    """Where the prompts of a run came from, as shares of all prompt tokens."""

    prompt_tokens: int
    by_tier: dict[str, float]

    @property
    def cached(self) -> float:
        return sum(self.by_tier.values())


def shares(turns: Sequence[Turn]) -> Shares:
    """Sum up a run; failed requests are left out."""
    total = sum(turn.prompt_tokens for turn in turns)
    counts = sum((turn.cached for turn in turns), Counter[str]())
    return Shares(total, {tier: counts[tier] / max(1, total) for tier in TIERS})
