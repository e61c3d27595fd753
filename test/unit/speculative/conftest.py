"""One tiny target with its drafts for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang.srt.speculative import fixed_tensors
from sglang.test.fakes.spec_rig import TinyPair


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    return TinyPair.make(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def own_fixed_tensors() -> Iterator[None]:
    """For tests without values: theirs have none either, and must not be there for anybody else."""
    makers = (
        fixed_tensors.counting,
        fixed_tensors.filled,
        fixed_tensors.block_rows,
        fixed_tensors.chain_links,
    )
    for make in makers:
        make.cache_clear()
    yield
    for make in makers:
        make.cache_clear()
