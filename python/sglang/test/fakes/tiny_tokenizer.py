"""A model folder without weights: a byte-level tokenizer of some 300 tokens and a chat template.

Unit tests of the front use it instead of a downloaded model. Every byte is a token, so that any
text can be written with tokens that end in the middle of a character.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 320  # of the model: more than the tokenizer knows, as in real models
CONTEXT_LEN = 256
EOS_TEXT = "<|end|>"

_MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r")]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if tools %}[tools: {{ tools | tojson }}]{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def build_tiny_tokenizer() -> Tokenizer:
    """The 256 bytes, a few merges, and the special tokens `<|start|>` and `<|end|>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = alphabet + [left + right for left, right in _MERGES]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=_MERGES)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in ("<|start|>", EOS_TEXT)]
    )
    return tokenizer


def write_tiny_model(folder: Path) -> Path:
    """Fill `folder` with what the front reads of a model; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tiny_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": "<|start|>", "eos_token": EOS_TEXT, "chat_template": _CHAT_TEMPLATE}
        )
    )
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": VOCAB_SIZE,
                "max_position_embeddings": CONTEXT_LEN,
            }
        )
    )
    return folder
