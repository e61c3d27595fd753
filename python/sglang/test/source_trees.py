"""Syntax trees of the repository's own files, parsed once a process.

For the tests that read the source text; nobody else has a use for it.
"""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the parsed file; not to be changed. Raises SyntaxError, which names the file."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    gc.freeze()  # hundreds of thousands of nodes that stay: no collection need visit them
    return tree
