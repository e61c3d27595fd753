"""Memory regions of a CUDA device: pages go back to the driver, graphs stay valid."""

from __future__ import annotations

import pytest
import torch

from sglang.srt.platforms import init_platform
from sglang.test.ci.ci_register import register_cuda_ci

register_cuda_ci(est_time=10, suite="rl")

pytestmark = pytest.mark.cuda
MB = 1 << 20


def test_a_region_goes_and_comes_back_under_a_captured_graph() -> None:
    platform = init_platform("cuda")
    region = platform.reserve(512 * MB)
    weight = region.buffer[: 4 * MB].view(torch.float32)
    assert not weight.any()
    result = torch.empty_like(weight)
    weight.fill_(1)
    torch.add(weight, 1, out=result)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(weight, 1, out=result)
    address = weight.data_ptr()
    used = torch.cuda.mem_get_info()[0]
    region.release()
    assert torch.cuda.mem_get_info()[0] - used >= 500 * MB
    region.release()  # harmless
    region.resume()
    assert weight.data_ptr() == address and not weight.any()
    weight.fill_(41)
    graph.replay()
    torch.cuda.synchronize()
    assert bool((result == 42).all())
