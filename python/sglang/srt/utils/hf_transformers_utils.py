"""`get_tokenizer` and `get_config` under the import path that trainers use.

The server itself uses neither: its tokenizer is `utils.tokenizer`, its config
`configs.model_config`. transformers takes seconds to import and is loaded at the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def get_tokenizer(
    tokenizer_name: str,
    *args: Any,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> PreTrainedTokenizerBase:
    """The transformers tokenizer of a folder or hub model. `tokenizer_mode` slow: pure Python."""
    from transformers import AutoTokenizer

    if tokenizer_mode not in ("auto", "slow"):
        raise ValueError(f"tokenizer_mode must be auto or slow, not {tokenizer_mode!r}")
    if tokenizer_mode == "slow":
        kwargs["use_fast"] = False
    return AutoTokenizer.from_pretrained(
        tokenizer_name, *args, trust_remote_code=trust_remote_code, **kwargs
    )


def get_config(
    model: str,
    trust_remote_code: bool = False,
    revision: str | None = None,
    model_override_args: dict[str, Any] | None = None,
    **kwargs: Any,
) -> PretrainedConfig:
    """The transformers config of a folder or hub model, with overrides written into it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        model, trust_remote_code=trust_remote_code, revision=revision, **kwargs
    )
    if model_override_args:
        config.update(model_override_args)
    return config
