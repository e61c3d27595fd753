"""The extra configuration: typed keys, the rest for the backend, errors that name the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang.srt.mem_cache.storage.extra_config import PrefetchOptions, parse_extra_config


@pytest.mark.parametrize("text", [None, "", "  ", "{}"])
def test_nothing_gives_the_defaults(text: str | None) -> None:
    options, backend = parse_extra_config(text)
    assert options == PrefetchOptions()
    assert (options.prefetch_threshold, options.prefetch_timeout_base) == (256, 1.0)
    assert (options.prefetch_timeout_per_ki_token, options.prefetch_timeout_max) == (0.25, 30.0)
    assert options.hicache_storage_pass_prefix_keys is False
    assert backend == {}


CONTENT = {
    "prefetch_threshold": 16,
    "prefetch_timeout_base": 2,
    "hicache_storage_pass_prefix_keys": True,
    "max_size": "1GB",
}


@pytest.mark.parametrize("kind", ["text", "json", "toml", "yaml", "yml"])
def test_all_forms_say_the_same(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"config.{kind}"
    if kind == "toml":
        lines = [f"{key} = {json.dumps(value)}" for key, value in CONTENT.items()]
        path.write_text("\n".join(lines))
    elif kind.startswith("y"):
        path.write_text("\n".join(f"{key}: {json.dumps(v)}" for key, v in CONTENT.items()))
    else:
        path.write_text(json.dumps(CONTENT))
    text = path.read_text() if kind == "text" else f"@{path}"
    options, backend = parse_extra_config(text)
    assert options.prefetch_threshold == 16
    assert isinstance(options.prefetch_timeout_base, float)
    assert options.prefetch_timeout_base == 2.0
    assert options.hicache_storage_pass_prefix_keys is True
    assert backend == {"max_size": "1GB"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prefetch_threshold", 1.5),
        ("prefetch_threshold", "256"),
        ("prefetch_threshold", True),
        ("prefetch_threshold", -1),
        ("prefetch_threshold", None),
        ("prefetch_timeout_base", "1"),
        ("prefetch_timeout_base", False),
        ("prefetch_timeout_per_ki_token", -0.1),
        ("prefetch_timeout_max", float("inf")),
        ("hicache_storage_pass_prefix_keys", 1),
        ("hicache_storage_pass_prefix_keys", "true"),
    ],
)
def test_a_wrong_type_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{key} must be"):
        parse_extra_config(json.dumps({key: value}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "is not valid"),
        ("a.json", "[1]", "must be an object"),
        ("a.toml", "= 3", "is not valid"),
        ("a.yaml", "a: [", "is not valid"),
        ("a.yaml", "1: 2", "names as keys"),
        ("a.ini", "", "must end in"),
    ],
)
def test_files_that_do_not_parse(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        parse_extra_config(f"@{tmp_path / name}")


@pytest.mark.parametrize("text", ["@nowhere.json", "@", "not json", "3"])
def test_texts_that_are_no_configuration(text: str) -> None:
    with pytest.raises(ValueError):
        parse_extra_config(text)


@pytest.mark.parametrize("kind", ["text", "json", "yaml"])
def test_what_is_nested_too_deep_is_one_line(tmp_path: Path, kind: str) -> None:
    text = '{"a": ' + "[" * 50_000 + "]" * 50_000 + "}"
    if kind != "text":
        path = tmp_path / f"deep.{kind}"
        path.write_text(text)
        text = f"@{path}"
    with pytest.raises(ValueError, match="nested too deep"):
        parse_extra_config(text)


def test_numbers_too_large_for_a_float_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="prefetch_timeout_max must be") as raised:
        parse_extra_config('{"prefetch_timeout_max": ' + "9" * 400 + "}")
    assert len(str(raised.value)) < 200
