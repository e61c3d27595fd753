"""GGUF files written here with known contents are read back under Hugging Face names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, dequantize, quantize
from tokenizers import Tokenizer

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.gguf import (
    hf_tensor_name,
    iterate_gguf_weights,
    undo_rope_permutation,
)
from sglang.srt.utils.gguf_file import GgufFile, UnsupportedGgufError, open_gguf
from sglang.srt.utils.gguf_reader import GgufReader
from sglang.srt.utils.tokenizer import get_tokenizer

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 64, 4, 2, 16, 96, 2
WINDOW = 7
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LETTERS = list("abcdefgh123") + ["Ġ", "ab", "Ġc"]
TOKENS = SPECIALS + LETTERS
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def hf_weights(seed: int, *, architecture: str = "llama") -> dict[str, np.ndarray]:
    """Return random weights as the original checkpoint would hold them."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (len(TOKENS), HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
        }
        if architecture == "qwen2":
            shapes[f"{prefix}.self_attn.q_proj.bias"] = (HEADS * HEAD_DIM,)
        if architecture in ("qwen3", "gemma3"):
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (HEAD_DIM,)
        if architecture == "gemma3":
            shapes[f"{prefix}.pre_feedforward_layernorm.weight"] = (HIDDEN,)
            shapes[f"{prefix}.post_feedforward_layernorm.weight"] = (HIDDEN,)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def interleave_heads(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder q or k rows the way a Llama GGUF holds them, one row at a time."""
    head_dim = rows.shape[0] // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            base = head * head_dim
            out[base + 2 * pair] = rows[base + pair]
            out[base + 2 * pair + 1] = rows[base + head_dim // 2 + pair]
    return out


def ggml_name(name: str, architecture: str = "llama") -> str:
    """Return the GGUF name of a Hugging Face tensor, from a table of its own."""
    table = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    if architecture == "gemma3":
        table |= {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        }
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{table[inner]}.{kind}"
    return f"{table[stem]}.{kind}"


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    pre: str = "smollm",
    extra: dict[str, np.ndarray] | None = None,
    rope_theta: float = 10000.0,
    add_bos: bool = False,
) -> None:
    """Write a GGUF file; matrices are stored as ``kind``, everything else as float32."""
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIALS) + [1] * len(LETTERS))
    writer.add_token_merges(["a b", "Ġ c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    if architecture == "gemma3":
        writer.add_key_length(HEAD_DIM)
        writer.add_sliding_window(WINDOW)
    for name, values in weights.items():
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        if architecture == "llama" and ".q_proj." in name:
            values = interleave_heads(values, HEADS)
        if architecture == "llama" and ".k_proj." in name:
            values = interleave_heads(values, KV_HEADS)
        if values.ndim > 1 and kind != GGMLQuantizationType.F32:
            own_name = ggml_name(name, architecture)
            writer.add_tensor(own_name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(ggml_name(name, architecture), values)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_float32_weights_come_back_unchanged(tmp_path: Path, architecture: str) -> None:
    weights = hf_weights(1, architecture=architecture)
    write_gguf(tmp_path / "m.gguf", weights, architecture=architecture)
    read = dict(iterate_gguf_weights(tmp_path / "m.gguf"))
    assert read.keys() == weights.keys()
    for name, values in weights.items():
        assert torch.equal(read[name], torch.from_numpy(values)), name
        assert read[name].is_contiguous()


def test_gemma_norms_and_names(tmp_path: Path) -> None:
    weights = hf_weights(1, architecture="gemma3")
    write_gguf(tmp_path / "m.gguf", weights, architecture="gemma3", rope_theta=1e6)
    read = dict(iterate_gguf_weights(tmp_path / "m.gguf"))
    assert read.keys() == weights.keys()
    for name, values in weights.items():
        # What the file adds to the norms' weights and the reader takes off costs a rounding.
        tolerance = 3e-7 if "norm" in name else 0.0
        torch.testing.assert_close(
            read[name], torch.from_numpy(values), atol=tolerance, rtol=0, msg=name
        )


def test_gemma_config_says_what_the_published_one_does(tmp_path: Path) -> None:
    weights = hf_weights(1, architecture="gemma3")
    write_gguf(tmp_path / "m.gguf", weights, architecture="gemma3", rope_theta=1e6)
    config = GgufFile(tmp_path / "m.gguf").hf_config()
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["model_type"] == "gemma3_text"
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (WINDOW, 6)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["rope_scaling"] is None and "rope_parameters" not in config
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    model = ModelConfig.from_path(str(tmp_path / "m.gguf"))
    assert model.sliding_windows == (WINDOW, WINDOW)
    assert model.hidden_act == "gelu_pytorch_tanh"


def test_quantised_weights_equal_their_dequantised_blocks(tmp_path: Path) -> None:
    weights = hf_weights(2)
    kind = GGMLQuantizationType.Q8_0
    write_gguf(tmp_path / "m.gguf", weights, kind=kind)
    read = dict(iterate_gguf_weights(tmp_path / "m.gguf"))
    for name, values in weights.items():
        # Rows are quantised one by one, so reordering whole rows commutes with it.
        expected = dequantize(quantize(values, kind), kind) if values.ndim > 1 else values
        assert torch.equal(read[name], torch.from_numpy(expected)), name
        assert np.abs(expected - values).max() < 0.05


def test_rope_permutation_of_a_bias() -> None:
    rows = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    assert np.array_equal(undo_rope_permutation(interleave_heads(rows, HEADS), HEADS), rows)
    assert undo_rope_permutation(np.arange(8.0), 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_config_states_the_model(tmp_path: Path) -> None:
    weights = hf_weights(3)
    del weights["lm_head.weight"]
    write_gguf(tmp_path / "m.gguf", weights, rope_theta=500000.0)
    config = GgufFile(tmp_path / "m.gguf").hf_config()
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"] is True
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert (config["hidden_size"], config["head_dim"]) == (HIDDEN, HEAD_DIM)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000.0}
    assert config["rms_norm_eps"] == 1e-5
    assert config["vocab_size"] == len(TOKENS)
    assert config["torch_dtype"] == "float32"
    assert config["attention_bias"] is False


def test_half_precision_files_say_so(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(4), kind=GGMLQuantizationType.BF16)
    assert GgufFile(tmp_path / "m.gguf").hf_config()["torch_dtype"] == "bfloat16"


def test_llama3_rope_scaling_is_recovered(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    reference = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=131072,
        rope_parameters=dict(scaling),
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](reference, "cpu")
    plain = 500000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    divisors = (plain / scaled).numpy().astype(np.float32)
    weights = hf_weights(5)
    table = {"rope_freqs.weight": divisors}
    write_gguf(tmp_path / "m.gguf", weights, rope_theta=500000.0, extra=table)
    config = GgufFile(tmp_path / "m.gguf").hf_config()
    assert config["rope_parameters"] == scaling
    assert "rope_freqs.weight" not in dict(iterate_gguf_weights(tmp_path / "m.gguf"))

    table = {"rope_freqs.weight": np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32)}
    write_gguf(tmp_path / "odd.gguf", weights, rope_theta=500000.0, extra=table)
    with pytest.raises(UnsupportedGgufError, match="rotary"):
        GgufFile(tmp_path / "odd.gguf").hf_config()


def test_json_files_make_a_working_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(6))
    GgufFile(tmp_path / "m.gguf").write_json_files(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "<|im_start|>ab c12<|im_end|>"
    ids = tokenizer.encode(text).ids
    expected = ["<|im_start|>", "ab", "Ġc", "1", "2", "<|im_end|>"]
    assert ids == [TOKENS.index(token) for token in expected]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "ab c12"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert (config["pad_token"], config["unk_token"]) == ("<|im_end|>", "<|endoftext|>")
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_a_gguf_file_serves_as_tokenizer_path(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(10))
    tokenizer = get_tokenizer(str(tmp_path / "m.gguf"))
    assert tokenizer.encode("ab<|im_end|>") == [TOKENS.index("ab"), 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("gpt-2", ["ab", "123"]), ("qwen2", ["ab", "1", "2", "3"]), ("llama-bpe", ["ab", "123"])],
)
def test_each_pre_tokenizer_splits_digits_its_way(
    tmp_path: Path, pre: str, pieces: list[str]
) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(7), pre=pre, add_bos=True)
    tokenizer = GgufFile(tmp_path / "m.gguf").tokenizer()
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("ab123")] == pieces
    assert tokenizer.encode("a").ids[0] == 1


def test_unknown_contents_are_refused_with_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no gguf file at all, but long enough to be read")
    with pytest.raises(UnsupportedGgufError, match="no readable GGUF"):
        GgufFile(broken)
    with pytest.raises(UnsupportedGgufError, match="is not a file"):
        GgufFile(tmp_path / "absent.gguf")
    writer = GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedGgufError, match="'mamba' is not supported"):
        GgufFile(tmp_path / "other.gguf")
    with pytest.raises(UnsupportedGgufError, match="attn_weird"):
        hf_tensor_name("blk.0.attn_weird.weight")
    write_gguf(tmp_path / "pre.gguf", hf_weights(8), pre="unheard-of")
    with pytest.raises(UnsupportedGgufError, match="unheard-of"):
        GgufFile(tmp_path / "pre.gguf").tokenizer()


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(9))
    whole = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UnsupportedGgufError):
        dict(iterate_gguf_weights(tmp_path / "cut.gguf"))


def test_the_header_reader_agrees_with_the_reference_package(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(11))
    ours, reference = GgufReader(tmp_path / "m.gguf"), GGUFReader(tmp_path / "m.gguf")
    fields = {k: v.contents() for k, v in reference.fields.items() if not k.startswith("GGUF.")}
    assert ours.fields == fields
    for mine, theirs in zip(ours.tensors, reference.tensors, strict=True):
        assert (mine.name, mine.type_id) == (theirs.name, int(theirs.tensor_type))
        assert mine.data.dtype == theirs.data.dtype
        np.testing.assert_array_equal(mine.data, theirs.data)


def test_any_cut_of_the_header_is_a_sentence(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_weights(12))
    whole = (tmp_path / "m.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 200, 7), 400, 1000]:
        cut.write_bytes(whole[:size])
        with pytest.raises(UnsupportedGgufError, match="no readable GGUF file"):
            GgufFile(cut)


def test_a_file_is_parsed_once_until_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, hf_weights(13))
    first = open_gguf(path)
    assert open_gguf(str(path)) is first
    write_gguf(path, hf_weights(13), add_bos=True)
    assert open_gguf(path) is not first
