"""A program that launches the engine's processes and serves the application itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.entrypoints import engine
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import ServerArgs
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

from .embedding_program import PARAMS, PROMPT

register_cpu_ci(est_time=15, suite="process")

PROGRAM = Path(__file__).with_name("embedding_program.py")


def fresh_answer(folder: Path) -> list[int]:
    with ServedScheduler(folder, "--max-total-tokens", 1024) as fresh:
        return fresh.answer(PROMPT, PARAMS["max_new_tokens"]).tokens


def test_requests_weights_and_memory_without_our_server(tmp_path: Path) -> None:
    folders = [
        make_tiny_checkpoint(tmp_path / name, seed=seed, max_position_embeddings=1024)
        for seed, name in enumerate(("old", "new"))
    ]
    command = [sys.executable, str(PROGRAM), *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    expected = [fresh_answer(folder) for folder in folders]
    assert expected[0] != expected[1]
    assert [seen["old"], seen["new"]] == expected
    assert seen["aborted"] == "abort"
    assert (seen["status"], seen["slots"]) == ("ready", 1024)
    assert seen["health"] == 200
    assert seen["configured"] == 1  # the program's own function was called
    assert seen["failure"] is None


def test_other_functions_for_the_processes_are_refused() -> None:
    args = ServerArgs(model_path="x", device="cpu")
    with pytest.raises(ValueError, match="cannot be replaced"):
        Engine._launch_subprocesses(args, run_scheduler_process_func=lambda *parts: None)
    assert engine.run_scheduler_process is not engine.run_detokenizer_process
