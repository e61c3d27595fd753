"""Training needs gradients, which servers that other tests start in this process turn off."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield
