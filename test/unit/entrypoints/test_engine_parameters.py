"""The parameters of `Engine.generate` and the fields of the message that they become."""

from __future__ import annotations

import inspect
from dataclasses import fields

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import GenerateReqInput


def test_both_ways_to_generate_take_the_same() -> None:
    parameters = inspect.signature(Engine.generate).parameters
    assert list(parameters) == list(inspect.signature(Engine.async_generate).parameters)


def test_what_shapes_the_cache_can_be_said_in_process_too() -> None:
    parameters = set(inspect.signature(Engine.generate).parameters) - {"self", "prompt"}
    known = {field.name for field in fields(GenerateReqInput)}
    assert parameters <= known
    assert {"extra_key", "cache_salt", "priority"} <= parameters
