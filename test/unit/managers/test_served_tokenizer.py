"""Every process loads the tokenizer that the arguments name, in the revision that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import PortArgs
from sglang.test.fakes.fake_scheduler import fake_ready
from sglang.test.fakes.served_scheduler import ServedScheduler
from sglang.test.fakes.tiny_models import make_tiny_checkpoint

NAME, REVISION = "somebody/tokenizer", "v2"


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Whatever is fetched from a hub that knows one tokenizer."""
    make_tiny_checkpoint(tmp_path / "model", "llama")
    asked: list[tuple[str, str | None]] = []

    def fetch(name: str, *, revision: str | None, **_: Any) -> str:
        asked.append((name, revision))
        return str(tmp_path / "model")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    return asked


def test_all_processes_load_the_revision_of_the_arguments(
    tmp_path: Path, fetched: list[tuple[str, str | None]]
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("Once upon a time\\n")
    tokenizer = ("--tokenizer-path", NAME, "--revision", REVISION)
    drafts = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", 4)
    from_corpus = ("--speculative-ngram-external-corpus-path", str(corpus))
    with ServedScheduler(tmp_path / "model", *tokenizer, *drafts, *from_corpus) as served:
        assert fetched == [(NAME, REVISION)] * 3  # corpus, end of the output, grammars
        args = served.args
    fetched.clear()
    ports = PortArgs.init_new(args)
    try:
        TokenizerManager(args, ports, [fake_ready()]).close()
        DetokenizerManager(args, ports).close()
    finally:
        ports.remove_files()
    assert fetched == [(NAME, REVISION)] * 2
