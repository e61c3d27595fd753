#!/usr/bin/env python3
"""Train an EAGLE-3 draft for a Llama- or Qwen-like model folder.

    scripts/train_eagle3.py --model FOLDER --output RUN --builtin-prompts 2000 --epochs 4
    scripts/train_eagle3.py --model FOLDER --output RUN --data chats.jsonl --max-minutes 60
    scripts/train_eagle3.py --model FOLDER --output RUN ... --resume

The target answers prompts itself where --prompts, --builtin-prompts or --self-prompts are given.
RUN/draft then is what `--speculative-draft-model-path` takes. docs/train_eagle3.md explains.
Needs no network.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python"))

from sglang.training.eagle3.options import OptionsError, add_arguments, options_from

logger = logging.getLogger("train_eagle3")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; 2 for options that cannot work, 1 for data or models that cannot."""
    description, _, examples = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    try:
        options = options_from(parser.parse_args(argv))
    except OptionsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr
    )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Takes seconds, and `--help` does not need it.
    from sglang.srt.configs.model_config import ModelConfigError
    from sglang.training.eagle3.folders import DraftFolderError
    from sglang.training.eagle3.run import run_training
    from sglang.training.eagle3.target import TargetError
    from sglang.training.eagle3.texts import DataError

    try:
        trainer = run_training(options)
    except OptionsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except (DataError, TargetError, DraftFolderError, ModelConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 130 if trainer.stop_requested else 0


if __name__ == "__main__":
    sys.exit(main())
