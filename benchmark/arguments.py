"""What the command lines of the benchmarks share: help, checked values, a device that exists.

No script: the benchmarks import it. It needs no torch before a device is asked for, since
`bench_serving.py` does without.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.workloads import LengthRange

SMALL_ON_CPU = "--device cpu --small is the small form"


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the epilog, and adds defaults that the texts do not say."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        value = action.default
        is_nothing = value is None or value is False or value in ("", [], {})
        if is_nothing or "default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with the first line of a docstring and ends with the rest."""
    first, _, rest = (doc or "").partition("\n")
    return argparse.ArgumentParser(
        description=first, epilog=rest.strip("\n"), formatter_class=HelpFormatter
    )


def parse_small(
    parser: argparse.ArgumentParser, small: dict[str, Any], *, needs_model: bool = False
) -> argparse.Namespace:
    """Read the command line; `--small` brings other defaults, and what is given counts in any case.

    A `--model` beside it ends with an error: the small form makes one of its own. So does neither
    of both, with `needs_model`.
    """
    args = parser.parse_args()
    if args.small:
        if getattr(args, "model", None):
            parser.error("--small has a tiny model of its own: leave out --model")
        parser.set_defaults(**small)
        args = parser.parse_args()
    elif needs_model and not args.model:
        parser.error("--model is needed (or --small)")
    return args


def whole_number(least: int) -> Callable[[str], int]:
    """A parser of whole numbers of at least `least`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text} is no whole number of {least} or more")
        return value

    return parse


count = whole_number(1)


def positive(text: str) -> float:
    """A number above 0, `inf` included."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def fraction(text: str) -> float:
    """A number between 0 and 1, neither included."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number between 0 and 1")
    return value


def length_range(text: str) -> LengthRange:
    try:
        return LengthRange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text} is neither a length N nor a range LOW:HIGH, 1 <= LOW <= HIGH"
        ) from error


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text} is no JSON object such as {{"top_k": 5}}')
    return value


def model_path(text: str) -> str:
    if not Path(text).expanduser().exists():
        raise argparse.ArgumentTypeError(f"there is no {text}")
    return text


def input_file(text: str) -> Path:
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def output_file(text: str) -> Path:
    """A path that can be written to, so that nothing is measured in vain."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def require_device(device: str, small_form: str = SMALL_ON_CPU) -> None:
    """Raise SystemExit, in one line, where `device` is CUDA and there is none."""
    # Late: a client of a server that runs elsewhere needs no torch.
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"{Path(sys.argv[0]).name}: needs a CUDA device; {small_form}")


def require_triton() -> None:
    """Raise SystemExit, in one line, where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        raise SystemExit(f"{Path(sys.argv[0]).name}: needs Triton, which is not installed here")
