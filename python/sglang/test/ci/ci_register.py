"""Markers by which a test file says on which machines continuous integration should run it.

A test file calls them at module level with literal arguments. A driver may read the calls from
the source text; when the file runs they do nothing, so that the same file works anywhere.
Give either ``suite`` or ``stage`` together with ``runner_config``.
"""

from __future__ import annotations


def _register(
    est_time: float,
    suite: str | None = None,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Mark the calling test file: ``est_time`` in seconds, ``disabled`` is the reason why."""


register_cpu_ci = _register
register_cuda_ci = _register
register_amd_ci = _register
register_npu_ci = _register
register_xpu_ci = _register
register_musa_ci = _register
