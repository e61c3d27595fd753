"""Where the schedulers' outputs go: through the detokenizer only where it has work to do."""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sglang.srt.managers.io_struct import BatchStrOutput, BatchTokenIDOutput, RequestOutput
from sglang.srt.managers.ipc import PullChannel
from sglang.srt.managers.scheduler_process import RankSetup, _open_channels


@pytest.mark.parametrize("skip_tokenizer_init", [False, True])
def test_outputs_that_get_no_text_go_straight_to_the_front(
    tmp_path: Path, skip_tokenizer_init: bool
) -> None:
    ports = SimpleNamespace(
        scheduler_input_ipc_names=[f"ipc://{tmp_path}/scheduler"],
        tokenizer_ipc_name=f"ipc://{tmp_path}/front",
        detokenizer_ipc_name=f"ipc://{tmp_path}/detokenizer",
    )
    setup: Any = SimpleNamespace(
        is_rank_zero=True,
        dp_rank=0,
        port_args=ports,
        server_args=SimpleNamespace(skip_tokenizer_init=skip_tokenizer_init),
    )
    front, detokenizer = (
        PullChannel(ports.tokenizer_ipc_name),
        PullChannel(ports.detokenizer_ipc_name),
    )
    send = _open_channels(cast(RankSetup, setup)).send_output
    assert send is not None
    output = RequestOutput(
        rid="r",
        new_token_ids=array("i", [7]),
        finish_reason=None,
        prompt_tokens=1,
        completion_tokens=1,
    )
    batch = BatchTokenIDOutput(outputs=[output], dp_rank=3)
    send(batch)
    if skip_tokenizer_init:
        assert front.recv(10) == BatchStrOutput(outputs=[output], dp_rank=3)
        assert detokenizer.recv(0) is None
    else:
        assert detokenizer.recv(10) == batch
        assert front.recv(0) is None
    front.close()
    detokenizer.close()
