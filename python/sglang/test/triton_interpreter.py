"""Run Triton kernels without a GPU, in Triton's interpreter: for tests and small benchmark checks.

The interpreter is slow, multiplies bfloat16 wrongly and does not round casts to bfloat16 and FP8:
use float32 and float16 and tiny shapes.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any


def use_interpreter() -> None:
    """Interpret the kernels that are imported from now on. Does nothing without Triton."""
    if importlib.util.find_spec("triton") is None:
        return
    # Read when a kernel is decorated.
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor: Any, scope: Any) -> None:
        # Loop bounds that were loaded are arrays of one element, which numpy >= 2.4 no longer
        # turns into an integer as Triton 3.6 asks it to.
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_with_index
