"""Syntax trees of the repository's own files, parsed once a process.

For the tests that read the source text; nobody else has a use for it.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the parsed file; not to be changed. Raises SyntaxError, which names the file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
