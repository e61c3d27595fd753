"""What is logged of a request, whatever an in-process caller has put into it."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.managers.io_struct import ConfigureLoggingReq, GenerateReqInput
from sglang.srt.managers.request_logger import RequestLogger
from sglang.srt.managers.request_normalizer import split_request

ANSWER: dict[str, Any] = {"text": "x", "output_ids": [1], "meta_info": {"id": "r"}}
# Keys that are numbers, and a set: what a Python caller may send and no JSON can.
PARAMS: dict[str, Any] = {"logit_bias": {5: 1.0}, "stop_token_ids": {7}}


@pytest.fixture
def request_of_caller() -> GenerateReqInput:
    obj = GenerateReqInput(input_ids=[1, 2], sampling_params=PARAMS, rid="r")
    split_request(obj)  # the server takes it
    return obj


def test_json_lines_hold_parameters_that_are_no_json(
    request_of_caller: GenerateReqInput, caplog: pytest.LogCaptureFixture
) -> None:
    logs = RequestLogger(True, 1, "json")
    with caplog.at_level(logging.INFO):
        logs.log_received(request_of_caller)
        logs.log_finished(request_of_caller, [ANSWER])
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    assert [line["event"] for line in lines] == ["request.received", "request.finished"]
    for line in lines:
        assert line["sampling_params"] == {"logit_bias": {"5": 1.0}, "stop_token_ids": "{7}"}


def test_dump_holds_parameters_that_are_no_json(
    request_of_caller: GenerateReqInput, tmp_path: Path
) -> None:
    logs = RequestLogger(False, 0, "text")
    logs.configure(ConfigureLoggingReq(dump_requests_folder=str(tmp_path)))
    logs.log_finished(request_of_caller, [ANSWER])
    (line,) = (tmp_path / "requests.jsonl").read_text().splitlines()
    assert json.loads(line)["request"]["sampling_params"]["logit_bias"] == {"5": 1.0}


def test_text_that_is_no_unicode_ends_neither_request_nor_server(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    obj = GenerateReqInput(text="\ud800", rid="r")
    logs = RequestLogger(True, 2, "json")
    logs.configure(ConfigureLoggingReq(dump_requests_folder=str(tmp_path)))
    with caplog.at_level(logging.INFO):
        logs.log_finished(obj, [ANSWER])
    assert "cannot be logged" in caplog.text
