"""The table of keys: who may call what."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang.srt.entrypoints.http_auth import Access, bearer_token, decide
from sglang.srt.entrypoints.http_server import _access_of
from sglang.test.fakes.http_front import serve_fake

NORMAL, OPTIONAL, FORCE = Access.NORMAL, Access.ADMIN_OPTIONAL, Access.ADMIN_FORCE


@pytest.mark.parametrize(
    ("access", "api", "admin", "wants"),
    [
        (NORMAL, None, None, None),
        (NORMAL, "a", None, "a"),
        (NORMAL, None, "b", None),
        (NORMAL, "a", "b", "a"),
        (OPTIONAL, None, None, None),
        (OPTIONAL, "a", None, "a"),
        (OPTIONAL, None, "b", "b"),
        (OPTIONAL, "a", "b", "b"),
        (FORCE, None, "b", "b"),
        (FORCE, "a", "b", "b"),
    ],
)
def test_decide(access: Access, api: str | None, admin: str | None, wants: str | None) -> None:
    for token in (None, "a", "b", "zz", "ä"):
        expected = 200 if wants is None or token == wants else 401
        assert decide(access, token, api, admin) == expected


def test_forced_admin_without_an_admin_key() -> None:
    assert decide(FORCE, "a", None, None) == decide(FORCE, "a", "a", None) == 403


@pytest.mark.parametrize(
    ("header", "token"),
    [
        (b"Bearer k", "k"),
        (b"bearer  k ", "k"),
        (b"BEARER k", "k"),
        (b"Basic k", None),
        (b"Bearer", ""),
        (b"", None),
    ],
)
def test_bearer_token(header: bytes, token: str | None) -> None:
    assert bearer_token({"headers": [(b"Authorization", header)]}) == token


def test_classes_of_paths() -> None:
    control = ["/flush_cache", "/pause_generation", "/update_weights_from_disk", "/flush_cache/"]
    assert all(_access_of("POST", path) is OPTIONAL for path in control)
    normal = ["/generate", "/v1/chat/completions", "/model_info", "/ping", "/", "/v1/loads"]
    assert all(_access_of("GET", path) is NORMAL for path in normal)


def test_over_http(tmp_path: Path) -> None:
    with serve_fake(tmp_path, api_key="user", admin_api_key="root") as http:

        def code(method: str, path: str, key: str | None) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return http.request(method, path, headers=headers).status_code

        assert [code("GET", "/model_info", k) for k in (None, "root", "user")] == [401, 401, 200]
        assert [code("POST", "/flush_cache", k) for k in (None, "user", "root")] == [401, 401, 200]
        assert code("GET", "/health", None) == code("GET", "/ready", None) == 200
        assert code("OPTIONS", "/generate", None) != 401
        refused = http.post("/generate", json={"text": "a"})
        assert refused.json() == {"error": "Unauthorized"}
        assert http.get("/model_info").headers["www-authenticate"] == "Bearer"
        # Keys never show up in what the server tells about itself.
        info = http.get("/server_info", headers={"Authorization": "Bearer user"})
        assert info.json()["api_key"] == "***" and "root" not in info.json()["admin_api_key"]


def test_passwords_in_urls_of_the_storage_are_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = '{"url": "rediss://me:pa@ss:w@store:6379/1", "ttl": 5}'
    flag = "--hicache-storage-backend-extra-config"
    monkeypatch.setattr(sys, "orig_argv", ["python", flag, config, f"{flag}={config}"])
    with serve_fake(tmp_path, hicache_storage_backend_extra_config=config) as http:
        info = http.get("/server_info")
    shown = '{"url": "rediss://***@store:6379/1", "ttl": 5}'
    assert info.json()["hicache_storage_backend_extra_config"] == shown
    assert "ss:w" not in info.text and info.json()["launch_command"].count("***@store") == 2
