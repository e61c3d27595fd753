"""Triton kernels without a GPU, interpreted: set up before any test module imports one."""

from __future__ import annotations

import torch

from sglang.test.triton_interpreter import use_interpreter

if not torch.cuda.is_available():
    use_interpreter()
