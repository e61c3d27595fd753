"""Which kind of attention each layer of a `config.json` has, and how far back it looks.

Plain JSON in; read by `model_config`. A kind that the model does not have is refused here, because
every reader would take it for the other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang.srt.configs.config_error import ModelConfigError

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def check_layer_types(raw: Mapping[str, Any], num_layers: int) -> None:
    """Raise ModelConfigError where `layer_types` is not one known kind a layer."""
    kinds = raw.get("layer_types")
    if kinds is None:
        return
    if len(kinds) != num_layers:
        raise ModelConfigError(
            f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers"
        )
    known = (FULL, SLIDING if raw.get("linear_num_value_heads") is None else LINEAR)
    for layer_id, kind in enumerate(kinds):
        if kind not in known:
            family = ", ".join(raw.get("architectures") or ()) or "this model"
            raise ModelConfigError(
                f"config.json: layer_types[{layer_id}] is {kind!r}, {family} can have "
                f"{' or '.join(known)}"
            )


def read_sliding_windows(raw: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """Window of each layer, in tokens; None: all of them. `layer_types` must have been checked.

    Families that carry a switch (`use_sliding_window`) obey it. Raises ModelConfigError where a
    layer has a window whose length the file does not say.
    """
    window, kinds = raw.get("sliding_window"), raw.get("layer_types")
    if raw.get("use_sliding_window") is False:
        return (None,) * num_layers
    if kinds is not None:
        is_limited = [kind == SLIDING for kind in kinds]
    else:
        # Only Qwen-style files count layers from which the window starts.
        first = int(raw.get("max_window_layers") or 0)
        is_limited = [window is not None and i >= first for i in range(num_layers)]
    if not any(is_limited):
        return (None,) * num_layers
    if not isinstance(window, int) or isinstance(window, bool) or window <= 0:
        raise ModelConfigError(
            f"config.json: 'sliding_window' must be a positive integer, got {window!r}, "
            f"but {sum(is_limited)} layers have a window"
        )
    return tuple(window if limited else None for limited in is_limited)
