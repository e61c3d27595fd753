"""Typed environment variables: defaults, parsing, refusal, overriding."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from sglang.srt.environ import EnvValueError, envs, parse_bool, parse_bytes

ROOT = Path(__file__).resolve().parents[2]


def test_default_when_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HEALTH_CHECK_TIMEOUT", raising=False)
    assert envs.SGLANG_HEALTH_CHECK_TIMEOUT.get() == 20.0
    assert not envs.SGLANG_HEALTH_CHECK_TIMEOUT.is_set()


@pytest.mark.parametrize("text", ["1", "true", "True", "YES", "on"])
def test_true_words(text: str) -> None:
    assert parse_bool(text) is True


@pytest.mark.parametrize("text", ["0", "false", "No", "off", ""])
def test_false_words(text: str) -> None:
    assert parse_bool(text) is False


def test_a_bad_value_raises_and_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_ON_CPU", "maybe")
    with pytest.raises(EnvValueError, match="SGLANG_ENABLE_OVERLAP_ON_CPU='maybe'"):
        envs.SGLANG_ENABLE_OVERLAP_ON_CPU.get()
    monkeypatch.setenv("SGLANG_MAX_N", "many")
    with pytest.raises(EnvValueError, match="SGLANG_MAX_N"):
        envs.SGLANG_MAX_N.get()


def test_set_get_and_clear_reach_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MAX_N", raising=False)
    envs.SGLANG_MAX_N.set(3)
    assert os.environ["SGLANG_MAX_N"] == "3"
    assert envs.SGLANG_MAX_N.get() == 3
    envs.SGLANG_MAX_N.clear()
    assert envs.SGLANG_MAX_N.get() == 1024
    monkeypatch.setenv("SGLANG_ENABLE_OVERLAP_ON_CPU", "1")
    envs.SGLANG_ENABLE_OVERLAP_ON_CPU.set(False)
    assert os.environ["SGLANG_ENABLE_OVERLAP_ON_CPU"] == "0"


def test_override_restores_also_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MAX_N", "5")
    with pytest.raises(KeyError), envs.SGLANG_MAX_N.override(7):
        assert envs.SGLANG_MAX_N.get() == 7
        raise KeyError
    assert envs.SGLANG_MAX_N.get() == 5
    monkeypatch.delenv("SGLANG_MAX_N")
    with envs.SGLANG_MAX_N.override(7):
        pass
    assert "SGLANG_MAX_N" not in os.environ


def test_every_variable_is_documented_and_its_default_parses() -> None:
    for variable in envs.all():
        assert variable.name.startswith("SGLANG_")
        assert variable.__doc__


def test_no_other_module_reads_these_variables_itself() -> None:
    listing = subprocess.run(
        ["grep", "-rnE", r"(environ|getenv).*[\"']SGLANG_", str(ROOT / "python"), "--include=*.py"],
        capture_output=True,
        text=True,
    )
    offenders = [line for line in listing.stdout.splitlines() if "/srt/environ.py" not in line]
    # Test helpers may set variables for the servers that they start.
    assert [line for line in offenders if "/sglang/test/" not in line] == []


def test_every_variable_is_read_somewhere() -> None:
    text = "\n".join(
        path.read_text() for path in (ROOT / "python").rglob("*.py") if path.name != "environ.py"
    )
    assert [v.name for v in envs.all() if f"envs.{v.name}" not in text] == []


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1500", 1500),
        ("64GB", 64 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("2k", 2000),
        ("3MiB", 3 << 20),
        ("7b", 7),
        ("1TB", 10**12),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 XB", "1e3", "1,5GB"])
def test_what_is_no_size(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE", text)
    with pytest.raises(EnvValueError, match="SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"):
        envs.SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE.get()
