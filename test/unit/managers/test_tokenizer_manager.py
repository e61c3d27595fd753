"""The front's engine client against a fake scheduler: requests, batches, aborts, death."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sglang.srt.environ import envs
from sglang.srt.managers import client_watch, tokenizer_manager
from sglang.srt.managers.health import HealthProbe
from sglang.srt.managers.io_struct import (
    AbandonReq,
    AbortReq,
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from sglang.srt.managers.request_errors import EngineUnavailableError, RequestError
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.observability.metrics import TokenizerLabels, TokenizerMetrics
from sglang.test.fakes.front import Front, make_front, run_with_front, until
from sglang.test.fakes.tiny_tokenizer import CONTEXT_LEN, VOCAB_SIZE

FOUR = {"max_new_tokens": 4}
ENDLESS = {"max_new_tokens": 100}


class Client:
    """A connection that can be cut."""

    def __init__(self) -> None:
        self.gone = False

    async def is_disconnected(self) -> bool:
        return self.gone


async def refused(front: Front, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await front.generate(**fields)
    assert front.manager.rid_to_state == {}
    return caught.value


# -- answers ---------------------------------------------------------------------------------------


def test_single_answer_has_the_documented_fields(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        answer = await front.generate(text="abcd", rid="r1", sampling_params=FOUR)
        assert answer["text"] == "abcd"
        assert len(answer["output_ids"]) == 4
        meta = answer["meta_info"]
        assert meta["id"] == "r1"
        assert meta["finish_reason"] == {"type": "length", "length": 4}
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (4, 4)
        assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 4}]
        assert meta["e2e_latency"] > 0 and "output_token_logprobs" not in meta
        assert front.manager.rid_to_state == {}

    run_with_front(tmp_path, body)


def test_batch_with_samples_is_prompt_major_and_warms_each_prefix(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        answers = await front.generate(
            text=["aa", "bb"], rid="x", sampling_params={**FOUR, "n": 3, "sampling_seed": 7}
        )
        assert [a["text"] for a in answers] == ["aaaa"] * 3 + ["bbbb"] * 3
        assert [a["meta_info"]["id"] for a in answers] == [f"x_{i}" for i in range(6)]
        sent = front.scheduler.of_type(TokenizedGenerateReqInput)
        assert [r.sampling_params.max_new_tokens for r in sent[:2]] == [0, 0]
        assert [r.sampling_params.sampling_seed for r in sent[2:5]] == [7, 8, 9]

    run_with_front(tmp_path, body)


def test_no_new_tokens(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        answer = await front.generate(
            text="ab", return_logprob=True, sampling_params={"max_new_tokens": 0}
        )
        assert answer["text"] == "" and answer["output_ids"] == []
        assert answer["meta_info"]["output_token_logprobs"] == []

    run_with_front(tmp_path, body)


def test_logprobs_prompt_ids_and_text(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        answer = await front.generate(
            text="ab",
            sampling_params=FOUR,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
            return_text_in_logprobs=True,
            return_prompt_token_ids=True,
        )
        meta, ids = answer["meta_info"], answer["output_ids"]
        assert meta["output_token_logprobs"] == [[-0.5, i, c] for i, c in zip(ids, "abab")]
        assert meta["output_top_logprobs"][0] == [[-0.5, ids[0], "a"]]
        assert meta["input_token_logprobs"] == [[None, ids[0], "a"], [-1.0, ids[1], "b"]]
        assert meta["output_token_logprobs_length"] == 4
        assert answer["prompt_token_ids"] == ids[:2]

    run_with_front(tmp_path, body)


@pytest.mark.parametrize("incremental", [False, True])
def test_stream_is_cumulative_or_incremental(tmp_path: Path, incremental: bool) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        chunks = await front.stream(text="abcd", sampling_params=FOUR, return_logprob=True)
        texts = [chunk["text"] for chunk in chunks]
        rows = [len(chunk["meta_info"]["output_token_logprobs"]) for chunk in chunks]
        if incremental:
            assert "".join(texts) == "abcd" and sum(rows) == 4
        else:
            assert texts == sorted(texts, key=len) and texts[-1] == "abcd" and rows[-1] == 4
        assert chunks[0]["meta_info"]["prompt_tokens"] == 4
        assert [bool(c["meta_info"]["finish_reason"]) for c in chunks[:-1]] == [False] * (
            len(chunks) - 1
        )

    run_with_front(tmp_path, body, incremental_streaming_output=incremental)


def test_batch_stream_chunks_carry_their_index(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        chunks = await front.stream(text=["aa", "bb"], sampling_params=FOUR)
        last = {chunk["index"]: chunk["text"] for chunk in chunks}
        assert last == {0: "aaaa", 1: "bbbb"}

    run_with_front(tmp_path, body)


def test_ids_only_server(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        answer = await front.generate(input_ids=[5, 6], sampling_params=FOUR)
        assert "text" not in answer and answer["output_ids"] == [5, 6, 5, 6]
        assert "skip-tokenizer-init" in str(await refused(front, text="a"))
        stop = {"stop": "x"}
        assert "tokenizer" in str(await refused(front, input_ids=[1], sampling_params=stop))

    run_with_front(tmp_path, body, skip_tokenizer_init=True)


def test_preferred_sampling_params_are_defaults(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        assert len((await front.generate(text="a"))["output_ids"]) == 3
        assert len((await front.generate(text="a", sampling_params=FOUR))["output_ids"]) == 4

    run_with_front(tmp_path, body, preferred_sampling_params='{"max_new_tokens": 3}')


@pytest.mark.parametrize("text", ['{"temperature": -1}', '{"stop_regex": "("}', '{"top_p": 2}'])
def test_senseless_preferred_values_stop_the_start(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"temperature|stop_regex|top_p"):
        with make_front(tmp_path, preferred_sampling_params=text):
            pass


def test_a_preferred_minimum_goes_with_the_clients_own_maximum(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        assert "min_new_tokens" in str(await refused(front, text="a", sampling_params=FOUR))
        assert await HealthProbe(front.manager).check()
        (probe,) = front.scheduler.of_type(TokenizedGenerateReqInput)
        assert probe.is_health_check and probe.sampling_params.min_new_tokens == 0

    run_with_front(tmp_path, body, preferred_sampling_params='{"min_new_tokens": 200}')


# -- refusals --------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "Either text, input_ids or input_embeds should be provided."),
    ({"text": "a", "input_ids": [1]}, "Only one of"),
    ({"text": []}, "empty"),
    ({"text": ""}, "empty"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [VOCAB_SIZE]}, f"[0, {VOCAB_SIZE - 1}]"),
    ({"input_ids": [-1]}, "got -1"),
    ({"input_ids": [2**40]}, "input_ids must hold"),
    ({"text": "a", "token_ids_logprob": [VOCAB_SIZE]}, "token_ids_logprob"),
    ({"input_ids": [1] * CONTEXT_LEN}, f"longer than the model's context length ({CONTEXT_LEN}"),
    ({"text": "a", "sampling_params": {"max_new_tokens": CONTEXT_LEN}}, "context length"),
    ({"text": "a", "sampling_params": {"n": 0}}, "n must be"),
    ({"text": "a", "sampling_params": {"n": 10**9}}, "n must be"),
    ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
    ({"text": "a", "top_logprobs_num": VOCAB_SIZE + 1}, "top_logprobs_num"),
    ({"text": "a", "top_logprobs_num": -1}, "top_logprobs_num"),
    ({"text": "a", "return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
    ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "a", "routed_dp_rank": 1}, "routed_dp_rank"),
    ({"text": ["a", "b"], "rid": ["1"]}, "rid has 1"),
    ({"text": ["a", "b"], "rid": ["1", "1"]}, "Duplicate"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params has 1"),
    ({"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n must be the same"),
    ({"text": "a", "sampling_params": {"nope": 1}}, "unknown field `nope`"),
    ({"text": "a", "image_data": "x"}, "image_data"),
    ({"text": "a", "lora_path": "x"}, "lora_path"),
    ({"text": "a", "return_hidden_states": True}, "--enable-return-hidden-states"),
]


def test_bad_requests_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        for fields, text in BAD:
            assert text in str(await refused(front, **fields)), fields
        ignored: dict[str, Any] = {
            "lora_path": "",
            "image_data": None,
            "extra_key": "",
            "cache_salt": "",
        }
        await front.generate(text="a", sampling_params=FOUR, **ignored)
        sent = front.scheduler.of_type(TokenizedGenerateReqInput)
        assert [r.extra_key for r in sent] == [None]  # none of the bad ones got through

    run_with_front(tmp_path, body)


def test_batch_caps_come_before_any_work(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        with envs.SGLANG_MAX_BATCH_SIZE.override(8):
            assert "at most 8" in str(await refused(front, text=["a"] * 9))
            many: dict[str, Any] = {"text": ["a"] * 3, "sampling_params": {"n": 3}}
            assert "at most 8" in str(await refused(front, **many))

    run_with_front(tmp_path, body)


def test_truncation_where_allowed(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        answer = await front.generate(
            input_ids=[1] * (2 * CONTEXT_LEN), sampling_params={"max_new_tokens": 50}
        )
        meta = answer["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (CONTEXT_LEN - 1, 1)

    run_with_front(tmp_path, body, allow_auto_truncate=True)


def test_null_max_new_tokens_fills_the_context(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        answer = await front.generate(text="ab", sampling_params={"max_new_tokens": None})
        assert answer["meta_info"]["completion_tokens"] == CONTEXT_LEN - 2

    run_with_front(tmp_path, body)


def test_engine_refusal_keeps_its_status(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.refuse = {
            "type": "abort",
            "message": "The request queue is full.",
            "status_code": 503,
            "err_type": "ServiceUnavailable",
        }
        error = await refused(front, text="a")
        assert (error.status_code, str(error)) == (503, "The request queue is full.")

    run_with_front(tmp_path, body)


# -- cache namespaces ------------------------------------------------------------------------------


def test_namespaces_never_collide(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        cases = [(None, None), ("a", None), (None, "a"), ("a", "b"), ("ab", "b"), ("a|salt:b", "")]
        for key, salt in cases:
            await front.generate(text="x", extra_key=key, cache_salt=salt, sampling_params=FOUR)
        keys = [r.extra_key for r in front.scheduler.of_type(TokenizedGenerateReqInput)]
        assert keys[0] is None and len(set(keys)) == len(cases)

    run_with_front(tmp_path, body)


# -- ids, aborts, disconnects ----------------------------------------------------------------------


def test_duplicate_id_is_refused_while_live_and_free_afterwards(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        first = await front.start(text="a", rid="same", sampling_params=ENDLESS)
        with pytest.raises(RequestError, match="Duplicate request ID detected"):
            await front.generate(text="b", rid="same")
        front.manager.abort_request("same")
        assert (await first)["meta_info"]["finish_reason"]["type"] == "abort"
        assert (await front.generate(text="b", rid="same", sampling_params=FOUR))["text"] == "bbbb"

    run_with_front(tmp_path, body)


def test_an_id_stays_taken_until_the_engine_is_done_with_it(tmp_path: Path) -> None:
    """News of a request whose client left must not become the answer to a later one."""

    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        request = GenerateReqInput(text="a", rid="same", stream=True, sampling_params=ENDLESS)
        source = front.manager.generate_request(request)
        await anext(source)
        front.scheduler.silent = True
        await source.aclose()
        await asyncio.sleep(0.03)
        with pytest.raises(RequestError, match="Duplicate request ID detected"):
            await front.generate(text="bb", rid="same", sampling_params=FOUR)
        assert front.manager._dispatcher.num_live == [0]
        front.scheduler.silent = False
        await until(lambda: not front.manager.rid_to_state)
        answer = await front.generate(text="bb", rid="same", sampling_params=FOUR)
        assert (answer["text"], answer["meta_info"]["prompt_tokens"]) == ("bbbb", 2)

    run_with_front(tmp_path, body)


def test_what_cannot_be_sent_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        deep: dict[str, Any] = {}
        for _ in range(2000):
            deep = {"a": deep}
        for params in ({"custom_params": deep}, {"custom_params": deep, "n": 2}):
            error = await refused(front, text="ab", rid="r", sampling_params=params)
            assert error.status_code == 400 and "nested too deep" in str(error)
        assert front.manager._dispatcher.num_live == [0]
        assert (await front.generate(text="ab", rid="r", sampling_params=FOUR))["text"] == "abab"

    run_with_front(tmp_path, body)


def test_an_empty_id_in_a_list_is_none(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        answers = await front.generate(text=["a", "b"], rid=["", ""], sampling_params=FOUR)
        rids = {answer["meta_info"]["id"] for answer in answers}
        assert len(rids) == 2 and "" not in rids

    run_with_front(tmp_path, body)


def test_exact_abort_and_abort_of_all(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        one = await front.start(text="a", rid="job1", sampling_params=ENDLESS)
        other = await front.start(text="a", rid="job10", sampling_params={"max_new_tokens": 30})
        front.manager.abort_request("job", exact=True)  # nobody's
        front.manager.abort_request("job1", exact=True)
        assert (await one)["meta_info"]["finish_reason"]["type"] == "abort"
        front.scheduler.step_s = 0.0
        assert (await other)["meta_info"]["finish_reason"]["type"] == "length"
        front.scheduler.step_s = 0.01
        last = await front.start(text="a", rid="job10", sampling_params=ENDLESS)
        front.manager.abort_request("x", abort_all=True, exact=True)
        await until(lambda: front.scheduler.of_type(AbortReq)[-1].abort_all)
        assert not front.scheduler.of_type(AbortReq)[-1].exact  # which would win
        assert (await last)["meta_info"]["finish_reason"]["type"] == "abort"

    run_with_front(tmp_path, body)


def test_abort_reaches_a_request_whose_prompt_is_computed_for_its_samples(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.2
        params = {**ENDLESS, "n": 2}
        request = await front.start(text="ab", rid="b", sampling_params=params)
        front.manager.abort_request("b")
        for answer in await request:
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        await until(lambda: bool(front.scheduler.of_type(AbortReq)))
        assert [message.rid for message in front.scheduler.of_type(AbortReq)] == ["b"]
        assert len(front.scheduler.of_type(TokenizedGenerateReqInput)) == 1  # no sample was sent

    run_with_front(tmp_path, body)


def test_abort_takes_a_prefix_and_returns_what_there_is(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        batch = await front.start(
            text=["a", "b"], rid="job", sampling_params=ENDLESS, return_logprob=True
        )
        other = await front.start(text="c", rid="other", sampling_params={"max_new_tokens": 30})
        front.manager.abort_request("")  # nothing
        front.manager.abort_request("unknown")
        front.manager.abort_request("job")
        answers = await batch
        for answer in answers:
            reason = answer["meta_info"]["finish_reason"]
            assert reason == {
                "type": "abort",
                "message": "Aborted",
                "status_code": None,
                "err_type": None,
            }
            assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])
        front.scheduler.step_s = 0.0
        assert (await other)["meta_info"]["finish_reason"]["type"] == "length"

    run_with_front(tmp_path, body)


def test_disconnect_aborts_this_request_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (client_watch, tokenizer_manager):
        monkeypatch.setattr(module, "DISCONNECT_POLL_S", 0.2)

    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.02
        client = Client()
        request = GenerateReqInput(text="a", rid="req-1", sampling_params=ENDLESS)
        task = asyncio.create_task(anext(front.manager.generate_request(request, client)))
        await until(lambda: "req-1" in front.scheduler.live)
        longer = await front.start(text="b", rid="req-10", sampling_params={"max_new_tokens": 90})
        client.gone = True
        with pytest.raises(RequestError, match="disconnected"):
            await task
        await until(lambda: "req-1" not in front.scheduler.live)
        assert "req-10" in front.scheduler.live
        front.scheduler.step_s = 0.0
        assert front.scheduler.of_type(AbandonReq) == [AbandonReq(rids={"req-1"})]
        assert (await longer)["meta_info"]["finish_reason"]["type"] == "length"

    run_with_front(tmp_path, body)


def test_leaving_a_stream_aborts_it(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        request = GenerateReqInput(text="a", rid="s", stream=True, sampling_params=ENDLESS)
        source = front.manager.generate_request(request)
        await anext(source)
        await source.aclose()
        await until(lambda: not front.scheduler.live and not front.manager.rid_to_state)
        async with front.manager.model_update_lock.writer_lock():  # the reader side was released
            pass

    run_with_front(tmp_path, body)


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    registry = CollectorRegistry()

    def total(name: str, **labels: str) -> float:
        keys = {"model_name": "m", "engine_type": "unified", "priority": "", **labels}
        return registry.get_sample_value(f"sglang:{name}_total", keys) or 0.0

    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        front.manager.metrics = TokenizerMetrics(TokenizerLabels(model_name="m"), registry=registry)
        request = GenerateReqInput(text="abc", stream=stream, sampling_params=ENDLESS)
        source = front.manager.generate_request(request)
        if stream:
            await anext(source)
            await source.aclose()
        else:
            task = asyncio.create_task(anext(source))
            await until(lambda: bool(front.scheduler.live))
            task.cancel()
        await until(lambda: not front.scheduler.live and not front.manager.rid_to_state)
        kind = str(stream).lower()
        assert total("num_requests", is_streaming=kind) == 1
        assert total("num_aborted_requests") == 1
        assert total("prompt_tokens", is_streaming=kind) == 3
        assert (total("generation_tokens", is_streaming=kind) > 0) == stream
        await front.generate(text="a", sampling_params=FOUR)
        assert total("num_aborted_requests") == 1

    run_with_front(tmp_path, body)


@pytest.mark.parametrize("stream", [False, True])
def test_who_ends_is_counted_behind_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.delenv("PROMETHEUS_MULTIPROC_DIR", raising=False)
    registry = CollectorRegistry()

    def num_requests() -> float:
        keys = {"model_name": "m", "engine_type": "unified", "priority": ""}
        keys["is_streaming"] = str(stream).lower()
        return registry.get_sample_value("sglang:num_requests_total", keys) or 0.0

    async def body(front: Front) -> None:
        front.manager.metrics = TokenizerMetrics(TokenizerLabels(model_name="m"), registry=registry)
        request = GenerateReqInput(text="abc", stream=stream, sampling_params=FOUR)
        async for answer in front.manager.generate_request(request):
            last = answer
        assert last["text"] == "abca" and num_requests() == 0
        await asyncio.sleep(0)  # whatever comes next on this loop finds it counted
        assert num_requests() == 1

    run_with_front(tmp_path, body)


def test_cancelled_handler_aborts(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        task = await front.start(text="a", sampling_params=ENDLESS)
        task.cancel()
        await until(lambda: not front.scheduler.live and not front.manager.rid_to_state)

    run_with_front(tmp_path, body)


# -- data parallel, control, death -----------------------------------------------------------------


def test_requests_spread_over_replicas(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        for scheduler in front.schedulers:
            scheduler.step_s = 0.01
        answers = await front.generate(
            text=["a", "b", "c", "d"], sampling_params={"max_new_tokens": 3}
        )
        assert sorted(a["meta_info"]["dp_rank"] for a in answers) == [0, 0, 1, 1]
        pinned = await front.generate(text="a", routed_dp_rank=1, sampling_params=FOUR)
        assert pinned["meta_info"]["dp_rank"] == 1
        samples = await front.generate(text="a", sampling_params={**FOUR, "n": 4})
        assert len({a["meta_info"]["dp_rank"] for a in samples}) == 1  # they share a prefix
        for scheduler in front.schedulers:
            scheduler.step_s = 0.0
        for index in range(3):
            rid = f"n{index}"
            await front.generate(text="ab", rid=rid, sampling_params={**FOUR, "n": 2})
            numbers = [
                sum(r.rid.startswith(rid) for r in scheduler.of_type(TokenizedGenerateReqInput))
                for scheduler in front.schedulers
            ]
            assert sorted(numbers) == [0, 3], "the prompt was computed on another replica"
        loads = await front.manager.control.get_loads()
        assert [load["dp_rank"] for load in loads] == [0, 1]
        assert front.manager._dispatcher.num_live == [0, 0]

    run_with_front(tmp_path, body, dp_size=2)


def test_dead_engine_fails_everything_waiting(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        running = await front.start(text="a", sampling_params=ENDLESS)
        streamed = asyncio.create_task(front.stream(text="a", sampling_params=ENDLESS))
        await until(lambda: len(front.scheduler.live) == 2)
        front.scheduler.silent = True
        control = asyncio.create_task(front.manager.control.ping(20))
        await asyncio.sleep(0.05)
        front.manager.mark_dead("the scheduler was killed")
        for task in (running, streamed, control):
            with pytest.raises(RequestError, match="killed") as caught:
                await task
            assert caught.value.status_code == 503
        assert front.manager.server_status is ServerStatus.UnHealthy
        assert (await refused(front, text="a")).status_code == 503

    run_with_front(tmp_path, body)


def test_death_is_told_from_another_thread(tmp_path: Path) -> None:
    """What the launcher's watchdog does: it needs to find the loop on which the front runs."""

    async def body(front: Front) -> None:
        front.scheduler.step_s = 0.01
        running = await front.start(text="a", sampling_params=ENDLESS)
        loop = front.manager.event_loop
        assert loop is asyncio.get_running_loop()
        await asyncio.to_thread(loop.call_soon_threadsafe, front.manager.mark_dead, "killed")
        with pytest.raises(RequestError, match="killed"):
            await running

    run_with_front(tmp_path, body)


def test_dead_engine_wakes_held_requests(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        await front.manager.pause_generation(PauseGenerationReqInput(mode="retract"))
        held = asyncio.create_task(front.generate(text="b"))
        await asyncio.sleep(0.02)
        front.manager.mark_dead("gone")
        with pytest.raises(EngineUnavailableError):
            await held

    run_with_front(tmp_path, body)


async def _held_by_a_pause(front: Front) -> Any:
    await front.manager.pause_generation(PauseGenerationReqInput(mode="in_place"))
    held = asyncio.create_task(front.generate(text="ab", sampling_params={"max_new_tokens": 2}))
    await until(lambda: len(front.manager._held()) == 1)
    await asyncio.sleep(0.01)
    await front.manager.continue_generation(ContinueGenerationReqInput())
    return await held


async def _queued_behind_an_update(front: Front) -> Any:
    running = asyncio.create_task(front.generate(text="ab", sampling_params={"max_new_tokens": 9}))
    await until(lambda: bool(front.scheduler.live))
    async with front.manager.weight_update_guard():
        queued = asyncio.create_task(
            front.generate(text="ab", sampling_params={"max_new_tokens": 2})
        )
        await asyncio.sleep(0.01)
    await running
    return await queued


@pytest.mark.parametrize("wait", [_held_by_a_pause, _queued_behind_an_update])
def test_requests_wait_on_one_loop_after_the_other(
    tmp_path: Path, wait: Callable[[Front], Awaitable[Any]]
) -> None:
    async def within_limit(front: Front) -> Any:
        front.scheduler.step_s = 0.01
        async with asyncio.timeout(10):
            return await wait(front)

    with make_front(tmp_path) as front:
        for _ in range(2):
            assert asyncio.run(within_limit(front))["text"] == "ab"


def test_long_prompts_do_not_block_the_loop(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        longest = 0.0
        done = asyncio.Event()

        async def watch() -> None:
            nonlocal longest
            loop = asyncio.get_running_loop()
            while not done.is_set():
                before = loop.time()
                await asyncio.sleep(0.001)
                longest = max(longest, loop.time() - before)

        watcher = asyncio.create_task(watch())
        text = "hello world " * 100_000
        started = asyncio.get_running_loop().time()
        assert "longer than" in str(await refused(front, text=text))
        took = asyncio.get_running_loop().time() - started
        done.set()
        await watcher
        assert longest < 0.5 * took

    run_with_front(tmp_path, body)
