"""`WaitingQueue`: the requests that wait for a prefill step, and every way in and out.

Owns the list of them and what entering it means: the output is capped by what memory can hold,
what never fits and what is one too many is refused, and the prefix is fetched from storage
meanwhile. A request leaves by `admit`, or by the one other way, `remove`. Which of them is next is
the `SchedulePolicy`'s, how many fit into a step the `PrefillAdder`'s, and requests whose grammar
is compiled wait elsewhere (`GrammarManager`). Times are of the scheduler's clock that stands during
pauses. Scheduler thread only; all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from sglang.srt.environ import envs
from sglang.srt.managers.finish_check import FinishAbort
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddResult, PrefillAdder, SchedulePolicy
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What may enter the queue."""

    max_queued: int | None  # requests; None: any number
    enable_priority: bool  # a full queue gives up one of lower priority for the newcomer
    context_len: int  # tokens of one request, prompt and output
    pool_size: int  # slots of the KV pool
    step_slots: int = 1  # slots that a decode step writes per request


class WaitingQueue:
    """See the module docstring. Iterates over its requests, the next one first."""

    def __init__(
        self,
        limits: QueueLimits,
        *,
        policy: SchedulePolicy,
        tree_cache: BasePrefixCache,
        end: Callable[[Req, FinishAbort], None],
    ) -> None:
        """`end` tells the client that a request has ended and why; it holds neither row nor slots.

        It is called for what the queue itself turns away (`add`, `expire`).
        """
        self._limits = limits
        self._policy = policy
        self._tree_cache = tree_cache
        self._end = end
        self._reqs: list[Req] = []

    def __len__(self) -> int:
        return len(self._reqs)

    def __iter__(self) -> Iterator[Req]:
        return iter(self._reqs)

    def __repr__(self) -> str:
        return f"WaitingQueue({self._reqs})"

    # -- in -------------------------------------------------------------------------------------

    def add(self, req: Req, now: float) -> None:
        """Take a new request, or end it, or end another one in its place."""
        num_tokens, pool_size = len(req.origin_input_ids), self._limits.pool_size
        if num_tokens >= pool_size:
            message = (
                f"The input ({num_tokens} tokens) is longer than the KV cache ({pool_size} tokens)."
            )
            self._end(req, FinishAbort(message, 400, "BadRequestError"))
            return
        limit = self._limits.max_queued
        if limit is not None and len(self._reqs) >= limit:
            victim = self._victim(req)
            if victim is not req:
                self.remove(lambda waiting: waiting is victim)
            full = FinishAbort("The request queue is full.", 503, "ServiceUnavailable")
            self._end(victim, full)
            if victim is req:
                return
        self._cap_output(req)
        req.queue_entry_time = req.waiting_since = now
        self._prefetch(req)
        self._reqs.append(req)

    def put_back(self, req: Req, place: int, now: float) -> None:
        """Take a retracted request, without its slots; it is the `place`th from now on, from 0.

        It entered once, so no limit applies, and among equals it is as old as it was. The time that
        it ran is no waiting time: that goes on at `now`.
        """
        req.waiting_since = now
        self._prefetch(req)
        self._reqs.insert(place, req)

    def _cap_output(self, req: Req) -> None:
        """Cap the output by the context and by what the KV pool can hold for one request."""
        num_tokens = len(req.origin_input_ids)
        # A decode step writes slots beyond its last token. The first token needs no such step.
        in_pool = max(1, self._limits.pool_size - self._limits.step_slots + 1 - num_tokens)
        room = min(self._limits.context_len - num_tokens, in_pool)
        req.max_new_tokens = max(0, min(req.max_new_tokens, room))

    def _victim(self, req: Req) -> Req:
        """Who leaves when the queue is full: the newcomer, or a waiting one of lower priority.

        Not what has output: see `expire`.
        """
        if not self._limits.enable_priority:
            return req
        unread = [waiting for waiting in reversed(self._reqs) if not waiting.output_ids]
        # Of equals the one that came last.
        lowest = min(unread, key=lambda r: r.priority or 0, default=req)
        return lowest if (lowest.priority or 0) < (req.priority or 0) else req

    def _prefetch(self, req: Req) -> None:
        """Start fetching the request's prefix from storage, where there is one."""
        if self._tree_cache.storage_backend_name() is None:
            return
        req.init_next_round_input(self._tree_cache)
        matched = len(req.prefix_indices) + req.host_hit_length
        self._tree_cache.prefetch_from_storage(
            req.rid,
            req.last_host_node,
            req.cacheable_ids(self._tree_cache)[matched:],
            extra_key=req.extra_key,
            matched_node=req.best_match_node,
        )

    # -- out ------------------------------------------------------------------------------------

    def admit(self, adder: PrefillAdder, room: int) -> None:
        """Move requests into the step that `adder` fills, in order, until one does not fit.

        `room`: at most so many. One whose prefix is still being fetched is passed over and stays.
        """
        self._policy.sort(self._reqs)
        admitted: set[Req] = set()
        for req in self._reqs:
            if len(admitted) >= room:
                break
            if self._is_being_fetched(req):
                continue
            req.storage_loaded_tokens += self._tree_cache.pop_prefetch_loaded_tokens(req.rid)
            req.init_next_round_input(self._tree_cache)
            if adder.add_one_req(req) is not AddResult.ADDED:
                break
            admitted.add(req)
            if req.is_chunked:
                break
        if admitted:
            self._reqs = [req for req in self._reqs if req not in admitted]

    def _is_being_fetched(self, req: Req) -> bool:
        cache = self._tree_cache
        if not cache.check_prefetch_progress(req.rid):
            return True
        if not cache.has_followed_prefetch(req.rid):
            return False
        self._prefetch(req)
        return not cache.check_prefetch_progress(req.rid)

    def remove(self, matches: Callable[[Req], bool]) -> list[Req]:
        """Take out the requests that match and give up what is under way for them; returns them.

        The one way out other than admission.
        """
        leaving = {req: None for req in self._reqs if matches(req)}
        if leaving:
            self._reqs = [req for req in self._reqs if req not in leaving]
        for req in leaving:
            self._tree_cache.release_aborted_request(req.rid)
        return list(leaving)

    def expire(self, now: float) -> None:
        """End what has waited longer than the limit at `now`, where there is one.

        Not what has output: its client has begun to read, and it waits only for its memory.
        """
        limit_s = envs.SGLANG_REQ_WAITING_TIMEOUT.get()
        if limit_s <= 0:
            return
        late = f"Request waiting timeout reached ({limit_s} s)."

        def is_late(req: Req) -> bool:
            return not req.output_ids and req.waited_s + now - req.waiting_since > limit_s

        for req in self.remove(is_late):
            self._end(req, FinishAbort(late, 503, "ServiceUnavailable"))
