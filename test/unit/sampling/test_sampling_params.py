"""Parsing, ranges and derived fields of SamplingParams."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from sglang.srt.sampling.sampling_params import CLIENT_FIELDS, MAX_STOP_REGEX_WINDOW, SamplingParams

VOCAB_SIZE = 100

DOCUMENTED_DEFAULTS = {
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": None,
    "stop_token_ids": None,
    "stop_regex": None,
    "n": 1,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": None,
    "sampling_seed": None,
    "custom_params": None,
    "beam_width": None,
    "watermark": None,
    "stream_interval": None,
}


def test_defaults_are_the_documented_ones() -> None:
    parsed = SamplingParams.from_dict({})
    assert {name: getattr(parsed, name) for name in CLIENT_FIELDS} == DOCUMENTED_DEFAULTS
    parsed.verify(VOCAB_SIZE)


def test_null_means_default_except_for_the_output_length() -> None:
    parsed = SamplingParams.from_dict(dict.fromkeys(DOCUMENTED_DEFAULTS))
    expected = SamplingParams(max_new_tokens=None)
    assert parsed == expected
    assert SamplingParams.from_dict(None) == SamplingParams()


def test_preferred_values_lie_under_the_request() -> None:
    preferred = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 9}
    parsed = SamplingParams.from_dict(
        {"temperature": 0.25, "top_k": None, "max_new_tokens": None}, preferred
    )
    assert (parsed.temperature, parsed.top_k, parsed.max_new_tokens) == (0.25, 7, None)


def test_unknown_key_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^unknown field `max_tokens`, expected one of `max_new_"):
        SamplingParams.from_dict({"max_tokens": 3})
    # Derived fields are no business of the client.
    with pytest.raises(ValueError, match=r"^unknown field `stop_strs`"):
        SamplingParams.from_dict({"stop_strs": ["a"]})


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": "hot"}, 'invalid type: string "hot", expected a number'),
        ({"temperature": True}, "invalid type: boolean `true`, expected a number"),
        ({"max_new_tokens": 1.5}, "invalid type: floating point `1.5`, expected an integer"),
        ({"n": True}, "invalid type: boolean `true`, expected an integer"),
        ({"ignore_eos": 1}, "invalid type: integer `1`, expected a boolean"),
        ({"stop": [1]}, "invalid type: integer `1`, expected a string"),
        ({"stop": {}}, "invalid type: map, expected a string or a list of strings"),
        ({"stop_token_ids": "2"}, 'invalid type: string "2", expected a list of integers'),
        ({"stop_token_ids": [None]}, "invalid type: null, expected an integer"),
        ({"regex": ["a"]}, "invalid type: sequence, expected a string"),
        ({"json_schema": 3}, "invalid type: integer `3`, expected a string"),
        ({"logit_bias": [1]}, "invalid type: sequence, expected a map"),
        ({"logit_bias": {"3": "x"}}, 'invalid type: string "x", expected a number'),
        ({"logit_bias": {"abc": 1}}, "keys must be token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "keys must be token ids"),
        ({"custom_params": []}, "invalid type: sequence, expected a map"),
        ({"top_p": float("nan")}, "finite"),
        ({"temperature": float("inf")}, "finite"),
        ({"temperature": 10**400}, "finite"),
        ({"top_k": 2**63}, "64 bits"),
        ({"sampling_seed": -(2**63) - 1}, "64 bits"),
        ({"stop": "\ud800"}, "surrogate"),
    ],
)
def test_wrong_types_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams.from_dict(values)
    assert text in str(caught.value)


def test_parameters_that_are_no_object_are_refused() -> None:
    with pytest.raises(ValueError, match="invalid type: sequence, expected a map"):
        SamplingParams.from_dict([1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"max_new_tokens": 10**18}, "max_new_tokens must be an integer in [0, 2147483647], got"),
        ({"n": 2**31}, "n must be in [1, 2147483647], got"),
        ({"stream_interval": 2**31}, "stream_interval must be in [1, 2147483647], got"),
    ],
)
def test_upper_bounds_are_named(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams.from_dict(values).verify(100)
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": -1},
        {"max_new_tokens": 2**31},
        {"min_new_tokens": -1},
        {"min_new_tokens": 129},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": 0},
        {"top_k": -2},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"frequency_penalty": 2.1},
        {"presence_penalty": -2.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 2.1},
        {"n": 0},
        {"stream_interval": 0},
        {"stop": ["a"] * 33},
        {"stop": "a" * 5000},
        {"stop_regex": "a" * 257},
        {"stop_regex": "("},
        {"stop_token_ids": [-1]},
        {"logit_bias": {"100": 1.0}},
        {"logit_bias": {"-1": 1.0}},
        {"logit_bias": {"1": 1e300}},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"json_schema": "{}", "structural_tag": "{}"},
        {"beam_width": 2},
        {"watermark": {"a": 1}},
    ],
)
def test_out_of_range_values_are_refused(values: dict[str, Any]) -> None:
    parsed = SamplingParams.from_dict(values)
    with pytest.raises(ValueError) as caught:
        parsed.verify(VOCAB_SIZE)
    # The client reads which field is wrong.
    assert any(name in str(caught.value) for name in values)


@pytest.mark.parametrize("name", ["temperature", "top_k"])
def test_ranges_hold_after_normalising_too(name: str) -> None:
    parsed = SamplingParams.from_dict({name: -5})
    parsed.normalize()
    with pytest.raises(ValueError, match=name):
        parsed.verify(VOCAB_SIZE)


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 0},
        {"min_new_tokens": 128},
        {"temperature": 0},
        {"top_p": 1},
        {"top_k": 10**9},
        {"frequency_penalty": -2, "presence_penalty": 2, "repetition_penalty": 2},
        {"stop": ["a"] * 32},
        {"stop_regex": "é" * 128},
        {"logit_bias": {"0": -100, "99": 100}},
        {"sampling_seed": -(2**63)},
        {"json_schema": "", "regex": "", "ebnf": "a", "structural_tag": ""},
        {"json_schema": {"type": "object"}},
    ],
)
def test_values_at_the_edges_are_accepted(values: dict[str, Any]) -> None:
    SamplingParams.from_dict(values).verify(VOCAB_SIZE)


def test_greedy_starts_below_a_millionth() -> None:
    for temperature, is_greedy in ((0.0, True), (9e-7, True), (1e-6, False), (0.7, False)):
        parsed = SamplingParams.from_dict({"temperature": temperature})
        assert parsed.is_greedy is is_greedy
        parsed.normalize()
        assert (parsed.top_k == 1) is is_greedy
        assert parsed.temperature == (1.0 if is_greedy else temperature)
    assert SamplingParams(top_k=1, temperature=0.3).is_greedy


def test_stop_windows_cover_any_tokenisation() -> None:
    parsed = SamplingParams.from_dict({"stop": ["", "ab", "世界"], "stop_regex": ["a{3}", ""]})
    parsed.normalize()
    assert parsed.stop_strs == ["ab", "世界"]
    assert parsed.stop_str_max_len == 6  # bytes: one token each in the worst case
    assert parsed.stop_regex_max_len == 12  # three characters of up to four bytes
    once = list(parsed.stop_strs)
    parsed.normalize()
    assert parsed.stop_strs == once
    unbounded = SamplingParams(stop_regex="a+")
    unbounded.normalize()
    assert unbounded.stop_regex_max_len == MAX_STOP_REGEX_WINDOW


def test_grammar_names_the_constraint_that_is_set() -> None:
    assert SamplingParams().grammar is None
    assert SamplingParams(regex="a").grammar == ("regex", "a")
    parsed = SamplingParams.from_dict({"json_schema": {"type": "object"}})
    assert parsed.grammar == ("json_schema", '{"type": "object"}')


def test_survives_the_wire() -> None:
    parsed = SamplingParams.from_dict(
        {"stop": "x", "logit_bias": {"3": 1}, "custom_params": {"a": [1]}, "stop_token_ids": [4, 2]}
    )
    parsed.normalize()
    wire = msgspec.msgpack.encode(parsed)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == parsed


def test_importing_needs_no_torch() -> None:
    code = (
        "import sys, sglang.srt.sampling.sampling_params as m;"
        "sys.exit(int(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules))))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
