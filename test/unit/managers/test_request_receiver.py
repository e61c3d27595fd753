"""What a scheduler step receives: everything in its order, what is abandoned at once together."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang.srt.managers.io_struct import (
    AbandonReq,
    AbortReq,
    ContinueGenerationReqInput,
    PauseGenerationReqInput,
)
from sglang.srt.managers.ipc import PullChannel, PushChannel
from sglang.srt.managers.request_receiver import RequestReceiver

PAUSE, GO_ON = PauseGenerationReqInput(control_id="p"), ContinueGenerationReqInput(control_id="c")


def receive(folder: Path, messages: list[object]) -> list[object]:
    """What one step gets of messages that have all arrived."""
    pull = PullChannel(f"ipc://{folder}/s")
    push = PushChannel(f"ipc://{folder}/s")
    receiver = RequestReceiver(pull, None)
    received: list[object] = []
    try:
        for message in messages:
            push.send(message)
        push.send(GO_ON)
        while GO_ON not in received:
            pull.wait(10)
            received += receiver.recv(idle=False, poll_grammars=list).messages
    finally:
        push.close()
        pull.close()
    return received[:-1]


def test_neighbours_without_a_client_arrive_as_one(tmp_path: Path) -> None:
    received = receive(tmp_path, [AbandonReq(rids={f"r{i}"}) for i in range(3000)])
    rids = [rid for message in received if isinstance(message, AbandonReq) for rid in message.rids]
    assert len(rids) == 3000 and set(rids) == {f"r{i}" for i in range(3000)}
    assert len(received) < 300  # one, but for what had not arrived yet


@pytest.mark.parametrize("between", [PAUSE, AbortReq(rid="x")])
def test_what_lies_between_keeps_its_place(tmp_path: Path, between: object) -> None:
    messages = [AbandonReq(rids={"a"}), between, AbandonReq(rids={"b"})]
    assert receive(tmp_path, messages) == messages
