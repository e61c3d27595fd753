"""From options to a finished draft folder: what `scripts/train_eagle3.py` calls.

Makes or reads the data, chooses the draft vocabulary, builds the draft, trains. In the output
folder:

    options.json, coverage.json, log.jsonl
    data/          what is learnt from, and held-out prompts
    checkpoints/   the newest few
    draft/         the draft in the published layout
"""

from __future__ import annotations

import json
import logging
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from sglang.srt import platforms
from sglang.srt.platforms.base import Platform
from sglang.training.eagle3.dataset import Dataset, DatasetBuilder
from sglang.training.eagle3.draft import DraftShape, Eagle3Draft
from sglang.training.eagle3.folders import Checkpoints, DraftFolderError, SavedDraft, read_draft
from sglang.training.eagle3.options import OptionsError, TrainOptions, check_resumable
from sglang.training.eagle3.progress import Clock
from sglang.training.eagle3.samples import Sample
from sglang.training.eagle3.target import FrozenTarget
from sglang.training.eagle3.texts import Texts
from sglang.training.eagle3.trainer import Trainer
from sglang.training.eagle3.vocabulary import (
    DraftVocabulary,
    choose_vocabulary,
    count_answer_tokens,
    coverage,
    predict_head_rows,
    vocabulary_of_d2t,
    write_coverage,
)

logger = logging.getLogger(__name__)


def run_training(options: TrainOptions) -> Trainer:
    """Train to the end and return the trainer.

    Raises OptionsError, DataError, TargetError or DraftFolderError for what the user can mend.
    """
    trainer = prepare(options)
    with _StopOnSignal(trainer):
        trainer.train()
    return trainer


def prepare(options: TrainOptions) -> Trainer:
    """Everything before the first step; a resumed run is where its checkpoint was."""
    output = Path(options.output)
    state = _checkpoint_to_resume(options, output)
    clock = Clock(state["elapsed_s"] if state else 0.0)
    platform = _platform(options)
    platform.manual_seed(options.seed)
    saved = read_draft(options.init_draft) if options.init_draft else None
    layers = options.capture_layers or (list(saved.capture_layers or ()) if saved else [])
    target = FrozenTarget(
        options.model, platform.device, _target_dtype(options, platform), layers or None
    )
    dataset = _dataset(options, output, target, is_resumed=state is not None)
    if state is not None:
        vocabulary = vocabulary_of_d2t(state["draft"]["d2t"], target.config.vocab_size)
        draft = Eagle3Draft(_shape(options, target, saved), vocabulary)
    else:
        vocabulary = _vocabulary(options, output, target, dataset.train, saved)
        draft = _new_draft(options, target, vocabulary, saved)
    draft.to(platform.device)
    trainer = Trainer(options, target, draft, dataset, clock)
    if state is not None:
        trainer.restore(state)
    count = sum(parameter.numel() for parameter in draft.parameters())
    logger.info("Draft: %.1f M parameters, %d tokens", count / 1e6, vocabulary.size)
    return trainer


def _checkpoint_to_resume(options: TrainOptions, output: Path) -> dict[str, Any] | None:
    record = output / "options.json"
    if options.resume:
        if record.is_file():
            check_resumable(options, json.loads(record.read_text(encoding="utf-8")))
        state = Checkpoints(output / "checkpoints", options.keep_checkpoints).load_newest()
        if state is None and not options.has_data:
            raise OptionsError(f"{output} holds no checkpoint to resume from")
        if state is not None:
            return state
        logger.warning("%s holds no checkpoint yet: starting from step 0", output)
    elif (output / "checkpoints").exists():
        raise OptionsError(f"{output} holds a run: go on with --resume, or choose another folder")
    output.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(options.as_dict(), indent=2) + "\n", encoding="utf-8")
    return None


def _platform(options: TrainOptions) -> Platform:
    if options.device == "auto":
        return platforms.current_platform()
    return platforms.init_platform(options.device)


def _target_dtype(options: TrainOptions, platform: Platform) -> torch.dtype:
    if options.target_dtype != "auto":
        dtype: torch.dtype = getattr(torch, options.target_dtype)
        return dtype
    return platform.default_dtype if platform.name == "cuda" else torch.float32


def _dataset(
    options: TrainOptions, output: Path, target: FrozenTarget, is_resumed: bool
) -> Dataset:
    folder = output / "data"
    if is_resumed or (options.resume and (folder / "train.safetensors").is_file()):
        return Dataset.load(folder)
    texts = Texts(options.model, target.end_ids)
    if options.self_prompts and not texts.can_chat:
        raise OptionsError("--self-prompts needs a model with a chat template")
    dataset = DatasetBuilder(options, target, texts).build()
    dataset.save(folder)
    return dataset


def _shape(options: TrainOptions, target: FrozenTarget, saved: SavedDraft | None) -> DraftShape:
    if saved is not None:
        return saved.shape
    config = target.config
    return DraftShape(
        hidden_size=config.hidden_size,
        intermediate_size=options.intermediate_size or config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=config.rope.theta,
        num_features=len(target.capture_layers),
    )


def _vocabulary(
    options: TrainOptions,
    output: Path,
    target: FrozenTarget,
    samples: list[Sample],
    saved: SavedDraft | None,
) -> DraftVocabulary:
    vocab_size = target.config.vocab_size
    counts = count_answer_tokens(samples, vocab_size)
    old_ids = saved.vocabulary.token_ids.tolist() if saved else []
    size = options.draft_vocab_size or len(old_ids) or -(-vocab_size // 3)
    if size < len(old_ids):
        raise OptionsError(
            f"--draft-vocab-size {size}: the draft has {len(old_ids)} tokens already"
        )
    always = {*old_ids, *(target.end_ids if size > len(old_ids) else ())}
    vocabulary = choose_vocabulary(counts, min(size, vocab_size), always)
    report = coverage(vocabulary, counts)
    write_coverage(output / "coverage.json", report)
    logger.info(
        "Draft vocabulary: %d of %d tokens, %.2f %% of the %d answer tokens",
        vocabulary.size, vocab_size, 100 * report.covered_share, report.answer_tokens,
    )  # fmt: skip
    return vocabulary


def _new_draft(
    options: TrainOptions,
    target: FrozenTarget,
    vocabulary: DraftVocabulary,
    saved: SavedDraft | None,
) -> Eagle3Draft:
    draft = Eagle3Draft(_shape(options, target, saved), vocabulary)
    head_rows = target.head_rows.float().cpu()
    draft.init_weights(options.seed, head_rows[vocabulary.token_ids])
    if saved is None:
        return draft
    if saved.vocabulary.target_size != target.config.vocab_size or (
        saved.shape.hidden_size != target.config.hidden_size
    ):
        raise DraftFolderError(f"{options.init_draft} was made for another target")
    weights = dict(saved.weights)
    weights["lm_head.weight"] = _enlarged_head(vocabulary, saved, head_rows)
    draft.load_state_dict(weights | {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d})
    return draft


def _enlarged_head(
    vocabulary: DraftVocabulary, saved: SavedDraft, target_rows: torch.Tensor
) -> torch.Tensor:
    """The saved rows where there are any; the others predicted."""
    old_ids, old_rows = saved.vocabulary.token_ids, saved.weights["lm_head.weight"]
    rows = torch.empty(vocabulary.size, old_rows.shape[1])
    is_old = saved.vocabulary.t2d[vocabulary.token_ids]
    rows[is_old] = old_rows
    new_ids = vocabulary.token_ids[~is_old]
    if len(new_ids):
        rows[~is_old] = predict_head_rows(target_rows, old_ids, old_rows, new_ids)
    return rows


class _StopOnSignal:
    """SIGINT and SIGTERM end the run after the step in hand; it is saved and can be resumed."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._stop)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        logger.warning("Stopping after this step; --resume goes on")
        self._trainer.stop_requested = True
