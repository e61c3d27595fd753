"""Storage attached to, looked at, cleared and detached from a running server over HTTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.tiny_models import make_tiny_checkpoint
from sglang.test.small_server import SmallServer, metric, serve

register_cpu_ci(est_time=20, suite="hicache")

ADMIN = {"Authorization": "Bearer admin-secret"}
PATH = "/hicache/storage-backend"
PAGE = 16
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


def prompt(number: int, length: int = 200) -> list[int]:
    return [3 + (number * 31 + 7 * i + i * i // 7) % 190 for i in range(length)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SmallServer]:
    model = make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048)
    with serve(
        str(model),
        *("--max-total-tokens", 2048, "--page-size", PAGE, "--enable-metrics"),
        *("--enable-hierarchical-cache", "--hicache-ratio", 2),
        *("--admin-api-key", "admin-secret"),
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def detached(server: SmallServer) -> Iterator[None]:
    """Each test begins and ends without storage and with empty caches."""
    yield
    wait_until(lambda: call(server, "DELETE").status_code == 200)
    assert server.post("/flush_cache?timeout=30", headers=ADMIN).status_code == 200


def wait_until(condition: Any, timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def call(server: SmallServer, method: str, **body: Any) -> Any:
    return server.request(method, PATH, headers=ADMIN, **({"json": body} if body else {}))


def attach(server: SmallServer, folder: Path) -> Any:
    """Policies are kept over a detachment, hence named each time."""
    return call(
        server,
        "PUT",
        **attachment(folder),
        hicache_storage_prefetch_policy="wait_complete",
        hicache_write_policy="write_through",
    )


def attachment(folder: Path) -> dict[str, str]:
    config = json.dumps({"file_storage_path": str(folder), "prefetch_threshold": PAGE})
    return {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config_json": config,
    }


def status(server: SmallServer) -> dict[str, Any]:
    reply = call(server, "GET")
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def ask(server: SmallServer, number: int, **fields: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.generate(
        input_ids=prompt(number), sampling_params=GREEDY, **fields
    )
    return answer


def flush(server: SmallServer) -> None:
    reply = server.post("/flush_cache?timeout=30", headers=ADMIN)
    assert reply.status_code == 200, reply.text


def test_the_documented_sequence(server: SmallServer, tmp_path: Path) -> None:
    assert server.get(PATH).status_code == 401
    assert server.request("PUT", PATH, json=attachment(tmp_path)).status_code == 401
    assert server.request("DELETE", PATH).status_code == 401
    assert status(server)["hicache_storage_backend"] is None

    given = attachment(tmp_path)
    policies = {
        "hicache_storage_prefetch_policy": "timeout",
        "hicache_write_policy": "write_back",
    }
    reply = call(server, "PUT", **given, **policies)
    assert (reply.status_code, reply.text) == (200, "HiCache storage backend attached.\n")
    assert status(server) == {
        "hicache_storage_backend": "file",
        "hicache_storage_backend_extra_config": given["hicache_storage_backend_extra_config_json"],
        **policies,
    }

    others = {
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_write_policy": "write_through",
    }
    assert call(server, "PUT", **given, **others).status_code == 200
    assert status(server).items() >= others.items()
    state = server.get("/server_info", headers=ADMIN).json()["internal_states"][0]
    assert state.items() >= others.items() and state["hicache_storage_backend"] == "file"

    reply = call(server, "PUT", hicache_storage_backend="dynamic")
    assert reply.status_code == 400
    assert reply.text.startswith("Failed to attach HiCache storage backend.\n")
    assert "detach" in reply.text

    for _ in range(2):
        reply = call(server, "DELETE")
        assert (reply.status_code, reply.text) == (200, "HiCache storage backend detached.\n")
    after = status(server)
    assert after["hicache_storage_backend"] is None
    assert after.items() >= others.items()
    assert call(server, "PUT", **given, **policies).status_code == 200


def test_a_body_is_read_to_the_letter(server: SmallServer, tmp_path: Path) -> None:
    given = attachment(tmp_path)
    config = given["hicache_storage_backend_extra_config_json"]
    refused: list[tuple[dict[str, str], str]] = [
        ({"write_policy": "write_back", "backend": "file"}, "backend, write_policy"),
        ({"hicache_storage_backend_extra_config": "{}"}, "two names of one thing"),
    ]
    for fields, reason in refused:
        reply = call(server, "PUT", **given, **fields)
        assert reply.status_code == 400 and reason in reply.text
        assert status(server)["hicache_storage_backend"] is None
    name = "hicache_storage_backend_extra_config"  # as the status and the flag say
    own = {"hicache_storage_backend": "file", "hicache_write_policy": "write_through", name: config}
    assert call(server, "PUT", **own).status_code == 200
    assert status(server).items() >= own.items()
    elsewhere = attachment(tmp_path / "elsewhere")
    reply = call(server, "PUT", **elsewhere, hicache_write_policy="write_back")
    assert reply.status_code == 400 and "detach" in reply.text
    assert status(server).items() >= own.items()
    only_policies = {"hicache_storage_backend": "file", "hicache_write_policy": "write_back"}
    assert call(server, "PUT", **only_policies).status_code == 200
    assert status(server).items() >= {name: config, **only_policies}.items()


def test_damaged_pages_show_in_the_metrics(server: SmallServer, tmp_path: Path) -> None:
    assert attach(server, tmp_path).status_code == 200
    first = ask(server, 15)
    flush(server)
    pages = sorted(tmp_path.glob("*.bin"))
    for path in pages:
        path.write_bytes(path.read_bytes()[:-1])
    before = metric(server, "sglang:hicache_damaged_pages_total")
    again = ask(server, 15)
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["cached_tokens"] == 0
    after = metric(server, "sglang:hicache_damaged_pages_total")
    assert before < after <= before + len(pages)


def test_what_was_cached_before_reaches_storage(server: SmallServer, tmp_path: Path) -> None:
    first = ask(server, 1)
    assert first["meta_info"]["cached_tokens_details"] is None
    warm = ask(server, 1)
    assert warm["meta_info"]["cached_tokens_details"] == {"device": 192, "host": 0}
    assert attach(server, tmp_path).status_code == 200
    ask(server, 1)  # hit again, written now
    flush(server)
    before = metric(server, "sglang:cached_tokens_total", cache_source="storage")
    again = ask(server, 1)
    assert again["output_ids"] == first["output_ids"]
    assert again["meta_info"]["cached_tokens_details"] == {
        "device": 0,
        "host": 0,
        "storage": 192,
        "storage_backend": "HiCacheFile",
    }
    assert metric(server, "sglang:cached_tokens_total", cache_source="storage") == before + 192
    flush(server)
    assert call(server, "DELETE").status_code == 200
    assert ask(server, 1)["meta_info"]["cached_tokens"] == 0  # nobody looks there any more


def test_refused_under_load_and_nothing_lost(server: SmallServer, tmp_path: Path) -> None:
    assert attach(server, tmp_path).status_code == 200
    answers: list[dict[str, Any]] = []
    long = {**GREEDY, "max_new_tokens": 800}
    runner = threading.Thread(
        target=lambda: answers.append(server.generate(input_ids=prompt(2), sampling_params=long))
    )
    runner.start()
    wait_until(
        lambda: server.get("/v1/loads", headers=ADMIN).json()["loads"][0]["num_running_reqs"]
    )
    for method, fields in (("PUT", attachment(tmp_path)), ("DELETE", {})):
        reply = call(server, method, **fields)
        assert reply.status_code == 400
        assert "#queue-req" in reply.text and "#running-req" in reply.text
    assert status(server)["hicache_storage_backend"] == "file"
    runner.join()
    assert len(answers[0]["output_ids"]) == 800
    assert call(server, "DELETE").status_code == 200


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"hicache_storage_backend": "nonsense"}, "nonsense"),
        ({"hicache_storage_backend": "dynamic"}, "backend_name"),
        ({"hicache_storage_backend_extra_config_json": "{"}, "not valid"),
        ({"hicache_storage_backend_extra_config_json": '{"no_such_option": 1}'}, "no_such_option"),
        ({"hicache_storage_backend_extra_config_json": '{"prefetch_threshold": "x"}'}, "integer"),
        (
            {"hicache_storage_backend_extra_config_json": '{"file_storage_path": "/dev/null/x"}'},
            "folder",
        ),
        ({"hicache_write_policy": "sometimes"}, "sometimes"),
        ({"hicache_storage_prefetch_policy": "never"}, "never"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_attached_changes_nothing(
    server: SmallServer, tmp_path: Path, fields: dict[str, str], reason: str
) -> None:
    before = status(server)
    policies = {
        "hicache_storage_prefetch_policy": "best_effort",
        "hicache_write_policy": "write_through_selective",
    }
    reply = call(server, "PUT", **{**attachment(tmp_path), **policies, **fields})
    assert reply.status_code == 400
    assert reason in reply.text
    assert status(server) == before
    assert ask(server, 1)["meta_info"]["cached_tokens"] == 0


def test_clear_deletes_ours_and_says_when_it_cannot(server: SmallServer, tmp_path: Path) -> None:
    for path in ("/hicache/storage-backend/clear", "/clear_hicache_storage_backend"):
        reply = server.post(path, headers=ADMIN)
        assert reply.status_code == 400  # there is no storage
    assert attach(server, tmp_path).status_code == 200
    ask(server, 3)
    flush(server)
    foreign = tmp_path / "someone-elses.bin"
    foreign.write_bytes(b"not a page of ours")
    assert len(list(tmp_path.glob("*.bin"))) > 1
    reply = server.post("/hicache/storage-backend/clear", headers=ADMIN)
    assert (reply.status_code, reply.text) == (
        200,
        "Hierarchical cache storage backend cleared.\n",
    )
    assert list(tmp_path.glob("*.bin")) == [foreign]


def test_one_request_and_silence_is_enough(server: SmallServer, tmp_path: Path) -> None:
    """Backups reach storage while nothing else happens."""
    assert attach(server, tmp_path).status_code == 200
    before = metric(server, "sglang:backuped_tokens_total")
    ask(server, 4)
    time.sleep(1)
    assert len(list(tmp_path.glob("*.bin"))) == 200 // PAGE
    assert metric(server, "sglang:backuped_tokens_total") == before + 192
    assert metric(server, "sglang:hicache_host_used_tokens") == 192


def test_an_immediate_flush_empties_the_caches_and_loses_nothing(
    server: SmallServer, tmp_path: Path
) -> None:
    assert attach(server, tmp_path).status_code == 200
    for number in range(5, 10):
        first = ask(server, number)
        assert server.post("/flush_cache", headers=ADMIN).status_code == 200
        again = ask(server, number)
        assert again["output_ids"] == first["output_ids"]
        details = again["meta_info"]["cached_tokens_details"] or {}
        assert not details.get("device") and not details.get("host")
        flush(server)
        assert ask(server, number)["meta_info"]["cached_tokens_details"]["storage"] == 192


def test_two_waiting_flushes_one_is_refused(server: SmallServer, tmp_path: Path) -> None:
    assert attach(server, tmp_path).status_code == 200
    runner = threading.Thread(
        target=server.generate,
        kwargs={
            "input_ids": prompt(11),
            "sampling_params": {**GREEDY, "max_new_tokens": 1000},
        },
    )
    runner.start()
    wait_until(
        lambda: server.get("/v1/loads", headers=ADMIN).json()["loads"][0]["num_running_reqs"]
    )
    codes: list[int] = []

    def flush_later() -> None:
        codes.append(server.post("/flush_cache?timeout=20", headers=ADMIN).status_code)

    flushes = [threading.Thread(target=flush_later) for _ in range(2)]
    for waiting in flushes:
        waiting.start()
    for waiting in flushes:
        waiting.join()
    runner.join()
    assert sorted(codes) == [200, 400]


def test_salts_keep_apart(server: SmallServer, tmp_path: Path) -> None:
    assert attach(server, tmp_path).status_code == 200
    for field in ("extra_key", "cache_salt"):
        first = ask(server, 12, **{field: f"{field} one"})
        flush(server)
        assert ask(server, 12, **{field: f"{field} two"})["meta_info"]["cached_tokens"] == 0
        flush(server)
        again = ask(server, 12, **{field: f"{field} one"})
        assert again["meta_info"]["cached_tokens_details"]["storage"] == 192
        assert again["output_ids"] == first["output_ids"]


def test_details_in_the_other_dialect(server: SmallServer, tmp_path: Path) -> None:
    assert attach(server, tmp_path).status_code == 200
    ask(server, 13)
    flush(server)
    body = {
        "prompt": prompt(13),
        "max_tokens": 4,
        "temperature": 0,
        "return_cached_tokens_details": True,
    }
    reply = server.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["sglext"]["cached_tokens_details"] == {
        "device": 0,
        "host": 0,
        "storage": 192,
        "storage_backend": "HiCacheFile",
    }
