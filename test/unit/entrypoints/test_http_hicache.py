"""What the endpoints of the hierarchical cache's storage take for a body."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.entrypoints.http_body import BodyError
from sglang.srt.entrypoints.http_routes_hicache import read_attachment

CONFIG = "hicache_storage_backend_extra_config"


@pytest.mark.parametrize(
    "config",
    [
        {f"{CONFIG}_json": "{}"},
        {CONFIG: "{}"},
        {CONFIG: "{}", f"{CONFIG}_json": "{}"},
        {CONFIG: "{}", f"{CONFIG}_json": None},
    ],
)
def test_the_extra_config_goes_by_both_names(config: dict[str, Any]) -> None:
    read = read_attachment({"hicache_storage_backend": "file", **config})
    assert read.hicache_storage_backend == "file"
    assert read.hicache_storage_backend_extra_config_json == "{}"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({CONFIG: "{}", f"{CONFIG}_json": "{ }"}, "two names of one thing and differ"),
        ({"hicache_storage_backend": "file", "policy": 1, "backend": 2}, "keys: backend, policy"),
        ({"control_id": "7"}, "Unknown keys: control_id"),
        ({CONFIG: {}}, "Expected `str"),
        ([], "must be a JSON object"),
    ],
)
def test_a_body_that_says_something_else_is_refused(body: Any, message: str) -> None:
    with pytest.raises(BodyError, match=message):
        read_attachment(body)
