"""Give replicas new weights one after the other, while the others serve.

    python examples/rolling_update.py --router http://127.0.0.1:30000 \
        --model-path <new checkpoint> --version 2

Each replica in turn: pause (running requests keep their tokens and give their KV back), read the
new checkpoint, continue, and be seen serving the new version. Requests that the router sends to a
paused replica wait and are answered; none fails. KV never crosses over: the content of the weights
is part of every cached page's name, in each replica and in the storage that they share.

A replica that refuses keeps its old weights (an update is all or nothing) and goes on serving; the
rest is left alone, and the error says who has which version. Run it again to finish, or with the
old checkpoint to go back. `--url` names replicas where there is no router.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import requests

_READY_POLL_S = 0.1


class UpdateFailed(RuntimeError):
    """A replica refused or could not be reached. `updated` have the new weights already."""

    def __init__(self, url: str, reason: str, updated: Sequence[str]) -> None:
        super().__init__(
            f"{url} was not updated: {reason}; already updated: {', '.join(updated) or 'none'}"
        )
        self.url = url
        self.updated = list(updated)


@dataclass(frozen=True)
class Step:
    """One replica that is through. Seconds: how long it was paused."""

    url: str
    version: str
    paused_s: float


class ReplicaClient:
    """Control calls to one replica; the router does not pass them on."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s

    def post(self, path: str, body: dict[str, Any]) -> None:
        """Raises RuntimeError for a refusal, `requests` exceptions for a lost connection."""
        reply = requests.post(
            self.url + path, json=body, headers=self._headers, timeout=self._timeout_s
        )
        if reply.status_code != 200:
            raise RuntimeError(f"{path}: {reply.status_code} {reply.text[:300]}")

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, headers=self._headers, timeout=self._timeout_s)

    def version(self) -> str:
        return str(self.get("/model_info").json()["weight_version"])

    def wait_ready(self) -> None:
        """Wait until a request would be served at once. Raises TimeoutError."""
        deadline = time.monotonic() + self._timeout_s
        while self.get("/ready").status_code != 200:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready after {self._timeout_s:g} s")
            time.sleep(_READY_POLL_S)


def from_disk(model_path: str, version: str) -> Callable[[ReplicaClient], None]:
    """An update that reads a checkpoint which every replica can open under the same path."""

    def update(replica: ReplicaClient) -> None:
        body = {"model_path": model_path, "weight_version": version}
        replica.post("/update_weights_from_disk", body)

    return update


def replica_urls(router: str, api_key: str | None = None) -> list[str]:
    """The addresses of the replicas that a router knows, in a fixed order."""
    reply = ReplicaClient(router, api_key).get("/workers")
    reply.raise_for_status()
    return sorted(worker["url"] for worker in reply.json()["workers"])


def rolling_update(
    urls: Sequence[str],
    update: Callable[[ReplicaClient], None],
    version: str,
    *,
    mode: str = "retract",
    api_key: str | None = None,
    timeout_s: float = 600.0,
    on_step: Callable[[Step], None] = lambda step: None,
) -> list[Step]:
    """Update replica after replica. Raises UpdateFailed at the first that does not come through.

    `update` gives one paused replica its weights: `from_disk`, or a function that sends tensors.
    """
    done: list[Step] = []
    for url in urls:
        replica = ReplicaClient(url, api_key, timeout_s)
        try:
            paused_s = _update_one(replica, update, mode)
            found = replica.version()
        except (RuntimeError, TimeoutError, requests.exceptions.RequestException) as exc:
            raise UpdateFailed(url, str(exc), [step.url for step in done]) from exc
        if found != version:
            raise UpdateFailed(url, f"it serves version {found}", [step.url for step in done])
        done.append(Step(url, found, paused_s))
        on_step(done[-1])
    return done


def _update_one(
    replica: ReplicaClient, update: Callable[[ReplicaClient], None], mode: str
) -> float:
    """Pause, update, continue, also after a failure; returns the seconds of the pause."""
    begin = time.perf_counter()
    replica.post("/pause_generation", {"mode": mode})
    try:
        update(replica)
    finally:
        replica.post("/continue_generation", {})
    paused_s = time.perf_counter() - begin
    replica.wait_ready()
    return paused_s


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router", help="address of the router that knows the replicas")
    parser.add_argument("--url", action="append", default=[], help="a replica; may be repeated")
    parser.add_argument("--model-path", required=True, help="checkpoint, as replicas see it")
    parser.add_argument("--version", required=True, help="label of the new weights")
    parser.add_argument("--mode", choices=("retract", "in_place", "abort"), default="retract")
    parser.add_argument("--api-key")
    args = parser.parse_args()
    try:
        urls = args.url or (replica_urls(args.router, args.api_key) if args.router else [])
    except (requests.exceptions.RequestException, KeyError, ValueError) as exc:
        sys.exit(f"error: the router at {args.router} does not say who its replicas are: {exc}")
    if not urls:
        parser.error("give --router or --url" if not args.router else "the router has no replicas")
    try:
        rolling_update(
            urls,
            from_disk(args.model_path, args.version),
            args.version,
            mode=args.mode,
            api_key=args.api_key,
            on_step=lambda step: print(
                f"{step.url}: version {step.version}, {step.paused_s:.2f} s", flush=True
            ),
        )
    except UpdateFailed as exc:
        sys.exit(f"error: {exc}")


if __name__ == "__main__":
    main()
