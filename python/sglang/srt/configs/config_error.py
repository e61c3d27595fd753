"""The error of everything that reads a checkpoint's configuration."""

from __future__ import annotations


class ModelConfigError(ValueError):
    """The checkpoint's configuration is missing, malformed, or contradicts the flags."""
