"""The `sglang` command: `sglang serve FLAGS` and `sglang version`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang.version import __version__

_USAGE = """usage: sglang COMMAND ...

commands:
  serve     start a server (sglang serve --help lists its flags)
  version   show the version
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a sub-command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments.pop(0) if arguments else ""
    if command == "serve":
        # Loaded only for this command, so that the others answer at once.
        from sglang import launch_server

        return launch_server.main(arguments)
    if command in ("version", "--version"):
        sys.stdout.write(f"sglang {__version__}\n")
        return 0
    if command in ("-h", "--help", "help"):
        sys.stdout.write(_USAGE)
        return 0
    sys.stderr.write(_USAGE if not command else f"sglang: error: unknown command {command!r}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
