"""The codec and the channels between processes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers import io_struct, ipc
from sglang.srt.managers.io_struct import (
    BatchStrOutput,
    BatchTokenIDOutput,
    DecodeParams,
    FlushCacheReqInput,
    GetLoadsReqOutput,
    LogprobDelta,
    RequestOutput,
)
from sglang.srt.managers.ipc import (
    AsyncPullChannel,
    IpcError,
    PullChannel,
    PushChannel,
    decode,
    encode,
)
from sglang.srt.sampling.sampling_params import SamplingParams

# Requests as clients write them stay inside the front process.
FRONT_ONLY = {"GenerateReqInput", "EmbeddingReqInput", "ConfigureLoggingReq"}


def _output(rid: str = "r", tokens: list[int] | None = None, **kwargs: Any) -> RequestOutput:
    return RequestOutput(
        rid=rid,
        new_token_ids=array("i", tokens or []),
        finish_reason=kwargs.pop("finish_reason", None),
        prompt_tokens=3,
        completion_tokens=1,
        **kwargs,
    )


def _instance(cls: type) -> Any:
    """An instance with some value for every field without a default."""
    values: dict[str, Any] = {}
    for spec in dataclasses.fields(cls):
        if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
            values[spec.name] = {
                "str": "x",
                "set[str]": {"x", "y"},
                "str | None": "y",
                "int": 1,
                "bool": True,
                "TokenIds": array("i", [1, -2, 2**31 - 1]),
                "SamplingParams": SamplingParams(max_new_tokens=4, stop=["a"]),
                "dict[str, Any] | None": {"type": "stop", "matched": 3},
                "dict[str, Any]": {"a": [1.5, None]},
                "dict[str, float]": {"a": 1.5},
                "dict[str, str]": {"a": "b"},
                "list[int]": [1],
                "list[list[int]]": [[1, 2], []],
                "list[str]": ["</s>"],
                "list[RequestOutput]": [_output(tokens=[5])],
                "list[TokenizedGenerateReqInput]": [],
                "list[Any]": ["text", b"bytes"],
            }[str(spec.type)]
    return cls(**values)


@pytest.mark.parametrize("name", sorted(set(ipc._registry._classes) - FRONT_ONLY))
def test_every_message_comes_back_equal(name: str) -> None:
    message = _instance(ipc._registry._classes[name])
    decoded = decode(encode(message))
    assert type(decoded) is type(message)
    assert decoded == message


def test_nested_fields_come_back_with_their_types() -> None:
    message = BatchTokenIDOutput(
        outputs=[
            _output(
                tokens=[1, 2, 128000],
                finish_reason={"type": "length", "length": 8},
                logprobs=LogprobDelta(
                    input_val=[None, -0.5],
                    input_idx=array("i", [7, 8]),
                    output_val=[-1.25],
                    output_idx=array("i", [9]),
                    output_top=[([-1.0, -2.0], [3, 4]), None],
                ),
                decode=DecodeParams(
                    skip_special_tokens=True,
                    no_stop_trim=False,
                    stop_strs=["é", "\n"],
                ),
                weight_versions=[("v1", 0, 3)],
                new_text="häß\N{GRINNING FACE}",
            )
        ],
        dp_rank=1,
    )
    output = decode(encode(message)).outputs[0]
    assert output == message.outputs[0]
    assert isinstance(output.new_token_ids, array) and output.new_token_ids.typecode == "i"
    assert isinstance(output.logprobs.output_top[0], tuple)
    assert output.weight_versions == [("v1", 0, 3)]


def test_the_wire_form_is_a_name_and_fields() -> None:
    name, fields = msgspec.msgpack.decode(encode(FlushCacheReqInput(control_id="c")))
    assert name == "FlushCacheReqInput"
    assert fields == {"control_id": "c", "timeout_s": 0.0}


def test_token_ids_are_packed() -> None:
    empty = len(encode(BatchStrOutput(outputs=[_output()])))
    full = len(encode(BatchStrOutput(outputs=[_output(tokens=[2**30] * 1000)])))
    assert 4000 <= full - empty <= 4008


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50),
    st.text(max_size=20),
    st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False) | st.text() | st.none()),
)
def test_any_content_survives(tokens: list[int], text: str, details: dict[str, Any]) -> None:
    message = BatchStrOutput(
        outputs=[_output(text, tokens, new_text=text, cached_tokens_details=details)]
    )
    assert decode(encode(message)) == message


def test_untyped_fields_may_hold_token_arrays() -> None:
    message = GetLoadsReqOutput(load={"ids": array("i", [1, 2])})
    assert decode(encode(message)).load["ids"] == array("i", [1, 2])


class _Foreign:
    pass


@dataclasses.dataclass
class FlushCacheReqOutput:
    """Same name as a message, another class."""


@pytest.mark.parametrize(
    "value",
    [
        _Foreign(),
        {"a": 1},
        "text",
        FlushCacheReqOutput(),
        GetLoadsReqOutput(load={"x": _Foreign()}),
        GetLoadsReqOutput(load={"x": 2**70}),
    ],
)
def test_encoding_refuses_what_is_no_message(value: object) -> None:
    with pytest.raises(IpcError):
        encode(value)


def _named(name: str, fields: Any) -> bytes:
    return msgspec.msgpack.encode([name, fields])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x92",
        b"\x00\x01\x02\x03",
        b"\x92\xa5ab",
        b"\x92\xa2\xff\xff\x80",
        _named("NoSuchMessage", {}),
        _named("SamplingParams", {}),
        _named("FlushCacheReqInput", {"timeout_s": "soon"}),
        _named("AbortReq", [1, 2]),
        _named("TokenizedGenerateReqInput", {}),
        _named("GetLoadsReqOutput", {"load": {"x": msgspec.msgpack.Ext(9, b"abc")}}),
        encode(FlushCacheReqInput())[:-1],
        encode(FlushCacheReqInput()) + b"\x00",
    ],
)
def test_decoding_refuses_what_does_not_fit(data: bytes) -> None:
    with pytest.raises(IpcError):
        decode(data)


def test_front_only_requests_are_not_on_the_wire() -> None:
    with pytest.raises(IpcError, match="GenerateReqInput"):
        decode(encode(io_struct.GenerateReqInput(text="a")))


def test_a_full_batch_is_coded_well_under_a_millisecond() -> None:
    message = BatchTokenIDOutput(outputs=[_output(f"{i:032x}", [i]) for i in range(256)])
    best_encode = best_decode = 1.0
    for _ in range(20):
        start = time.perf_counter()
        data = encode(message)
        middle = time.perf_counter()
        decode(data)
        best_encode = min(best_encode, middle - start)
        best_decode = min(best_decode, time.perf_counter() - middle)
    # Typically 0.3 ms each; the limit leaves room for a loaded machine.
    assert best_encode < 1e-3 and best_decode < 1e-3


# ------------------------------------------------------------------------------------------------
# Channels
# ------------------------------------------------------------------------------------------------


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


def test_messages_sent_before_the_reader_exists_arrive_in_order(address: str) -> None:
    push = PushChannel(address)
    for number in range(2000):  # beyond zmq's default queue limit
        push.send(FlushCacheReqInput(timeout_s=number))
    pull = PullChannel(address)
    received: list[Any] = []
    while len(received) < 2000:
        assert pull.wait(5)
        received += pull.recv_all_nowait()
    assert [message.timeout_s for message in received] == list(range(2000))
    push.close()
    pull.close()


def test_a_writer_finds_a_reader_that_comes_a_moment_later_at_once(tmp_path: Path) -> None:
    """The processes of a server start together; the first request need not wait."""
    best_s = 1.0
    for number in range(3):
        address = f"ipc://{tmp_path}/{number}"
        push = PushChannel(address)
        push.send(FlushCacheReqInput())
        time.sleep(0.01)  # the first attempt has failed
        pull = PullChannel(address)
        start = time.monotonic()
        assert pull.wait(5)
        best_s = min(best_s, time.monotonic() - start)
        push.close()
        pull.close()
    assert best_s < 0.05


def test_receiving_without_messages_does_not_block(address: str) -> None:
    pull = PullChannel(address)
    assert pull.recv_all_nowait() == []
    start = time.monotonic()
    assert pull.recv(0.05) is None
    assert 0.04 < time.monotonic() - start < 2
    pull.close()


def test_several_writers_one_reader(address: str) -> None:
    pull = PullChannel(address)
    pushes = [PushChannel(address) for _ in range(3)]
    for rank, push in enumerate(pushes):
        push.send(BatchStrOutput(outputs=[], dp_rank=rank))
    ranks: set[int] = set()
    while len(ranks) < 3:
        message = pull.recv(5)
        assert message is not None
        ranks.add(message.dp_rank)
    for push in pushes:
        push.close()
    pull.close()


def test_two_readers_of_one_channel_are_refused() -> None:
    import zmq

    tcp = "tcp://127.0.0.1:*"
    first = PullChannel(tcp)
    bound = str(first._socket.getsockopt_string(zmq.LAST_ENDPOINT))
    with pytest.raises(zmq.ZMQError):
        PullChannel(bound)
    first.close()


async def _receive(pull: AsyncPullChannel, count: int) -> list[Any]:
    received: list[Any] = []
    while len(received) < count:
        received += await asyncio.wait_for(pull.recv_all(), 5)
    return received


@pytest.mark.parametrize("policy", ["asyncio", "uvloop"])
def test_async_reader_wakes_for_every_message(address: str, policy: str) -> None:
    pull = AsyncPullChannel(address)
    push = PushChannel(address)

    def writer() -> None:
        for number in range(300):
            push.send(FlushCacheReqInput(timeout_s=number))
            if number % 10 == 0:
                time.sleep(0.002)

    thread = threading.Thread(target=writer)
    thread.start()
    if policy == "uvloop":
        import uvloop

        received = uvloop.run(_receive(pull, 300))
    else:
        received = asyncio.run(_receive(pull, 300))
    thread.join()
    assert [message.timeout_s for message in received] == list(range(300))
    push.close()
    pull.close()


def test_async_reader_may_move_to_another_loop(address: str) -> None:
    pull = AsyncPullChannel(address)
    push = PushChannel(address)
    for number in range(3):
        push.send(FlushCacheReqInput(timeout_s=number))
        assert [m.timeout_s for m in asyncio.run(_receive(pull, 1))] == [number]
    push.close()
    pull.close()


def test_cancelled_wait_loses_nothing(address: str) -> None:
    pull = AsyncPullChannel(address)
    push = PushChannel(address)

    async def scenario() -> list[Any]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pull.recv_all(), 0.02)
        push.send(FlushCacheReqInput(timeout_s=1))
        return await _receive(pull, 1)

    assert len(asyncio.run(scenario())) == 1
    push.close()
    pull.close()
