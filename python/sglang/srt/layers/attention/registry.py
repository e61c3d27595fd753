"""Attention backends by name. A new one is a class and a line here."""

from __future__ import annotations

import importlib

from sglang.srt.layers.attention.base import AttentionBackend, RunnerFacts

# name -> (module, class or factory); imported on demand because some need optional packages.
_BACKENDS = {
    "torch_native": ("sglang.srt.layers.attention.cpu_native", "create_torch_native"),
    "torch_reference": ("sglang.srt.layers.attention.torch_native", "TorchNativeBackend"),
    "triton": ("sglang.srt.layers.attention.triton_latent", "create_triton"),
}


def attention_backend_names() -> list[str]:
    """Names that `create_attention_backend` knows."""
    return sorted(_BACKENDS)


def create_attention_backend(name: str, facts: RunnerFacts) -> AttentionBackend:
    """Import and create a backend. Raises ValueError for an unknown name."""
    try:
        module_name, class_name = _BACKENDS[name]
    except KeyError:
        known = ", ".join(attention_backend_names())
        raise ValueError(f"unknown attention backend {name!r}; known ones: {known}") from None
    backend: AttentionBackend = getattr(importlib.import_module(module_name), class_name)(facts)
    return backend
