"""Everything that a second rank can break, on two GPUs, in one command of a few minutes.

    python scripts/two_gpus.py --json FILE                 # two GPUs
    python scripts/two_gpus.py --device cpu --small        # gloo, tiny models: a self-test

The parts are in `sglang.test.two_ranks`. Each runs in a process group with a time limit of its own;
one that fails or hangs does not stop the others. Those that measure time run alone, the others side
by side. Prints a table, writes JSON after every part, and exits with 1 where a part failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang.test.two_ranks import PARTS, CheckFailed, Setup

# Both sides of every group agree on these; multicast over NVLink stays off.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0", "PYTHONUNBUFFERED": "1"}
_CPU_PATIENCE = 2.0  # time limits are for GPUs and many cores


def run_part(args: argparse.Namespace) -> int:
    """Child: one part, its outcome as JSON in `--json`."""
    outcome: dict[str, Any] = {"ok": False}
    try:
        setup = Setup(device=args.device, small=args.small, folder=Path(args.folder))
        outcome = {"ok": True, "figures": PARTS[args.part].run(setup)}
    except CheckFailed as error:
        outcome["error"] = str(error)
    except Exception as error:
        outcome["error"] = f"{type(error).__name__}: {error}"
        outcome["trace"] = traceback.format_exc()
    Path(args.json).write_text(json.dumps(outcome))
    return 0 if outcome["ok"] else 1


def start_part(name: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run one part in a process group; what became of it."""
    folder.mkdir(parents=True)
    figures, log = folder / "outcome.json", folder / "log"
    command = [sys.executable, __file__, "--part", name, "--device", args.device]
    command += ["--folder", str(folder), "--json", str(figures)]
    command += ["--small"] if args.small else []
    limit_s = PARTS[name].limit_s * (_CPU_PATIENCE if args.device == "cpu" else 1.0)
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        process.wait(limit_s)
        outcome = json.loads(figures.read_text())
    except subprocess.TimeoutExpired:
        outcome = {"ok": False, "error": f"not done after {limit_s:.0f} s"}
    except (OSError, ValueError):
        outcome = {"ok": False, "error": f"no outcome, exit code {process.returncode}"}
    finally:
        # Whatever is left of its servers goes with it.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
    if not outcome["ok"]:
        outcome["logs"] = {
            str(path.relative_to(folder)): path.read_text(errors="replace")[-3000:]
            for path in [log, *sorted(folder.glob("*/log")), *sorted(folder.glob("*.log"))]
        }
    return {"seconds": round(time.monotonic() - start, 1), **outcome}


class Results:
    """Outcomes so far, in a file and on the screen. Any thread."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.outcomes: dict[str, dict[str, Any]] = {}

    def add(self, name: str, outcome: dict[str, Any]) -> None:
        with self._lock:
            self.outcomes[name] = outcome
            if self._path:
                Path(self._path).write_text(json.dumps(self.outcomes, indent=2))
            self._show(name, outcome)

    @staticmethod
    def _show(name: str, outcome: dict[str, Any]) -> None:
        verdict = "ok" if outcome["ok"] else "FAILED"
        sys.stdout.write(f"{name:<12} {verdict:<7} {outcome['seconds']:6.1f} s\n")
        for key, value in outcome.get("figures", {}).items():
            text = value
            if isinstance(value, dict):
                text = ", ".join(f"{field} {content}" for field, content in value.items())
            sys.stdout.write(f"    {key:<22} {text}\n")
        if not outcome["ok"]:
            sys.stdout.write(f"    {outcome['error']}\n")
            for path, text in outcome["logs"].items():
                lines = text.splitlines()[-12:]
                sys.stdout.write(f"    -- {path}\n")
                sys.stdout.writelines(f"       {line[:200]}\n" for line in lines)
        sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny models only, fewer servers")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="default: all parts")
    parser.add_argument("--jobs", type=int, help="parts side by side (default: 4; CPU: 1)")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return run_part(args)
    os.environ.update(ENVIRONMENT)
    names = args.only or list(PARTS)
    jobs = args.jobs or (4 if args.device == "cuda" else 1)
    start = time.monotonic()
    results = Results(args.json)
    with tempfile.TemporaryDirectory() as temporary:

        def run(name: str) -> None:
            results.add(name, start_part(name, args, Path(temporary) / name))

        for name in names:
            if PARTS[name].alone:
                run(name)
        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(run, [name for name in names if not PARTS[name].alone]))
    failed = [name for name, outcome in results.outcomes.items() if not outcome["ok"]]
    sys.stdout.write(
        f"{len(names) - len(failed)} of {len(names)} parts passed in "
        f"{time.monotonic() - start:.0f} s{'; failed: ' + ', '.join(failed) if failed else ''}\n"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
