"""The OpenAI endpoints over a socket, with the plain client and with the openai package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.entrypoints.http_stream import event
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openai.serving_base import (
    model_sampling_defaults,
    response_format_params,
)
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.template_manager import TemplateManager
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.server_args import ServerArgs
from sglang.test.fakes.front import Front, run_with_front
from sglang.test.fakes.http_front import HttpFront, serve_fake
from sglang.test.fakes.tiny_tokenizer import build_tiny_tokenizer, write_tiny_model

CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOKENIZER = build_tiny_tokenizer()


def say(text: str) -> Callable[[list[int]], list[int]]:
    """A script that answers any prompt with this text."""
    return lambda prompt: TOKENIZER.encode(text).ids


def sse(reply: Any) -> list[Any]:
    blocks = [block.removeprefix("data: ") for block in reply.text.split("\n\n") if block]
    assert blocks[-1] == "[DONE]"
    return [json.loads(block) for block in blocks[:-1]]


def sent(http: HttpFront) -> list[TokenizedGenerateReqInput]:
    return http.scheduler.of_type(TokenizedGenerateReqInput)


def prompt_text(request: TokenizedGenerateReqInput) -> str:
    return TOKENIZER.decode(request.input_ids.tolist(), skip_special_tokens=False)


# -- chat ------------------------------------------------------------------------------------------


def test_chat_answer(http: HttpFront) -> None:
    http.scheduler.script = say("hi!")
    body = {"messages": HELLO, "model": "any:thing", "max_tokens": 20, "unknown": 1, "stop": None}
    reply = http.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert answer["object"] == "chat.completion" and answer["model"] == "any:thing"
    (choice,) = answer["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "hi!",
        "reasoning_content": None,
        "tool_calls": None,
    }
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", None)
    assert choice["logprobs"] is None
    usage = answer["usage"]
    assert usage["completion_tokens"] == 3 and usage["prompt_tokens_details"] is None
    assert usage["total_tokens"] == usage["prompt_tokens"] + 3
    assert answer["metadata"]["weight_versions"][0]["start"] == 0
    assert prompt_text(sent(http)[0]) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"


def test_chat_stream_order(http: HttpFront) -> None:
    http.scheduler.script, http.scheduler.step_s = say("hi!"), 0.01
    body = {
        "messages": HELLO,
        "stream": True,
        "max_tokens": 20,
        "return_cached_tokens_details": True,
        "stream_options": {"include_usage": True},
    }
    chunks = sse(http.post(CHAT, json=body))
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert len({c["id"] for c in chunks}) == 1
    role, *content, finish, extension, usage = chunks
    assert role["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": None,
    }
    assert "".join(c["choices"][0]["delta"]["content"] for c in content) == "hi!"
    assert all(c["choices"][0]["finish_reason"] is None for c in content)
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert extension["choices"] == [] and extension["sglext"] == {"cached_tokens_details": None}
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 3


def test_chat_logprobs(http: HttpFront) -> None:
    http.scheduler.script = say("ab")
    body = {"messages": HELLO, "max_tokens": 9, "logprobs": True, "top_logprobs": 1}
    (choice,) = http.post(CHAT, json=body).json()["choices"]
    entry = {"token": "a", "bytes": [97], "logprob": -0.5}
    assert choice["logprobs"]["content"][0] == {**entry, "top_logprobs": [entry]}
    streamed = sse(http.post(CHAT, json={**body, "stream": True}))
    rows = [
        row
        for chunk in streamed
        for row in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [row["token"] for row in rows] == ["a", "b"]


def test_chat_logprobs_have_the_bytes_of_parts_of_characters(http: HttpFront) -> None:
    http.scheduler.script = say("🙂")
    body = {"messages": HELLO, "max_tokens": 9, "logprobs": True, "top_logprobs": 1}
    (choice,) = http.post(CHAT, json=body).json()["choices"]
    rows = choice["logprobs"]["content"]
    assert [row["bytes"] for row in rows] == [[byte] for byte in "🙂".encode()]
    assert [row["top_logprobs"][0]["bytes"] for row in rows] == [row["bytes"] for row in rows]
    assert bytes(byte for row in rows for byte in row["bytes"]).decode() == "🙂"


def test_chat_token_ids_whole_and_streamed(http: HttpFront) -> None:
    """Whole ids of every choice, however many chunks they came in; the block is choice 0's."""
    http.scheduler.script, http.scheduler.step_s = say("hi 🙂!"), 0.01
    ids = TOKENIZER.encode("hi 🙂!").ids
    body = {"messages": HELLO, "max_tokens": 20, "n": 2, "return_token_ids": True}
    answer = http.post(CHAT, json=body).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [ids, ids]
    prompt_ids = sent(http)[0].input_ids.tolist()
    assert answer["sglext"] == {"input_ids": prompt_ids, "output_ids": ids}
    chunks = sse(http.post(CHAT, json={**body, "stream": True}))
    (extension,) = (chunk["sglext"] for chunk in chunks if "sglext" in chunk)
    assert extension == answer["sglext"]
    ends = [c for chunk in chunks for c in chunk["choices"] if c["finish_reason"] is not None]
    assert {end["index"]: end["token_ids"] for end in ends} == {0: ids, 1: ids}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_ids_of_health_checks_are_refused(http: HttpFront, path: str) -> None:
    for rid in ("HEALTH_CHECK_x", ["HEALTH_CHECK"]):
        body = {"messages": HELLO, "prompt": "a", "max_tokens": 2, "rid": rid}
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and "HEALTH_CHECK" in reply.json()["error"]["message"]
    assert sent(http) == []


def test_chat_samples_count_the_prompt_once(http: HttpFront) -> None:
    body = {"messages": HELLO, "n": 3, "max_tokens": 4, "seed": 1}
    answer = http.post(CHAT, json=body).json()
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 12
    one = http.post(CHAT, json={**body, "n": 1}).json()
    assert answer["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    streamed = sse(http.post(CHAT, json={**body, "stream": True}))
    finishes = [c["choices"][0]["index"] for c in streamed if c["choices"][0]["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2]


def test_chat_sampling_fields_reach_the_engine(http: HttpFront) -> None:
    body = {
        "messages": HELLO,
        "max_tokens": 50,
        "max_completion_tokens": 5,
        "min_tokens": "2",  # numbers may come as text
        "temperature": 0.5,
        "top_k": 7,
        "stop": "END",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "no_stop_trim": True,
        "logit_bias": {"5": -1},
        "seed": 11,
        "priority": 2,
        "extra_key": "tenant",
    }
    assert http.post(CHAT, json=body).status_code == 200
    request = sent(http)[0]
    params = request.sampling_params
    assert (params.max_new_tokens, params.min_new_tokens) == (5, 2)
    assert (params.temperature, params.top_k, params.sampling_seed) == (0.5, 7, 11)
    assert params.stop_strs == ["END"] and params.stop_token_ids == [3]
    assert params.ignore_eos and params.no_stop_trim and params.logit_bias == {"5": -1.0}
    assert (request.priority, request.extra_key) == (2, "tenant")


def test_chat_without_limit_fills_the_context(http: HttpFront) -> None:
    answer = http.post(CHAT, json={"messages": HELLO}).json()
    assert answer["usage"]["total_tokens"] == http.front.manager.context_len


def test_chat_parts_tools_and_continuation(http: HttpFront) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    base = {"max_tokens": 1}
    http.post(CHAT, json={**base, "messages": [{"role": "user", "content": parts}]})
    http.post(CHAT, json={**base, "messages": HELLO, "tools": tools})
    http.post(CHAT, json={**base, "messages": HELLO, "tools": tools, "tool_choice": "none"})
    opened = [*HELLO, {"role": "assistant", "content": "I am"}]
    http.post(CHAT, json={**base, "messages": opened, "continue_final_message": True})
    http.post(CHAT, json={**base, "input_ids": [1, 2, 3]})
    texts = [prompt_text(request) for request in sent(http)]
    assert "user\na b<|end|>" in texts[0]
    assert '[tools: [{"type": "function"' in texts[1] and "tools" not in texts[2]
    assert texts[3].endswith("<|start|>assistant\nI am")
    assert sent(http)[4].input_ids.tolist() == [1, 2, 3]


BAD_CHAT = [
    {},
    {"messages": []},
    {"messages": ["x"]},
    {"messages": [{"content": "x"}]},
    {"messages": [{"role": "user", "content": 3}]},
    {"messages": [{"role": "user", "content": [5]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": HELLO, "max_tokens": 0},
    {"messages": HELLO, "n": 0},
    {"messages": HELLO, "temperature": -1},
    {"messages": HELLO, "top_logprobs": 3},
    {"messages": HELLO, "logprobs": True, "top_logprobs": 10**6},
    {"messages": HELLO, "tool_choice": "required", "tools": []},
    {"messages": HELLO, "response_format": {"type": "yaml"}},
    {"messages": HELLO, "response_format": {"type": "json_schema"}},
    {"messages": HELLO, "regex": "a", "ebnf": "b"},
    {"messages": HELLO, "continue_final_message": True},
    {"messages": HELLO, "stream": "maybe"},
    {"messages": HELLO, "stop": 3},
    {"input_ids": []},
    {"input_ids": [10**9]},
    [],
    "x",
]


@pytest.mark.parametrize("body", BAD_CHAT)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_chat(http: HttpFront, body: Any, stream: bool) -> None:
    if stream and isinstance(body, dict):
        body = {"stream": True, **body}
    reply = http.post(CHAT, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()
    assert error["object"] == "error" and error["code"] == 400 and error["message"]
    # Some clients look for the message here only.
    assert error.pop("error") == error
    assert sent(http) == []


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content has a text part"),
        ([*HELLO, {"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[1].con"),
        ([{"role": "x", "content": "a"}], "messages[0].role must be one of system, developer, "),
        ([{"role": "", "content": "a"}], "messages[0].role must be one of system, developer, "),
        ([*HELLO, {"role": "user"}], "messages[1] has no content: a message of the user needs "),
        ([{"role": "user", "content": None}], "messages[0] has no content"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
def test_bad_messages_are_described(
    http: HttpFront, messages: list[Any], reason: str, path: str
) -> None:
    reply = http.post(path, json={"messages": messages})
    assert reply.status_code == 400 and reply.json()["object"] == "error"
    assert reply.json()["message"].startswith(reason)
    assert "of type 'text'" not in reply.json()["message"]


def test_every_role_of_templates_is_taken(http: HttpFront) -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "a"},
        {"role": "Developer", "content": "b"},
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "c"},
        {"role": "function", "content": "d"},
        {"role": "assistant", "content": None},
    ]
    reply = http.post(CHAT, json={"messages": messages, "max_tokens": 1})
    assert reply.status_code == 200, reply.text
    assert "<|start|>developer\nb<|end|>" in prompt_text(sent(http)[0])


@pytest.mark.parametrize(
    ("path", "field"),
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), ("/v1/completions", "max_tokens")],
)
@pytest.mark.parametrize(
    ("value", "bound"),
    [(10**18, "at most 2147483647"), (2**31, "at most 2147483647"), (0, "at least 1")],
)
def test_limits_of_tokens_are_named_as_the_client_names_them(
    http: HttpFront, path: str, field: str, value: int, bound: str
) -> None:
    reply = http.post(path, json={"messages": HELLO, "prompt": "a", field: value})
    assert reply.status_code == 400
    message = reply.json()["message"]
    assert message.startswith(f"{field} must be {bound}") and message.endswith(f"got {value}.")


def test_content_type_must_be_json(http: HttpFront) -> None:
    body = json.dumps({"messages": HELLO})
    for path in (CHAT, "/v1/completions", "/v1/tokenize"):
        reply = http.post(path, data=body, headers={"content-type": "text/plain"})
        assert reply.status_code == 400 and "application/json" in reply.json()["message"]
    headers = {"content-type": "application/json; charset=utf-8"}
    body = json.dumps({"messages": HELLO, "max_tokens": 2})
    assert http.post(CHAT, data=body, headers=headers).status_code == 200


# -- completions -----------------------------------------------------------------------------------


def test_completion_forms_of_prompts(http: HttpFront) -> None:
    ids = TOKENIZER.encode("ab").ids
    for prompt, texts in (
        ("ab", ["abab"]),
        (["ab", "cd"], ["abab", "cdcd"]),
        (ids, ["abab"]),
        ([ids, ids], ["abab", "abab"]),
        (["ab"], ["abab"]),
    ):
        reply = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4})
        assert [c["text"] for c in reply.json()["choices"]] == texts
    answer = reply.json()
    assert answer["object"] == "text_completion" and answer["choices"][0]["logprobs"] is None
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [1, "a"], None, 3, [[1], [2.5]], {"a": 1}])
def test_bad_prompts(http: HttpFront, prompt: Any) -> None:
    reply = http.post("/v1/completions", json={"prompt": prompt})
    assert reply.status_code == 400 and reply.json()["object"] == "error"


def test_completion_samples_are_prompt_major(http: HttpFront) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 2, "echo": True}
    answer = http.post("/v1/completions", json=body).json()
    assert [c["text"] for c in answer["choices"]] == ["aaa", "aaa", "bbb", "bbb"]
    assert answer["usage"]["prompt_tokens"] == 2 and answer["usage"]["completion_tokens"] == 8
    streamed = sse(http.post("/v1/completions", json={**body, "stream": True}))
    joined: dict[int, str] = {}
    for chunk in streamed:
        (choice,) = chunk["choices"]
        joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    assert joined == {0: "aaa", 1: "aaa", 2: "bbb", 3: "bbb"}


def test_completion_logprobs_with_echo(http: HttpFront) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "logprobs": 1, "echo": True}
    logprobs = http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "a", "b"]
    assert logprobs["token_logprobs"] == [None, -1.0, -0.5, -0.5]
    assert logprobs["top_logprobs"] == [None, None, {"a": -0.5}, {"b": -0.5}]
    assert logprobs["text_offset"] == [-1] * 4
    streamed = sse(http.post("/v1/completions", json={**body, "stream": True}))
    tokens = [t for c in streamed for t in c["choices"][0]["logprobs"]["tokens"]]
    assert tokens == ["a", "b", "a", "b"]


def test_completion_logprobs_without_a_tokenizer(tmp_path: Path) -> None:
    async def body(front: Front) -> None:
        serving = OpenAIServingCompletion(front.manager, TemplateManager(None, None))
        request = CompletionRequest(prompt=[5, 6], max_tokens=2, logprobs=1)
        whole = (await serving.create(request, None))["choices"][0]["logprobs"]
        assert whole["tokens"] == ["token_id:5", "token_id:6"]
        assert whole["top_logprobs"] == [{"token_id:5": -0.5}, {"token_id:6": -0.5}]
        request.stream = True
        chunks = [event(chunk) async for chunk in serving.stream(request, None)]
        text = b"".join(chunks).decode()
        assert text.count('"token_id:5"') == text.count('"token_id:6"') == 2

    run_with_front(tmp_path, body, skip_tokenizer_init=True)


def test_completion_token_ids(http: HttpFront) -> None:
    body = {"prompt": "ab", "max_tokens": 2, "return_token_ids": True}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    assert choice["token_ids"] == choice["prompt_token_ids"] == TOKENIZER.encode("ab").ids


@pytest.mark.parametrize("extra", [{"suffix": "x"}, {"best_of": 3}, {"max_tokens": 0}])
def test_unsupported_completion_fields(http: HttpFront, extra: dict[str, Any]) -> None:
    assert http.post("/v1/completions", json={"prompt": "a", **extra}).status_code == 400


def test_continuous_usage(http: HttpFront) -> None:
    http.scheduler.step_s = 0.01
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "ab", "max_tokens": 3, "stream": True, "stream_options": options}
    counts = [c["usage"]["completion_tokens"] for c in sse(http.post("/v1/completions", json=body))]
    assert counts == sorted(counts) and counts[-1] == 3


# -- models and tokenizer --------------------------------------------------------------------------


def test_models(http: HttpFront) -> None:
    (card,) = http.get("/v1/models").json()["data"]
    assert card["id"] == "tiny/one" and card["max_model_len"] == http.front.manager.context_len
    assert http.get("/v1/models/tiny/one").json()["id"] == "tiny/one"
    missing = http.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_tokenize_and_back(http: HttpFront) -> None:
    for prefix in ("", "/v1"):
        tokens = http.post(f"{prefix}/tokenize", json={"prompt": "hello 世"}).json()
        assert tokens["count"] == len(tokens["tokens"])
        text = http.post(f"{prefix}/detokenize", json={"tokens": tokens["tokens"]}).json()
        assert text == {"text": "hello 世"}
    batch = http.post("/tokenize", json={"prompt": ["a", "bb"]}).json()
    assert batch["count"] == [1, 2]
    for bad in ([-1], [10**9], ["a"], [[1], [True]]):
        assert http.post("/detokenize", json={"tokens": bad}).status_code == 400


# -- the openai package ----------------------------------------------------------------------------


def test_openai_client(http: HttpFront) -> None:
    import openai  # takes seconds: only by the worker that runs this

    http.scheduler.script = say("hi!")
    client = openai.OpenAI(base_url=http.url + "/v1", api_key="None", max_retries=0)
    answer = client.chat.completions.create(model="m", messages=HELLO, max_tokens=9)
    assert answer.choices[0].message.content == "hi!"
    stream = client.chat.completions.create(model="m", messages=HELLO, max_tokens=9, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == "hi!"
    text = client.completions.create(model="m", prompt="x", max_tokens=9).choices[0].text
    assert text == "hi!"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="m", messages=HELLO, temperature=-1)
    assert client.models.list().data[0].id == "tiny/one"


# -- pure parts ------------------------------------------------------------------------------------


def test_response_formats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert response_format_params(None) == response_format_params({"type": "text"}) == {}
    assert json.loads(response_format_params({"type": "json_object"})["json_schema"]) == {
        "type": "object"
    }
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert json.loads(response_format_params(wrapped)["json_schema"]) == schema
    tag = {"type": "structural_tag", "structures": [], "triggers": []}
    assert json.loads(response_format_params(tag)["structural_tag"]) == tag
    with pytest.raises(RequestError):
        response_format_params({"type": "json_schema", "json_schema": {"schema": 3}})


def test_generation_config_gives_chat_defaults(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = {"temperature": 0.3, "top_k": 0, "top_p": 0.9, "eos_token_id": 2}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    args = ServerArgs(model_path=str(tmp_path), device="cpu")
    assert model_sampling_defaults(args) == {"temperature": 0.3, "top_p": 0.9}
    args.sampling_defaults = "openai"
    assert model_sampling_defaults(args) == {}


def test_tokenize_messages_gives_the_chats_prompt(http: HttpFront) -> None:
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    chat = http.post("/v1/chat/completions", json=body).json()
    for path in ("/tokenize", "/v1/tokenize"):
        answer = http.post(path, json={"messages": messages}).json()
        assert answer["tokens"] == chat["sglext"]["input_ids"]
        assert answer["count"] == len(answer["tokens"]) > 5
    shorter = {"messages": messages, "add_generation_prompt": False}
    assert http.post("/tokenize", json=shorter).json()["count"] < answer["count"]


@pytest.mark.parametrize(
    "body",
    [{}, {"prompt": None}, {"messages": []}, {"prompt": "a", "messages": [{"role": "user"}]}],
)
def test_tokenize_needs_exactly_one_source(http: HttpFront, body: dict[str, Any]) -> None:
    reply = http.post("/tokenize", json=body)
    assert reply.status_code == 400 and reply.json()["object"] == "error"


def test_tokenize_of_empty_text_is_no_tokens(http: HttpFront) -> None:
    answer = http.post("/tokenize", json={"prompt": ""}).json()
    assert (answer["tokens"], answer["count"]) == ([], 0)


def test_detokenize_needs_tokens(http: HttpFront) -> None:
    for body in ({}, {"tokens": None}, {"token": [1]}):
        reply = http.post("/detokenize", json=body)
        assert reply.status_code == 400 and "tokens" in reply.json()["message"]
    assert http.post("/detokenize", json={"tokens": []}).json() == {"text": ""}


def test_chat_defaults_over_http_and_cache_report(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    with serve_fake(tmp_path, enable_cache_report=True) as http:
        answer = http.post(CHAT, json={"messages": HELLO, "max_tokens": 2}).json()
        assert sent(http)[0].sampling_params.temperature == 0.25
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        http.post(CHAT, json={"messages": HELLO, "max_tokens": 2, "temperature": 0.75})
        assert sent(http)[1].sampling_params.temperature == 0.75
