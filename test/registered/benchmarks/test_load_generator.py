"""The load generator tells the truth about a server whose times and faults are known."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bench_serving import parse_arguments, stopped_by_sigterm
from serving import plot, report, soak
from serving.backends import BACKENDS, RequestOptions
from serving.http_stream import Endpoint
from serving.load import LoadGenerator, Pacing, Recording, RequestRecord
from serving.workloads import PromptSpec, arrivals, file_prompts
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="benchmarks")

FIRST_S, STEP_S, NUM_TOKENS = 0.08, 0.06, 6
SLACK_S = 0.05  # between what server and client note; less than between two tokens

Handler = Callable[[str, dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def event(content: Any) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content)
    data = f"data: {text}\n\n".encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def openai_chunk(path: str, text: str, finish: str | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
    choice |= {"delta": {"content": text}} if "chat" in path else {"text": text}
    return {"choices": [choice], "usage": None}


def chunk(path: str, number: int, total: int) -> dict[str, Any]:
    if path != "/generate":
        return openai_chunk(path, f"t{number} ")
    finish = {"type": "length", "length": total} if number == total else None
    counts = {"prompt_tokens": 5, "cached_tokens": 3, "completion_tokens": number}
    counts["num_retractions"] = int(number > NUM_TOKENS // 2)
    return {"text": "x" * number, "meta_info": {**counts, "finish_reason": finish}}


async def answer_slowly(
    path: str,
    body: dict[str, Any],
    writer: asyncio.StreamWriter,
    log: list[list[float]] | None = None,
) -> None:
    """Stream NUM_TOKENS tokens: the first after FIRST_S, the others STEP_S apart.

    `log` receives when the request came and when each token was written, as a busy machine makes
    every sleep longer than asked.
    """
    moments = [time.perf_counter()]
    if log is not None:
        log.append(moments)
    writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    if "chat" in path:
        writer.write(event(openai_chunk(path, "")))  # the role comes first, without a token
    for number in range(1, NUM_TOKENS + 1):
        await asyncio.sleep(FIRST_S if number == 1 else STEP_S)
        moments.append(time.perf_counter())
        writer.write(event(chunk(path, number, NUM_TOKENS)))
    if path != "/generate":
        writer.write(event(openai_chunk(path, "", "length")))
        details = {"cached_tokens": 3}
        usage = {"prompt_tokens": 5, "completion_tokens": 6, "prompt_tokens_details": details}
        writer.write(event({"choices": [], "usage": usage}))
    writer.write(event("[DONE]") + b"0\r\n\r\n")


def run_against(
    handler: Handler, specs: list[PromptSpec], backend: str = "sglang", **pacing: Any
) -> Recording:
    """Serve with `handler` on a free port and send `specs`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        try:
            await handler(head.split(" ")[1], body, writer)
            await writer.drain()
        except ConnectionError:
            return  # the client left
        finally:
            writer.close()

    async def main() -> Recording:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        generator = LoadGenerator(Endpoint.parse(url), BACKENDS[backend](RequestOptions()))
        pacing.setdefault("arrivals_s", itertools.repeat(0.0))
        async with server:
            with stopped_by_sigterm(generator):
                return await generator.run(specs, Pacing(**pacing))

    return asyncio.run(main())


def prompt(backend: str = "sglang", **fields: Any) -> PromptSpec:
    content: dict[str, Any] = {"text": "hi"} if "chat" in backend else {"input_ids": [1, 2]}
    return PromptSpec(kind="random", output_len=NUM_TOKENS, **content, **fields)


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_measured_times_and_counts_are_those_of_the_server(backend: str) -> None:
    log: list[list[float]] = []
    handler = partial(answer_slowly, log=log)
    recording = run_against(handler, [prompt(backend)] * 3, backend, concurrency=1)
    for record, (came, *written) in zip(recording.records, log, strict=True):
        assert (record.outcome, record.error) == ("ok", "")
        assert written[0] - came <= record.ttft_s < written[0] - came + SLACK_S
        assert len(record.gaps_s) == NUM_TOKENS - 1
        assert written[-1] - came <= record.e2e_s < written[-1] - came + SLACK_S
        step_s = (written[-1] - written[0]) / (NUM_TOKENS - 1)
        assert record.tpot_s == pytest.approx(step_s, abs=SLACK_S / NUM_TOKENS)
        assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (5, 6, 3)
    summary = report.summarize(recording)
    assert summary.output_tokens == 18 and summary.peak_in_flight == 1
    assert summary.retractions == (3 if backend == "sglang" else None)
    assert summary.short_answers == 0 and summary.latencies_ms["time to first token"].count == 3


def test_closed_loop_keeps_to_its_places() -> None:
    recording = run_against(answer_slowly, [prompt()] * 6, concurrency=2)
    assert report.summarize(recording).peak_in_flight == 2
    assert recording.wall_s >= 3 * (FIRST_S + STEP_S * (NUM_TOKENS - 1))


def test_open_loop_sends_when_due_whatever_the_server_does() -> None:
    due = [0.0, 0.03, 0.06]
    recording = run_against(answer_slowly, [prompt()] * 3, arrivals_s=due)
    for record, moment in zip(recording.records, due, strict=True):
        assert moment <= record.sent_s < moment + FIRST_S
    assert report.summarize(recording).peak_in_flight == 3


async def refuse(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    text = b'{"error": {"message": "no room"}}'
    writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(text) + text)


async def break_off(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + event(chunk(path, 1, 9))
    )


async def fail_inside(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await break_off(path, body, writer)
    writer.write(event({"error": {"message": "it broke"}}) + event("[DONE]") + b"0\r\n\r\n")


async def end_silently(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await break_off(path, body, writer)
    writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        (refuse, "status 503"),
        (break_off, "closed the connection early"),
        (fail_inside, "it broke"),
        (end_silently, "without [DONE]"),
    ],
)
def test_faults_are_counted_as_errors(handler: Handler, message: str) -> None:
    recording = run_against(handler, [prompt()])
    (record,) = recording.records
    assert record.outcome == "error" and message in record.error
    summary = report.summarize(recording)
    assert summary.outcomes == {"error": 1} and "time to first token" not in summary.latencies_ms
    assert not soak.check_errors(recording).passed


def test_silent_server_is_an_error_after_the_time_limit() -> None:
    async def sleep(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)

    (record,) = run_against(sleep, [prompt()], timeout_s=0.1).records
    assert record.outcome == "error" and "0.1 s" in record.error


def test_aborts_and_disconnects_happen_after_the_wanted_tokens() -> None:
    aborted: list[str] = []
    wake = asyncio.Event()

    async def abortable(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/abort_request":
            aborted.append(body["rid"])
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
            wake.set()
            return
        if body["sampling_params"]["max_new_tokens"] != NUM_TOKENS:
            await answer_slowly(path, body, writer)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number in (1, 2):
            writer.write(event(chunk(path, number, 99)))
        await wake.wait()
        last = chunk(path, 2, 99)
        last["meta_info"]["finish_reason"] = {"type": "abort", "message": "Aborted"}
        writer.write(event(last) + event("[DONE]") + b"0\r\n\r\n")

    leaving = PromptSpec(
        kind="x", output_len=50, input_ids=[1], fate="disconnect", leave_after_tokens=3
    )
    early = PromptSpec(
        kind="x", output_len=50, input_ids=[1], fate="disconnect",
        leave_after_tokens=99, leave_after_s=FIRST_S / 2,
    )  # fmt: skip
    specs = [prompt(fate="abort", leave_after_tokens=2), leaving, early]
    records = run_against(abortable, specs).records
    assert [record.outcome for record in records] == ["aborted", "disconnected", "disconnected"]
    assert [len(record.event_times) for record in records] == [2, 3, 0]
    assert len(aborted) == 1


@pytest.mark.parametrize("pause_s", [0.0, 3600.0])
def test_sigterm_ends_the_sending_and_what_is_in_flight_ends_as_it_would(pause_s: float) -> None:
    async def signalled(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await answer_slowly(path, body, writer)

    pacing: dict[str, Any] = {
        "concurrency": 2,
        "arrivals_s": (pause_s * number for number in itertools.count()),
    }
    recording = run_against(signalled, [prompt()] * 100, **pacing)
    assert 1 <= len(recording.records) <= 3
    assert [record.outcome for record in recording.records] == ["ok"] * len(recording.records)
    assert recording.sending_s < recording.wall_s - STEP_S


@pytest.mark.parametrize("concurrency", [None, 2])
def test_what_is_open_long_after_sigterm_is_cut_off(concurrency: int | None) -> None:
    """All is sent at once, and the server would take long: no failure, and no long wait."""

    async def hang(path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await break_off(path, body, writer)
        await writer.drain()
        await asyncio.sleep(5)

    recording = run_against(hang, [prompt()] * 4, concurrency=concurrency, grace_s=0.2)
    assert recording.wall_s < 2
    assert {record.outcome for record in recording.records} == {"cut off"}
    assert len(recording.records) == (concurrency or 4)
    assert [record.output_tokens for record in recording.records] == [1] * len(recording.records)
    summary = report.summarize(recording)
    assert not summary.errors and "cut off" in report.format_table(summary)
    check = soak.check_errors(recording)
    assert check.passed and "cut off by SIGTERM" in check.detail


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request-rate", "0"], "0 is no number above 0"),
        (["--request-rate", "-1"], "-1 is no number above 0"),
        (["--concurrency", "0"], "0 is no whole number of 1 or more"),
        (["--num-prompts", "0"], "0 is no whole number of 1 or more"),
        (["--input-len", "9:3"], "neither a length N nor a range LOW:HIGH"),
        (["--extra-body", "{bad"], "{bad is no JSON"),
        (["--extra-body", "[]"], "[] is no JSON object"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
    ],
)
def test_wrong_words_of_the_command_line_are_refused_with_what_is_expected(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_help_explains_every_option_and_ends_with_examples(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: http://127.0.0.1:30000)" in text and "(default: sglang)" in text
    assert "three checks: server idle" in text and "(default: 0.0)" in text
    assert "python benchmark/bench_serving.py --url" in text and "SIGTERM" in text


def test_requests_of_a_picture_have_whole_numbers(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = pyplot.figure().add_subplot()
    plot._draw_requests(axes, recording_with(lambda moment: 1.0, 3).records)
    assert all(tick == round(tick) for tick in axes.get_yticks())
    pyplot.close("all")


def recording_with(step_of: Callable[[float], float], duration_s: float) -> Recording:
    """One long answer whose step time follows `step_of(moment)`."""
    record = RequestRecord("random", "finish", 0, 0.0, 0.0, outcome="ok")
    moment = 0.0
    while moment < duration_s:
        record.event_times.append(moment)
        record.event_tokens.append(1)
        moment += step_of(moment)
    record.end_s = moment
    return Recording(
        records=[record],
        sending_s=duration_s,
        wall_s=moment,
        lags_s=[],
        client_cpu_share=0.0,
        has_schedule=False,
    )


def test_drift_is_seen_and_a_level_run_passes() -> None:
    level = recording_with(lambda moment: 0.01, 100)
    slower = recording_with(lambda moment: 0.01 * (1 + 0.1 * moment / 100), 100)
    assert soak.check_drift(level, 100, 0.05).passed
    assert not soak.check_drift(slower, 100, 0.05).passed
    assert soak.check_drift(slower, 100, 0.10).passed
    assert not soak.check_drift(level, 1e6, 0.05).passed  # nothing came in the last quarter


def test_noise_of_the_machine_is_no_drift_unless_gross() -> None:
    def at_the_end(factor: float) -> Callable[[float], float]:
        return lambda moment: 0.01 * (factor if moment > 90 else 1.0)

    assert soak.check_drift(recording_with(at_the_end(1.5), 100), 100, 0.05).passed
    assert not soak.check_drift(recording_with(at_the_end(3.0), 100), 100, 0.05).passed
    stepped = recording_with(lambda moment: 0.01 if moment < 50 else 0.011, 100)
    assert not soak.check_drift(stepped, 100, 0.05).passed


@pytest.mark.parametrize(("busy", "used"), [(0, 0), (1, 0), (0, 7)])
def test_server_with_requests_or_tokens_left_is_not_idle(busy: int, used: int) -> None:
    load = {"num_running_reqs": busy, "num_waiting_reqs": 0, "num_used_tokens": used}
    text = json.dumps({"loads": [load]}).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
        await writer.drain()
        writer.close()

    async def main() -> soak.Check:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await soak.check_idle(Endpoint.parse(f"http://127.0.0.1:{port}"), wait_s=0.2)

    assert asyncio.run(main()).passed == (busy == used == 0)


def test_poisson_arrivals_have_the_rate() -> None:
    times = list(itertools.islice(arrivals(50.0, random.Random(1)), 5001))
    assert times[0] == 0.0 and times[-1] == pytest.approx(100.0, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(mean**2, rel=0.1)  # of an exponential distribution


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"plain"\n\n{"prompt": "sized", "max_tokens": 3}\n{"input_ids": [4]}\n{}\n')
    prompts = file_prompts(path, 9)
    found = [(p.text, p.input_ids, p.output_len) for p in itertools.islice(prompts, 3)]
    assert found == [("plain", None, 9), ("sized", None, 3), (None, [4], 9)]
    with pytest.raises(ValueError, match=":5:"):
        next(prompts)
