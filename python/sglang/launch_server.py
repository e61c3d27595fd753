"""`python -m sglang.launch_server FLAGS`: start a server and stay until it ends.

Exit codes: 0 after SIGTERM or SIGINT, 2 for flags that cannot work, 1 when a child does not
start, other non-zero codes when one dies later. Children import this module under another name,
so it does nothing at import.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from sglang.srt.entrypoints.launch import LaunchError, Launching, start_subprocesses
from sglang.srt.environ import envs
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils.logging import configure_logger, suppress_noisy_warnings
from sglang.srt.utils.network import check_host, wait_port_available

logger = logging.getLogger(__name__)


def run_server(server_args: ServerArgs) -> int:
    """Run the processes of this host until they end; return the exit code."""
    configure_logger(server_args.log_level)
    suppress_noisy_warnings()
    signal.signal(signal.SIGTERM, _leave)
    try:
        return _serve(server_args)
    except LaunchError as error:
        logger.error("The server did not start: %s", error)
        return 1
    except KeyboardInterrupt:
        return 0


def _leave(number: int, frame: FrameType | None) -> None:
    # Unwinds through the `finally` blocks that stop the children.
    raise SystemExit(0)


def _serve(server_args: ServerArgs) -> int:
    if server_args.node_rank == 0:
        try:
            check_host(server_args.host)
        except ValueError as error:
            raise LaunchError(f"--host {error}") from error
        timeout_s = envs.SGLANG_WAIT_PORT_TIMEOUT.get()
        if not wait_port_available(server_args.port, server_args.host, timeout_s):
            raise LaunchError(f"{server_args.host}:{server_args.port} is in use or not ours")
    launching = start_subprocesses(server_args)
    if server_args.node_rank != 0:
        return _stay(launching)
    try:
        # Imported while the children load: the web framework takes about a second.
        from sglang.srt.entrypoints.http_server import launch_server

        launch_server(server_args, launching=launching)
    except BaseException:
        launching.abandon()
        raise
    return 0


def _stay(launching: Launching) -> int:
    """A host without HTTP: its ranks leave when rank 0 on the first host tells them to."""
    launched = launching.wait_ready()
    logger.info("The ranks of this host are ready")
    try:
        if not envs.SGLANG_BLOCK_NONZERO_RANK_CHILDREN.get():
            return 0
        return launched.wait_children()
    finally:
        launched.shutdown()


def _fail(message: str) -> int:
    sys.stderr.write(f"sglang: error: {message}\n")
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Parse flags and run. Returns the exit code."""
    configure_logger("info")
    try:
        server_args = prepare_server_args(sys.argv[1:] if argv is None else argv)
    except ValueError as error:
        return _fail(str(error))
    return run_server(server_args)


if __name__ == "__main__":
    logger.warning("`python -m sglang.launch_server` is deprecated: use `sglang serve`")
    sys.exit(main())
