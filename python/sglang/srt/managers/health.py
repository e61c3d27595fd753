"""Whether the engine is alive: the judgement behind `/health` and `/health_generate`.

One probe at a time, shared by all callers: a one-token request while the engine generates, a ping
while it is paused. Any message of the engine counts as a sign of life. A long step must not look
like death, so a caller that would wait longer than `_ANSWER_WITHIN_S` is told "alive" as long as
the last sign is younger than `SGLANG_HEALTH_CHECK_TIMEOUT`, unless a process of the engine is
suspended, which no step explains. Probes that nobody waits for any more are withdrawn, so none pile
up in the engine. Event loop thread only.
"""

from __future__ import annotations

import asyncio
import logging
import time

import psutil

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import GenerateReqInput, new_rid
from sglang.srt.managers.request_errors import RequestError
from sglang.srt.managers.tokenizer_manager import ServerStatus, TokenizerManager

logger = logging.getLogger(__name__)

# Clients commonly give a health check three to five seconds.
_ANSWER_WITHIN_S = 2.0
_PROBE_PROMPT = [0]


class HealthProbe:
    """Shared by the health endpoints of one server."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._probe: asyncio.Task[None] | None = None
        self._asked_time = 0.0  # monotonic; the first question since the engine's last message

    async def check(self) -> bool:
        """Whether the engine is alive; moves `server_status` between Up and UnHealthy.

        Answers within `_ANSWER_WITHIN_S` seconds.
        """
        manager = self._manager
        if manager.dead_message is not None or manager.weights.state.is_mixed:
            return False
        manager.auto_create_handle_loop()
        if manager.weights.is_busy:
            # The schedulers load weights, and answer nothing else meanwhile.
            return not self._has_suspended_child()
        limit_s = envs.SGLANG_HEALTH_CHECK_TIMEOUT.get()
        if manager.last_receive_time >= self._asked_time:
            # The engine has answered since: its silence, if any, begins with this question.
            self._asked_time = time.monotonic()
        self._ensure_probe(limit_s)
        is_alive = await manager.wait_received(min(_ANSWER_WITHIN_S, limit_s))
        if not is_alive:
            silence_s = time.monotonic() - max(manager.last_receive_time, self._asked_time)
            is_alive = silence_s < limit_s and not self._has_suspended_child()
        if manager.dead_message is not None:
            return False
        if not is_alive:
            logger.error("Health check: the engine is suspended or silent for %g s", limit_s)
        manager.server_status = ServerStatus.Up if is_alive else ServerStatus.UnHealthy
        return is_alive

    def _has_suspended_child(self) -> bool:
        """Whether a process of the engine was stopped by a signal."""
        for pid in self._manager.engine_pids:
            try:
                if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
                    logger.error("Health check: process %d of the engine is suspended", pid)
                    return True
            except psutil.NoSuchProcess:
                continue  # the watchdog tells of ended processes
        return False

    def _ensure_probe(self, limit_s: float) -> None:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._run_probe(limit_s))

    async def _run_probe(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                if self._manager.is_holding:
                    await self._manager.control.ping(limit_s)
                else:
                    await self._generate_one()
        except (TimeoutError, RequestError) as exc:
            logger.warning("Health probe unanswered: %s", exc or "timed out")

    async def _generate_one(self) -> None:
        request = GenerateReqInput(
            input_ids=_PROBE_PROMPT,
            sampling_params={"max_new_tokens": 1, "min_new_tokens": 0, "temperature": 0.0},
            rid=f"{HEALTH_CHECK_RID_PREFIX}_{new_rid()}",
            log_metrics=False,
            no_logs=True,
        )
        async for _ in self._manager.generate_request(request):
            return
