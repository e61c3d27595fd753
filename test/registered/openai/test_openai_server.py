"""The OpenAI endpoints of a real server, through the openai package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.small_server import SmallServer, serve

register_cpu_ci(est_time=40, suite="openai")

ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server(small_model: Path) -> Iterator[SmallServer]:
    flags = ("--served-model-name", "smol", "--enable-cache-report")
    with serve(str(small_model), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: SmallServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="None", max_retries=0)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol", messages=ASK, temperature=0, max_tokens=24
    )
    choice = answer.choices[0]
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens > 2
    again = client.chat.completions.create(model="smol", messages=ASK, temperature=0, max_tokens=24)
    assert again.choices[0].message.content == choice.message.content
    assert again.usage is not None and again.usage.prompt_tokens_details is not None
    assert (again.usage.prompt_tokens_details.cached_tokens or 0) > 0


def test_chat_stream_equals_the_whole(client: openai.OpenAI) -> None:
    args: dict[str, Any] = {
        "model": "smol",
        "messages": ASK,
        "temperature": 0,
        "max_tokens": 24,
        "n": 2,
    }
    whole = client.chat.completions.create(**args)
    joined = ["", ""]
    usage = None
    stream = client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **args
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            joined[choice.index] += choice.delta.content or ""
    assert joined == [choice.message.content for choice in whole.choices]
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smol", messages=ASK, temperature=0, max_tokens=6, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].logprob >= entry.logprob - 1e-4
        assert entry.bytes == list(entry.token.encode())


def test_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="smol",
        messages=ASK,
        temperature=0,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "city", "schema": schema, "strict": True},
        },
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"city"}


def test_completion_scoring_with_echo(client: openai.OpenAI) -> None:
    """What evaluation harnesses do: the logprobs of a given text."""
    text = "The capital of France is Paris"
    answer = client.completions.create(
        model="smol", prompt=text, max_tokens=1, temperature=0, echo=True, logprobs=1
    )
    choice = answer.choices[0]
    assert choice.text.startswith(text) and choice.logprobs is not None
    tokens, values = choice.logprobs.tokens, choice.logprobs.token_logprobs
    assert tokens is not None and values is not None
    assert "".join(tokens[:-1]) == text and values[0] is None
    assert all(value is not None and value <= 0 for value in values[1:])


def test_completion_batch_and_samples(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smol", prompt=["One, two,", "A, B,"], n=2, max_tokens=4, temperature=0
    )
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]


def test_stop_and_limits(client: openai.OpenAI, server: SmallServer) -> None:
    answer = client.completions.create(
        model="smol", prompt="1, 2, 3, 4,", max_tokens=30, temperature=0, stop=[" 7"]
    )
    assert answer.choices[0].finish_reason == "stop" and "7" not in answer.choices[0].text
    raw = {"prompt": "1, 2, 3, 4,", "max_tokens": 30, "temperature": 0, "stop": " 7"}
    choice = server.post("/v1/completions", json=raw).json()["choices"][0]
    assert choice["matched_stop"] == " 7"
    short = client.chat.completions.create(model="smol", messages=ASK, max_tokens=2)
    assert short.choices[0].finish_reason == "length"


def test_continue_final_message(server: SmallServer) -> None:
    messages = [*ASK, {"role": "assistant", "content": "The capital of France is"}]
    body = {
        "messages": messages,
        "continue_final_message": True,
        "max_tokens": 4,
        "temperature": 0,
    }
    content = server.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    assert content["content"].startswith(" Paris")


def test_errors_reach_the_client_as_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="top_p"):
        client.chat.completions.create(model="smol", messages=ASK, top_p=3)
    with pytest.raises(openai.BadRequestError, match="longer than|context length"):
        client.completions.create(model="smol", prompt="word " * 9000)
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="smol", prompt="")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")
    assert client.models.retrieve("smol").id == "smol"
