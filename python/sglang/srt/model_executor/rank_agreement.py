"""What the ranks of a model come to the same answer about in a weight update.

A rank that fails alone would leave its weights behind the others', so every step of an update ends
with one of these. All are collectives over the ranks' host group, and the plain answer on one rank.
Used by the weight updater; scheduler thread only.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable

import torch

from sglang.srt.distributed.communication import all_reduce_min, barrier, broadcast_bytes
from sglang.srt.distributed.parallel_state import TPGroup
from sglang.srt.utils.serialization import UnsafePickleError

logger = logging.getLogger(__name__)

# Of what an attempt may raise, what says all in its message.
_REFUSALS = (ValueError, UnsafePickleError, OSError)


class RankAgreement:
    """See the module docstring."""

    def __init__(self, tp: TPGroup) -> None:
        self._rank = tp.rank
        self._size = tp.size
        self._group = tp.cpu_group

    def wait_for_all(self) -> None:
        """Return when every rank is here. Collective."""
        barrier(self._group)

    def attempt(self, action: Callable[[], object]) -> str | None:
        """Run `action` here; the error of the first rank that had one, the same on all. Collective.

        None: it succeeded everywhere.
        """
        error: str | None = None
        try:
            action()
        except Exception as fault:  # noqa: BLE001 - damaged data, lost trainers, users' loaders
            text = str(fault) or type(fault).__name__
            error = text.encode("utf-8", "replace").decode()  # names in pickles may be anything
            logger.warning("Weight update: %s", error, exc_info=not isinstance(fault, _REFUSALS))
        if self._group is None:
            return error
        failing = torch.tensor([self._size if error is None else self._rank], dtype=torch.int64)
        first = int(all_reduce_min(failing, self._group)[0])
        if first == self._size:
            return None
        return broadcast_bytes((error or "").encode(), first, self._group).decode()

    def is_alike(self, text: str) -> bool:
        """Whether every rank has the same text. Collective."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        least, most = all_reduce_min(torch.tensor([digest, -digest]), self._group).tolist()
        return bool(least == -most)

    def is_anywhere(self, flag: bool) -> bool:
        """Whether any rank has it. Collective."""
        votes = torch.tensor([0 if flag else 1], dtype=torch.int64)
        return int(all_reduce_min(votes, self._group)[0]) == 0
