"""The openai package's own machinery against a real server: parsers, helpers, async streams.

What single answers contain is in `test_openai_server`; here it is what the package makes of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.small_server import SmallServer, serve

register_cpu_ci(est_time=25, suite="openai")

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


class City(pydantic.BaseModel):
    """What the parser helpers ask for."""

    city: str = pydantic.Field(max_length=10)
    is_capital: bool


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[SmallServer]:
    with serve(str(small_model), "--served-model-name", "smol") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: SmallServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="None", max_retries=0)


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"model": "smol", "messages": ASK, "max_tokens": 8, "temperature": 0, **fields}
    return client.chat.completions.create(**fields)


# -- helpers of the package ------------------------------------------------------------------------


def test_parse_into_a_pydantic_model(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smol", messages=ASK, response_format=City, max_tokens=60, temperature=0
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.parsed == City(city="Paris", is_capital=True)


def test_parse_of_a_cut_answer_raises(client: openai.OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            model="smol", messages=ASK, response_format=City, max_tokens=3, temperature=0
        )


def test_stream_helper_collects_the_whole_answer(client: openai.OpenAI) -> None:
    whole = chat(client, max_tokens=16, logprobs=True, top_logprobs=2)
    with client.chat.completions.stream(
        model="smol",
        messages=ASK,
        max_tokens=16,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert {"content.delta", "content.done", "logprobs.content.done"} <= set(kinds)
    assert choice.message.content == whole.choices[0].message.content
    assert choice.finish_reason == whole.choices[0].finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.token for entry in choice.logprobs.content] == [
        entry.token for entry in whole.choices[0].logprobs.content
    ]
    assert final.usage is not None and final.usage.total_tokens == whole.usage.total_tokens


def test_stream_helper_parses(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="smol", messages=ASK, response_format=City, max_tokens=60, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)


# -- sampling --------------------------------------------------------------------------------------


def test_seed_repeats_and_samples_differ(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"n": 3, "temperature": 1.2, "max_tokens": 12}
    first, again, other = (
        [choice.message.content for choice in chat(client, seed=seed, **fields).choices]
        for seed in (7, 7, 8)
    )
    assert first == again and first != other
    assert len(first) == 3


def test_nulls_count_as_absent(client: openai.OpenAI) -> None:
    names = "stop n logit_bias tools tool_choice stream stream_options seed logprobs top_logprobs"
    names += " frequency_penalty presence_penalty response_format user model top_p"
    answer = chat(client, extra_body=dict.fromkeys(names.split()))
    assert answer.choices[0].message.content == chat(client).choices[0].message.content


def test_tools_are_accepted_and_tool_messages_too(client: openai.OpenAI) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
    }
    messages = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    for choice in ("auto", "none"):
        answer = chat(client, messages=messages, tools=[TOOL], tool_choice=choice)
        assert answer.choices[0].message.content


# -- many clients, and clients that leave ----------------------------------------------------------


def test_twenty_async_streams(server: SmallServer) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> tuple[str, int]:
        text, num_tokens = "", 0
        stream = await client.completions.create(
            model="smol",
            prompt=f"{number}, {number + 1}, {number + 2},",
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            num_tokens = chunk.usage.completion_tokens if chunk.usage else num_tokens
            text += "".join(choice.text for choice in chunk.choices)
        return text, num_tokens

    async def run() -> list[tuple[str, int]]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="x") as client:
            return await asyncio.gather(*(one(client, number) for number in range(20)))

    answers = asyncio.run(run())
    assert all(num_tokens == 6 for _, num_tokens in answers)
    # No text of one stream may end up in another.
    for number, (text, _) in enumerate(answers):
        assert text.lstrip().startswith(str(number + 3)), (number, text)


def test_closing_a_stream_ends_the_request(client: openai.OpenAI, server: SmallServer) -> None:
    stream = chat(client, max_tokens=4000, stream=True, extra_body={"ignore_eos": True})
    for _ in zip(range(4), stream):
        pass
    assert server.num_requests() == 1
    stream.close()
    deadline = time.monotonic() + 20
    while server.num_requests() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert server.num_requests() == 0


def test_cancelled_and_timed_out_requests_leave_nothing(server: SmallServer) -> None:
    endless: dict[str, Any] = {
        "model": "smol",
        "max_tokens": 2000,
        "extra_body": {"ignore_eos": True},
    }

    async def cancelled(client: openai.AsyncOpenAI, number: int) -> None:
        stream = await client.completions.create(prompt=f"{number},", stream=True, **endless)
        async with stream:
            async for _ in stream:
                pass

    async def timed_out(client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.APITimeoutError):
            await client.completions.create(prompt="A, B,", n=2, timeout=0.5, **endless)

    async def run() -> None:
        async with openai.AsyncOpenAI(
            base_url=server.url + "/v1", api_key="x", max_retries=0
        ) as client:
            streams = [asyncio.create_task(cancelled(client, number)) for number in range(6)]
            await asyncio.gather(timed_out(client), timed_out(client))
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)

    asyncio.run(run())
    deadline = time.monotonic() + 20
    while server.num_requests() and time.monotonic() < deadline:
        time.sleep(0.1)
    load = server.get("/v1/loads").json()["loads"][0]
    assert load["num_total_reqs"] == 0 and load["num_used_tokens"] == 0


# -- errors ----------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"content": "no role"}]}, "role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "image_url"),
        ({"model": 5}, "model"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 10**18}, "max_tokens must be at most"),
        ({"messages": [{"role": "user"}]}, "no content"),
        ({"messages": [{"role": "x", "content": "a"}]}, "role"),
        ({"n": 0}, "n must be"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logit_bias": {"word": 1}}, "logit_bias"),
        ({"stop": ["x"] * 40}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "bad", "schema": {"type": "nonsense"}},
                }
            },
            "json_schema",
        ),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_bad_fields(
    client: openai.OpenAI, fields: dict[str, Any], message: str, is_stream: bool
) -> None:
    """A client's fault is a BadRequestError that names the field; streams raise it as early."""
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        chat(client, stream=is_stream, **fields)
    assert caught.value.status_code == 400


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "a{1000000}"),
        ("ebnf", 'root ::= "a"{1000000}'),
        ("json_schema", '{"type": "string", "pattern": "^a{1000000}$"}'),
    ],
)
def test_a_grammar_that_hits_a_limit_is_named(client: openai.OpenAI, kind: str, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"[Tt]he {kind} ") as caught:
        chat(client, extra_body={kind: text}, max_tokens=1000)
    assert "too many" in str(caught.value).lower()
