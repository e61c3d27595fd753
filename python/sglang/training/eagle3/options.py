"""Every option of the trainer, once: name, type, default, help text; and what a resume must match.

`add_arguments` and `options_from` turn the dataclass into a command line and back. No torch here,
so that `--help` is quick.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_GROUPS = {
    "places": "models and folders",
    "data": "what is learnt from",
    "draft": "the draft's shape and start",
    "loss": "what is minimised",
    "steps": "optimisation",
    "watch": "evaluation, checkpoints, machine",
}


class OptionsError(ValueError):
    """Options that cannot work; the message says which."""


def _opt(group: str, default: Any, text: str, **extra: Any) -> Any:
    metadata = {"group": group, "help": text, **extra}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(slots=True, kw_only=True)
class TrainOptions:
    """See the help texts. `free` ones may differ between a run and its resumption."""

    model: str = _opt("places", "", "folder of the target model")
    output: str = _opt(
        "places", "", "folder for data, checkpoints and the draft (OUTPUT/draft)", free=True
    )
    resume: bool = _opt(
        "places", False, "go on from the newest checkpoint in OUTPUT, with its data", free=True
    )

    data: list[str] = _opt(
        "data", [], 'JSON-lines files: {"messages": [...]} or {"text": ...} a line'
    )
    prompts: list[str] = _opt(
        "data",
        [],
        "files of prompts that the target answers: JSON lines as in --data (the "
        "last user turn is answered), or plain lines",
    )
    builtin_prompts: int = _opt(
        "data", 0, "that many of the built-in English prompts, answered by the target"
    )
    self_prompts: int = _opt(
        "data", 0, "user turns that the target invents itself, then answers (chat models)"
    )
    max_answers: int = _opt(
        "data", 0, "stop writing after that many answers (0: answer every prompt once)"
    )
    data_minutes: float = _opt(
        "data", 0.0, "stop writing answers after that time (0: a third of --max-minutes)"
    )
    answer_tokens: int = _opt("data", 512, "longest answer that the target writes")
    greedy_share: float = _opt("data", 0.3, "share of the prompts that are answered greedily")
    temperature: float = _opt("data", 0.8, "of the other answers")
    top_p: float = _opt("data", 0.95, "of the other answers")
    write_batch: int = _opt("data", 256, "answers written at one time")
    max_length: int = _opt("data", 1536, "longest sequence in tokens; longer ones are cut")
    repetition_share: float = _opt("data", 0.0, "share of repeated texts in all tokens, 0..0.9")
    repetition_weight: float = _opt("data", 1.0, "weight of a repeated text's tokens in the loss")
    repetition_min: int = _opt("data", 128, "shortest repeated text in tokens")

    draft_vocab_size: int = _opt(
        "draft",
        0,
        "tokens that the draft can propose (0: those of --init-draft, else a third "
        "of the target's)",
    )
    intermediate_size: int = _opt("draft", 0, "width of the MLP (0: the target's)")
    capture_layers: list[int] = _opt(
        "draft", [], "layers whose input streams are the features (none: 2, L/2, L-3)"
    )
    init_draft: str = _opt(
        "draft",
        "",
        "folder of a draft to start from; a larger --draft-vocab-size adds rows to its head",
    )
    draft_dtype: str = _opt(
        "draft", "bfloat16", "type of the saved weights", choices=["bfloat16", "float16", "float32"]
    )

    num_steps: int = _opt("loss", 7, "unrolled steps (the chain length to be served)")
    step_decay: float = _opt("loss", 0.85, "step k of the unrolled ones counts decay**k")
    chain_weight: float = _opt("loss", 0.0, "share of the chain loss, 0..1")
    lk_weight: float = _opt("loss", 0.0, "weight of -log(acceptance) at every step")
    acceptance: str = _opt(
        "loss", "greedy", "what chain and LK loss call acceptance", choices=["greedy", "sampled"]
    )

    optimizer: str = _opt(
        "steps",
        "adamw",
        "muon: orthogonalised momentum for matrices but the head, AdamW for the rest",
        choices=["adamw", "muon"],
    )
    lr: float = _opt("steps", 5e-4, "highest learning rate")
    min_lr_share: float = _opt("steps", 0.02, "of the highest, at the end of the cosine")
    warmup_steps: int = _opt("steps", 60, "steps of linear warm-up")
    beta2: float = _opt("steps", 0.95, "AdamW's second beta (the first is 0.9)")
    weight_decay: float = _opt("steps", 0.0, "decoupled weight decay")
    clip: float = _opt("steps", 0.5, "largest gradient norm (0: none)")
    batch_tokens: int = _opt("steps", 16384, "padded tokens of one forward pass")
    accumulate: int = _opt("steps", 1, "forward passes a step")
    max_steps: int = _opt(
        "steps", 0, "stop after that many steps (0: --max-minutes or --epochs decide)"
    )
    epochs: float = _opt("steps", 0.0, "stop after that many passes over the data (0: no limit)")
    max_minutes: float = _opt(
        "steps", 0.0, "stop after that time, data included (0: no limit)", free=True
    )
    seed: int = _opt("steps", 0, "of everything random")

    log_every: int = _opt("watch", 20, "steps between log lines", free=True)
    eval_every: int = _opt(
        "watch", 500, "steps between evaluations (0: only at the end)", free=True
    )
    eval_prompts: int = _opt("watch", 64, "held-out prompts")
    eval_repeated: int = _opt("watch", 16, "held-out repeated texts")
    eval_tokens: int = _opt("watch", 128, "greedy tokens of each that are evaluated")
    eval_loops: int = _opt(
        "watch", 4, "prompts and repeated texts that are also decoded for real", free=True
    )
    checkpoint_every: int = _opt(
        "watch", 500, "steps between checkpoints (0: only at the end)", free=True
    )
    keep_checkpoints: int = _opt("watch", 2, "newest checkpoints that are kept", free=True)
    device: str = _opt("watch", "auto", "machine", choices=["auto", "cpu", "cuda"])
    target_dtype: str = _opt(
        "watch",
        "auto",
        "auto: bfloat16 on CUDA, float32 on CPU",
        choices=["auto", "bfloat16", "float16", "float32"],
    )
    attention: str = _opt(
        "watch", "merged", "masked: more work, only public operators", choices=["merged", "masked"]
    )
    loss_rows: int = _opt(
        "watch",
        4096,
        "rows whose logits exist at one time; more is faster and takes more memory",
        free=True,
    )
    tiny: bool = _opt(
        "watch",
        False,
        "a smoke run: built-in prompts, a few steps, seconds on a CPU with a tiny target",
        free=True,
    )

    def check(self) -> None:
        """Raise OptionsError for what cannot work."""
        problems = [
            (not self.model, "--model is missing"),
            (not self.output, "--output is missing"),
            (not 1 <= self.num_steps <= 32, "--num-steps must be within 1..32"),
            (not 0 <= self.repetition_share <= 0.9, "--repetition-share must be within 0..0.9"),
            (not 0 <= self.chain_weight <= 1, "--chain-weight must be within 0..1"),
            (not 0 <= self.greedy_share <= 1, "--greedy-share must be within 0..1"),
            (
                len(self.capture_layers) == 1,
                "--capture-layers: one layer's stream is no feature set",
            ),
            (self.lk_weight < 0, "--lk-weight must not be negative"),
            (self.lr <= 0, "--lr must be positive"),
            (self.batch_tokens < 1 or self.accumulate < 1, "batches need at least one token"),
            (self.max_length < self.num_steps + 2, "--max-length leaves nothing to predict"),
            (self.log_every < 1 or self.keep_checkpoints < 1, "at least 1 is needed"),
            (
                not (self.max_steps or self.epochs or self.max_minutes or self.init_draft),
                "say when to stop: --max-steps, --epochs or --max-minutes",
            ),
            (not (self.resume or self.has_data), "there is nothing to learn from: see --help"),
        ]
        for is_wrong, message in problems:
            if is_wrong:
                raise OptionsError(message)

    @property
    def has_data(self) -> bool:
        """Whether some source of text is named."""
        return bool(self.data or self.prompts or self.builtin_prompts or self.self_prompts)

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self)


def with_tiny(options: TrainOptions) -> TrainOptions:
    """Options of a smoke run; what it sets cannot be chosen."""
    small: dict[str, Any] = {
        "builtin_prompts": 24, "max_answers": 24, "answer_tokens": 32, "max_length": 320,
        "repetition_share": 0.3, "repetition_min": 64, "draft_vocab_size": 128, "num_steps": 3,
        "lr": 3e-3, "warmup_steps": 2, "batch_tokens": 1024, "max_steps": 12, "log_every": 4,
        "eval_prompts": 4, "eval_repeated": 2, "eval_tokens": 16, "eval_loops": 1,
    }  # fmt: skip
    for name, value in small.items():
        setattr(options, name, value)
    return options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One flag a field, in groups."""
    groups = {name: parser.add_argument_group(title) for name, title in _GROUPS.items()}
    for item in fields(TrainOptions):
        meta = item.metadata
        flag = "--" + item.name.replace("_", "-")
        group = groups[meta["group"]]
        if item.type == "bool":
            group.add_argument(flag, action="store_true", help=meta["help"])
        elif str(item.type).startswith("list"):
            kind = int if item.type == "list[int]" else str
            group.add_argument(flag, nargs="+", type=kind, default=[], help=meta["help"])
        else:
            kinds: dict[str, Any] = {"int": int, "float": float, "str": str}
            shown = f" (default {item.default})" if item.default not in ("", 0, 0.0) else ""
            group.add_argument(
                flag,
                type=kinds[str(item.type)],
                default=item.default,
                choices=meta.get("choices"),
                help=meta["help"] + shown,
            )


def options_from(namespace: argparse.Namespace) -> TrainOptions:
    """The parsed command line; raises OptionsError."""
    values = {item.name: getattr(namespace, item.name) for item in fields(TrainOptions)}
    options = TrainOptions(**values)
    if options.tiny:
        options = with_tiny(options)
    options.check()
    return options


def check_resumable(options: TrainOptions, saved: Mapping[str, Any]) -> None:
    """Raise OptionsError where a resumed run would not go on with what the first one began.

    How the data were made is not compared: the data themselves are in the folder.
    """
    compared = [
        item.name
        for item in fields(TrainOptions)
        if not item.metadata.get("free") and item.metadata["group"] != "data"
    ]
    compared += ["max_length"]
    current = options.as_dict()
    different = [name for name in compared if current[name] != saved.get(name)]
    if different:
        listed = ", ".join(
            f"{name} was {saved.get(name)!r} and is {current[name]!r}" for name in different
        )
        raise OptionsError(f"this run cannot be resumed with other options: {listed}")
