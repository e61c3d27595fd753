"""What `scripts/replica_flags.py` adds to the flags of replicas on one host."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

import sglang
from sglang.srt.server_args import ServerArgs, prepare_server_args

SCRIPT = Path(sglang.__file__).parents[2] / "scripts" / "replica_flags.py"
GB = 10**9
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head dimension, float32


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("replica_flags", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "a model"
    folder.mkdir()
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64},
        **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
        **{"max_position_embeddings": 10**9, "torch_dtype": "float32"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parse(model: Path | str, *flags: str) -> ServerArgs:
    return prepare_server_args(["--model-path", str(model), "--device", "cpu", *flags])


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("ratio", [None, 4.0])
def test_replicas_together_leave_half(
    script: ModuleType, model: Path, count: int, ratio: float | None
) -> None:
    flags = ["--page-size", "64"] + ([] if ratio is None else ["--hicache-ratio", str(ratio)])
    name, tokens = script.size_flags(parse(model, *flags), count, 8 * GB)
    assert name == "--max-total-tokens"
    used = count * int(tokens) * TOKEN_BYTES * (1 + (ratio or 2))
    assert 0.49 * 8 * GB < used <= 0.5 * 8 * GB
    assert int(tokens) % 64 == 0


@pytest.mark.parametrize(
    "flags", [("--max-total-tokens", "4096"), ("--mem-fraction-static", "0.3")]
)
def test_a_size_that_the_user_gave_stays(
    script: ModuleType, model: Path, flags: tuple[str, ...]
) -> None:
    assert script.size_flags(parse(model, *flags), 4, 8 * GB) == []


def test_one_replica_is_alone(script: ModuleType, model: Path) -> None:
    assert script.size_flags(parse(model), 1, 8 * GB) == []


def test_a_folder_gives_its_name(script: ModuleType, model: Path) -> None:
    assert script.name_flags(parse(model)) == ["--served-model-name", "a model"]
    assert script.name_flags(parse(f"{model}/")) == ["--served-model-name", "a model"]
    assert script.name_flags(parse(model, "--served-model-name", "mine")) == []
    assert script.name_flags(parse("a-name")) == []


def test_wrong_flags_end_it(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["2", "", "--no-such-flag"]) == 2
    assert "--no-such-flag" in capsys.readouterr().err


def test_help_and_wrong_words_end_without_a_traceback(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--help"]) == 0
    assert "replica_flags.py N SMALL_MODEL_FOLDER" in capsys.readouterr().out
    for words in ([], ["2"], ["two", ""], ["0", ""]):
        assert script.main(words) == 2
        assert capsys.readouterr().err.startswith("usage: ")
