"""The in-process Engine with a tiny random model: sync, async, streams, notebooks, failures."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import sglang
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.server_args import ServerArgs
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_checkpoint(folder, "llama")
    return folder


def _options(model_path: Path) -> dict[str, Any]:
    return {
        "model_path": str(model_path),
        "device": "cpu",
        "max_total_tokens": 2048,
        "num_threads": 1,
    }


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Iterator[Engine]:
    with sglang.Engine(**_options(model_path)) as running:
        yield running


@pytest.fixture(scope="module")
def reference(engine: Engine) -> list[int]:
    answer = engine.generate("hello", GREEDY)
    assert isinstance(answer, dict)
    assert answer["meta_info"]["completion_tokens"] == 8
    return answer["output_ids"]


def test_batches_come_back_in_order(engine: Engine, reference: list[int]) -> None:
    answers = engine.generate(["hello", "other", "hello"], GREEDY)
    assert isinstance(answers, list) and len(answers) == 3
    assert answers[0]["output_ids"] == answers[2]["output_ids"] == reference
    assert answers[1]["output_ids"] != reference


def test_token_ids_as_prompt(engine: Engine, reference: list[int]) -> None:
    answer = engine.generate(input_ids=list(b"hello"), sampling_params=GREEDY)
    assert isinstance(answer, dict)
    assert answer["output_ids"] == reference


def test_streams_are_cumulative(engine: Engine, reference: list[int]) -> None:
    # Long enough that not all tokens can reach the reader in one piece.
    params = {**GREEDY, "max_new_tokens": 300, "ignore_eos": True}
    chunks = list(engine.generate("hello", params, stream=True))
    lengths = [len(chunk["output_ids"]) for chunk in chunks]  # type: ignore[index]
    assert lengths == sorted(lengths) and len(chunks) > 1
    first = chunks[-1]["output_ids"][: len(reference)]  # type: ignore[index]
    assert first == reference


def test_leaving_a_stream_early_aborts_the_request(engine: Engine) -> None:
    stream = engine.generate("hello", {**GREEDY, "max_new_tokens": 400}, stream=True)
    next(stream)  # type: ignore[arg-type]
    stream.close()  # type: ignore[union-attr]
    deadline = time.monotonic() + 10
    # A flush may be answered before the last output, which passes through the detokenizer.
    while not engine.flush_cache().success or engine.tokenizer_manager.rid_to_state:
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.05)


def test_calls_inside_a_running_loop(engine: Engine, reference: list[int]) -> None:
    async def cell() -> Any:
        return engine.generate("hello", GREEDY)

    assert asyncio.run(cell())["output_ids"] == reference


def test_async_calls_in_changing_loops(engine: Engine, reference: list[int]) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(
            engine.async_generate("hello", GREEDY), engine.async_generate("hello", GREEDY)
        )

    async def stream() -> list[Any]:
        chunks = await engine.async_generate("hello", GREEDY, stream=True)
        return [chunk async for chunk in chunks]  # type: ignore[union-attr]

    for _ in range(2):
        assert [a["output_ids"] for a in asyncio.run(both())] == [reference] * 2
    assert asyncio.run(stream())[-1]["output_ids"] == reference
    answer = engine.loop.run_until_complete(engine.async_generate("hello", GREEDY))
    assert answer["output_ids"] == reference  # type: ignore[index,call-overload]


def test_calls_from_several_threads(engine: Engine, reference: list[int]) -> None:
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(engine.generate("hello", GREEDY)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [answer["output_ids"] for answer in answers] == [reference] * 4


def test_bad_requests_are_value_errors(engine: Engine) -> None:
    with pytest.raises(ValueError, match="temperature"):
        engine.generate("hello", {"temperature": -1})
    with pytest.raises(ValueError):
        engine.generate("hello", {"no_such_parameter": 1})
    assert engine.generate("hello", GREEDY)


def test_info_and_flush(engine: Engine, model_path: Path) -> None:
    assert engine.get_model_info()["model_path"] == str(model_path)
    info = engine.get_server_info()
    assert info["page_size"] == 1 and info["tp_size"] == 1
    assert info["version"] == sglang.__version__
    assert len(info["internal_states"]) == 1
    assert info["max_total_num_tokens"] == 2048
    assert engine.flush_cache().success


def test_constructor_takes_one_form_of_arguments(model_path: Path) -> None:
    args = ServerArgs(model_path=str(model_path), device="cpu")
    with pytest.raises(ValueError, match="not both"):
        Engine(server_args=args, tp_size=2)
    with pytest.raises(ValueError, match="not a server argument"):
        Engine(model_path=str(model_path), no_such_field=1)


def test_a_model_that_does_not_exist_is_a_launch_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--model-path .*nothing does not exist"):
        Engine(**_options(tmp_path / "nothing"))


def test_a_folder_without_a_model_is_a_launch_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="cannot read .*config.json"):
        Engine(**_options(tmp_path), log_level="critical", skip_tokenizer_init=True)


def test_shutdown_ends_the_children_and_later_calls_fail(model_path: Path) -> None:
    engine = Engine(**_options(model_path), tp_size=2)
    processes = [psutil.Process(process.pid) for process in engine._launched.processes]
    assert len(processes) == 3
    answer = engine.generate("hello", GREEDY)
    assert len(answer["output_ids"]) == 8  # type: ignore[index,call-overload]
    engine.shutdown()
    engine.shutdown()
    assert not any(process.is_running() for process in processes)
    assert [process.exitcode for process in engine._launched.processes] == [0, 0, 0]
    with pytest.raises(RuntimeError, match="was shut down"):
        engine.generate("hello", GREEDY)


def test_a_killed_scheduler_fails_waiting_and_later_calls(model_path: Path) -> None:
    engine = Engine(**_options(model_path), log_level="critical")
    try:
        pid = engine._launched.processes[0].pid
        assert pid is not None
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        start = time.monotonic()
        with pytest.raises(ValueError, match="SIGKILL"):
            while True:
                engine.generate("hello", {**GREEDY, "max_new_tokens": 400})
        assert time.monotonic() - start < 5
        with pytest.raises(ValueError, match="SIGKILL"):
            engine.generate("hello", GREEDY)
    finally:
        engine.shutdown()
