"""`scripts/serve_replicas.sh`: what it says of bad arguments, who lives and who dies with whom.

Router and servers are stand-ins behind an interpreter that is put in their place: they answer on
their ports and note how they were called.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="replicas")

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "serve_replicas.sh"

STAND_IN = """
import http.server, json, os, sys

words = sys.argv[1:]
port = int(words[words.index("--port") + 1])
with open(os.path.join(os.environ["HISPEC_NOTES"], str(port)), "w") as notes:
    json.dump({"words": words, "environment": dict(os.environ)}, notes)


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"healthy_workers": 2}')

    def log_message(self, *arguments):
        pass


http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""
MODEL = {
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64},
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "max_position_embeddings": 512, "torch_dtype": "float32"},
}
INTERPRETER = """#!/usr/bin/env bash
case "$*" in
  "-m smg launch"* | "-m sglang.cli serve"*) exec {python} {stand_in} "$@" ;;
  "-m pip install"*) echo "a test must install nothing" >&2; exit 1 ;; # {python} is not its own
  *) exec {python} "$@" ;;
esac
"""


def run(
    *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environment)


def test_help() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Serve a model by N replicas")
    assert "STORAGE" in done.stdout and "#" not in done.stdout


@pytest.mark.parametrize("arguments", [(), ("0",), ("two",), ("-1",)])
def test_the_number_of_replicas(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "serve_replicas.sh N" in done.stderr


@pytest.mark.parametrize(
    ("flag", "reason"),
    [("--port", "set those instead"), ("--host=::", "HOST and PORT"), ("--api-key", "API_KEY")],
)
def test_flags_that_the_script_sets_itself(flag: str, reason: str) -> None:
    done = run("2", flag, "1")
    assert done.returncode == 1
    assert reason in done.stderr


@dataclass
class Service:
    """A run of the script with stand-ins."""

    script: subprocess.Popen[str]
    folder: Path
    port: int

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text()

    def wait_for_words(self, words: str) -> None:
        wait_until(lambda: words in self.said, lambda: f"{words!r} is not in: {self.said}")

    def notes(self, number: int) -> dict[str, Any]:
        """How the router (0) or a replica was called last."""
        path = self.folder / str(self.port + number)
        wait_until(lambda: answers(self.port + number), lambda: f"{number} does not answer")
        return dict(json.loads(path.read_text()))

    def kill_replica(self, number: int) -> None:
        os.kill(int((self.folder / f"replica-{number}.pid").read_text()), signal.SIGKILL)


def wait_until(is_so: Callable[[], bool], why: Callable[[], str], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that are free."""
    for port in range(20000 + os.getpid() % 5000, 32000, count):
        if not any(answers(port + offset) for offset in range(count)):
            return port
    raise AssertionError("no ports are free")


def make_environment(folder: Path) -> dict[str, str]:
    """Variables for which the script finds everything installed, with stand-ins."""
    stand_in = folder / "stand_in.py"
    stand_in.write_text(STAND_IN)
    interpreter = folder / "venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.write_text(INTERPRETER.format(python=sys.executable, stand_in=stand_in))
    interpreter.chmod(0o755)
    for extra in ("gguf", "router"):
        stamp = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
        stamp.update(f"Python {platform.python_version()}\n{ROOT} {extra}\n".encode())
        (folder / "venv" / f".hispec-stamp-{extra}").write_text(stamp.hexdigest())
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "HISPEC_VENV": str(folder / "venv"),
        "HISPEC_NOTES": str(folder),
        "LOG_DIR": str(folder),
        "STORAGE": "redis",
        "STORAGE_CONFIG": '{"prefetch_threshold": 16}',
        "SGLANG_HICACHE_REDIS_URL": 'redis://:it\'s a "secret"@nowhere:1/0',
        "API_KEY": "sk-1 $HOME",
    }


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    port = free_ports(4)
    environment = {**make_environment(tmp_path), "PORT": str(port), "METRICS_PORT": str(port + 3)}
    model = tmp_path / "models" / "a model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    with (tmp_path / "said").open("w") as said:
        script = subprocess.Popen(
            ["bash", str(SCRIPT), "2", "--model-path", str(model), "--device", "cpu"],
            env=environment,
            stderr=said,
            text=True,
            start_new_session=True,
        )
    try:
        running = Service(script, tmp_path, port)
        running.wait_for_words("all replicas serve")
        yield running
    finally:
        script.terminate()
        script.wait(20)
        for path in tmp_path.glob("replica-*.pid"):
            try:
                os.kill(int(path.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass


def test_a_replica_started_again_is_one_of_the_service(service: Service) -> None:
    first = service.notes(1)
    service.kill_replica(1)
    service.wait_for_words("replica 1 has ended with code 137")
    assert "Killed" not in service.said
    line = re.search(r"replica 1 .* started, and again, by (.*)", service.said)
    assert line is not None
    # In another terminal, from another folder, with nothing of this environment.
    bare = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "python")}
    again = subprocess.Popen(["bash", "-c", f"exec {line[1]}"], env=bare, cwd="/")
    try:
        wait_until(lambda: answers(service.port + 1), lambda: "the replica did not come back")
        second = service.notes(1)
        assert second["words"] == first["words"]
        assert "sk-1 $HOME" in first["words"] and '{"prefetch_threshold": 16}' in first["words"]
        for name in ("SGLANG_HICACHE_REDIS_URL", "HISPEC_VENV", "HISPEC_NOTES"):
            assert second["environment"][name] == first["environment"][name]
        service.kill_replica(2)
        service.wait_for_words("replica 2 has ended")
        time.sleep(2.5)
        assert service.script.poll() is None, service.said
    finally:
        again.kill()
        again.wait()
    assert service.script.wait(20) == 1
    assert "no replica is left" in service.said
    assert not answers(service.port)


def test_replicas_share_a_name_and_the_memory(service: Service) -> None:
    first, second = (service.notes(number)["words"] for number in (1, 2))
    for words in (first, second):
        assert words[words.index("--served-model-name") + 1] == "a model"
        assert int(words[words.index("--max-total-tokens") + 1]) > 0
    assert "each replica gets --served-model-name a model" in service.said


def test_the_start_of_a_replica_is_for_its_owner_alone(service: Service) -> None:
    assert (service.folder / "replica-1.sh").stat().st_mode & 0o777 == 0o700
    assert "sk-1" not in service.said and "secret" not in service.said


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel has to tell of the death")
def test_a_killed_script_leaves_nobody(service: Service) -> None:
    service.script.kill()
    wait_until(
        lambda: not any(answers(service.port + i) for i in range(3)), lambda: "somebody is left"
    )


@pytest.mark.parametrize(
    ("variable", "taken", "role"),
    [("PORT", 0, "router"), ("METRICS_PORT", 9, "metrics"), ("PORT", 2, "replica 2")],
)
def test_a_port_that_is_taken_is_named(
    tmp_path: Path, variable: str, taken: int, role: str
) -> None:
    port = free_ports(10)
    environment = {**make_environment(tmp_path), "PORT": str(port), "METRICS_PORT": str(port + 9)}
    with socket.create_server(("127.0.0.1", port + taken)):
        done = run("2", environment=environment)
    assert done.returncode == 1
    assert f"port {port + taken} already" in done.stderr and role in done.stderr
    assert f"set {variable}" in done.stderr


def test_a_store_that_runs_is_not_taken_for_ours(tmp_path: Path) -> None:
    port = free_ports(7)
    environment = {**make_environment(tmp_path), "PORT": str(port), "METRICS_PORT": str(port + 3)}
    environment |= {"STORAGE": "mooncake", "STORAGE_PORT": str(port + 4)}
    with socket.create_server(("127.0.0.1", port + 6)):
        done = run("2", environment=environment)
    assert done.returncode == 1
    assert "STORAGE_PORT" in done.stderr and "MOONCAKE_MASTER" in done.stderr


@pytest.mark.parametrize(
    ("storage", "metrics", "store", "clash"),
    [
        (
            "redis",
            2,
            9,
            "replica 2 and for the router's metrics page|metrics page and for replica 2",
        ),
        ("redis", 0, 9, "the router and for the router's metrics page"),
        ("mooncake", 8, 2, "replica 2 and for the storage"),
        ("mooncake", 6, 4, "metrics page and for the storage"),
    ],
)
def test_ports_that_are_meant_for_two_are_refused(
    tmp_path: Path, storage: str, metrics: int, store: int, clash: str
) -> None:
    port = free_ports(12)
    environment = {**make_environment(tmp_path), "PORT": str(port), "STORAGE": storage}
    environment |= {"METRICS_PORT": str(port + metrics), "STORAGE_PORT": str(port + store)}
    done = run("2", "--model-path", "a model", environment=environment)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert re.search(clash, line), line
