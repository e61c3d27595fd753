"""The training loop: steps, learning rate, log, evaluation, checkpoints, exact resumption.

A step depends on the checkpoint's tensors, on the options and on its number alone: the same
numbers come out whether a run was interrupted or not, as long as steps or epochs end it. Where time
ends it, the learning rate follows the clock, and no two runs are alike.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sglang.srt import platforms
from sglang.training.eagle3.attention import attention_function, self_check
from sglang.training.eagle3.dataset import Dataset
from sglang.training.eagle3.draft import Eagle3Draft
from sglang.training.eagle3.evaluation import decode_chain, simulate
from sglang.training.eagle3.folders import Checkpoints, write_draft
from sglang.training.eagle3.loss import LossOptions, LossReport, batch_loss, row_targets
from sglang.training.eagle3.optimizers import Optimizers
from sglang.training.eagle3.options import TrainOptions
from sglang.training.eagle3.progress import Clock, bar
from sglang.training.eagle3.samples import Batch, BatchPlan
from sglang.training.eagle3.target import FrozenTarget

logger = logging.getLogger(__name__)

_SAVE_RESERVE_S = 10.0  # for the last checkpoint and the draft's files


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run is. `begin_s`: the clock when its first step began."""

    step: int = 0
    epoch: int = 0
    batch_index: int = 0
    num_tokens: int = 0
    begin_s: float = 0.0


class Trainer:
    """One run in `options.output`. `losses` holds the loss of every step since the start here."""

    def __init__(
        self,
        options: TrainOptions,
        target: FrozenTarget,
        draft: Eagle3Draft,
        dataset: Dataset,
        clock: Clock,
    ) -> None:
        self._options = options
        self._target = target
        self._draft = draft
        self._dataset = dataset
        self._clock = clock
        self._device = target.device
        self._folder = Path(options.output)
        self._attention = attention_function(options.attention)
        if options.attention == "merged":
            dtype = torch.bfloat16 if self._device.type == "cuda" else torch.float32
            self_check(self._device, dtype, draft.shape.head_dim)
        self._plan = BatchPlan(dataset.train, options.batch_tokens, options.num_steps, options.seed)
        self._loss_options = LossOptions(
            step_decay=options.step_decay,
            chain_weight=options.chain_weight,
            lk_weight=options.lk_weight,
            acceptance=options.acceptance,
            chunk_rows=options.loss_rows,
        )
        self._optimizers = Optimizers(draft, options, fused=self._device.type == "cuda")
        self._checkpoints = Checkpoints(self._folder / "checkpoints", options.keep_checkpoints)
        self._eval_s = 0.0
        self.progress = Progress(begin_s=clock.elapsed_s())
        self.losses: list[float] = []
        self.stop_requested = False

    # -- the run ----------------------------------------------------------------------------------

    def train(self) -> None:
        """Until steps, epochs or time are used up; then evaluate and save."""
        options, progress = self._options, self.progress
        if progress.step == 0:
            self.evaluate()  # also tells how long the one at the end will take
        window: list[LossReport] = []
        begin = (progress.num_tokens, self._clock.elapsed_s())
        with bar(options.max_steps or None, "train", "step") as steps:
            steps.update(progress.step)
            while self._share_done() < 1 and not self.stop_requested:
                window.append(self._step())
                steps.update(1)
                if progress.step % options.log_every == 0:
                    self._log(window, begin)
                    window, begin = [], (progress.num_tokens, self._clock.elapsed_s())
                if options.eval_every and progress.step % options.eval_every == 0:
                    self.evaluate()
                if options.checkpoint_every and progress.step % options.checkpoint_every == 0:
                    self.save_checkpoint()
        self.losses += [float(report.total) for report in window]
        self.save_checkpoint()
        write_draft(self._folder / "draft", self._draft, self._target, options.draft_dtype)
        if progress.step and not self.stop_requested:
            self.evaluate()
        logger.info("The draft is in %s after %d steps", self._folder / "draft", progress.step)

    def _share_done(self) -> float:
        """0 at the first step, 1 when the run is over; the largest of what limits it."""
        options, progress = self._options, self.progress
        shares = []
        if options.max_steps:
            shares.append(progress.step / options.max_steps)
        if options.epochs:
            # Within an epoch the number of batches is not known before it is planned.
            shares.append(progress.num_tokens / (options.epochs * self._plan.num_tokens))
        if options.max_minutes:
            end_s = 60 * options.max_minutes - self._eval_s - _SAVE_RESERVE_S
            left = max(end_s - progress.begin_s, 1e-3)
            shares.append((self._clock.elapsed_s() - progress.begin_s) / left)
        return max(shares, default=1.0)

    def _learning_rate(self) -> float:
        options = self._options
        if self.progress.step < options.warmup_steps:
            return options.lr * (self.progress.step + 1) / options.warmup_steps
        share = min(self._share_done(), 1.0)
        cosine = 0.5 * (1 + math.cos(math.pi * share))
        return options.lr * (options.min_lr_share + (1 - options.min_lr_share) * cosine)

    def _step(self) -> LossReport:
        """One optimiser step; the report is that of its last batch."""
        options = self._options
        self._optimizers.set_learning_rate(self._learning_rate())
        for _ in range(options.accumulate):
            report = self.forward(self._next_batch())
            (report.total / options.accumulate).backward()
        if options.clip:
            torch.nn.utils.clip_grad_norm_(self._draft.parameters(), options.clip)
        self._optimizers.step()
        self.progress.step += 1
        return LossReport(
            total=report.total.detach(),
            step_losses=report.step_losses,
            step_hits=report.step_hits,
            accept_length=report.accept_length,
        )

    def forward(self, batch: Batch) -> LossReport:
        """Loss of a batch, with gradients where they are enabled."""
        num_steps = self._options.num_steps
        to_device = platforms.current.to_device_async
        token_ids = to_device(torch.nn.functional.pad(batch.token_ids, (0, num_steps)))
        rows, row_weights = to_device(batch.rows), to_device(batch.row_weights)
        states = self._target.states(token_ids[:, : batch.token_ids.shape[1]])
        targets = row_targets(
            self._target.logits,
            self._draft,
            states.last.flatten(0, 1)[rows],
            self._options.loss_rows,
        )
        embeds = self._target.embed(token_ids)
        with self._autocast():
            steps = self._draft.unroll(embeds, states.features, num_steps, self._attention)
            return batch_loss(self._draft, steps, targets, rows, row_weights, self._loss_options)

    def _next_batch(self) -> Batch:
        progress = self.progress
        batch = self._plan.batch(progress.epoch, progress.batch_index)
        if batch is None:
            progress.epoch, progress.batch_index = progress.epoch + 1, 0
            batch = self._plan.batch(progress.epoch, 0)
        if batch is None:
            raise RuntimeError("an epoch without batches")
        progress.batch_index += 1
        progress.num_tokens += batch.num_tokens
        return batch

    def _autocast(self) -> AbstractContextManager[Any]:
        is_cuda = self._device.type == "cuda"
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=is_cuda)

    # -- what is told -----------------------------------------------------------------------------

    def _log(self, window: list[LossReport], begin: tuple[int, float]) -> None:
        progress = self.progress
        seconds = self._clock.elapsed_s() - begin[1]
        self.losses += [float(report.total) for report in window]
        record = {
            "step": progress.step,
            "loss": sum(self.losses[-len(window) :]) / len(window),
            "accept_length": float(torch.stack([r.accept_length for r in window]).mean()),
            "hits": torch.stack([r.step_hits for r in window]).mean(0).tolist(),
            "step_losses": torch.stack([r.step_losses for r in window]).mean(0).tolist(),
            "lr": self._optimizers.learning_rate,
            "tokens_per_s": (progress.num_tokens - begin[0]) / max(seconds, 1e-9),
        }
        self._record("train", record)
        logger.info(
            "step %d, loss %.4f, accept length %.2f (all positions), hits %s, lr %.2g, %.0f tok/s",
            progress.step, record["loss"], record["accept_length"],
            " ".join(f"{hit:.2f}" for hit in window[-1].step_hits.tolist()),
            record["lr"], record["tokens_per_s"],
        )  # fmt: skip
        if not math.isfinite(self.losses[-1]):
            raise RuntimeError(f"the loss is {self.losses[-1]} at step {progress.step}")

    def evaluate(self) -> dict[str, float]:
        """Accept lengths of held-out prompts and repeated texts; also into the log."""
        options, start_s = self._options, self._clock.elapsed_s()
        found: dict[str, float] = {}
        for name, samples in (("chat", self._dataset.chat), ("repeated", self._dataset.repeated)):
            if not samples:
                continue
            with self._autocast():
                lens = simulate(
                    self._target, self._draft, samples, options.num_steps, self._attention,
                    options.batch_tokens,
                )  # fmt: skip
                found[f"{name}_simulated"] = sum(lens) / max(len(lens), 1)
                num_tokens = num_verifications = 0
                for sample in samples[: options.eval_loops]:
                    prompt = sample.token_ids[: sample.prompt_length].tolist()
                    run = decode_chain(
                        self._target, self._draft, prompt, options.num_steps, options.eval_tokens
                    )
                    num_tokens += len(run.output_ids)
                    num_verifications += len(run.accept_lens)
            if num_verifications:
                found[f"{name}_decoded"] = num_tokens / num_verifications
        self._eval_s = self._clock.elapsed_s() - start_s
        self._record("eval", {"step": self.progress.step, **found})
        listed = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
        logger.info("step %d, accept lengths: %s", self.progress.step, listed or "nothing held out")
        return found

    def _record(self, kind: str, record: Mapping[str, Any]) -> None:
        line = {"kind": kind, "elapsed_s": round(self._clock.elapsed_s(), 1), **record}
        with (self._folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Everything that the next step depends on."""
        state = {
            "progress": asdict(self.progress),
            "elapsed_s": self._clock.elapsed_s(),
            "eval_s": self._eval_s,
            "draft": self._draft.state_dict(),
            "optimizers": self._optimizers.state(),
        }
        path = self._checkpoints.save(self.progress.step, state)
        logger.info("Checkpoint %s", path)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint; its vocabulary must be that of the draft given here."""
        self._draft.load_state_dict(state["draft"])
        self._optimizers.restore(state["optimizers"])
        self.progress = Progress(**state["progress"])
        self._eval_s = state["eval_s"]
        logger.info("Going on from step %d", self.progress.step)
