"""Triton kernels without a GPU: run them in Triton's interpreter.

The choice is made when a kernel is decorated, so the variable has to be set before any test module
imports one.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import torch

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        # Loop bounds that were loaded are arrays of one element, which numpy >= 2.4 no longer
        # turns into an integer as Triton 3.6 asks it to.
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor_with_index
