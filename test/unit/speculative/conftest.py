"""One tiny target with its drafts for all tests of this folder."""

from __future__ import annotations

import pytest

from sglang.test.fakes.spec_rig import TinyPair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return TinyPair.make(tmp_path_factory.mktemp("pair"))
