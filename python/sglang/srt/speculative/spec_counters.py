"""How much of what was drafted the target accepted: counters of a request and of a server.

Filled by the result processor; the scheduler thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SpecCounters:
    """Verifications of one request, or of all. `num_draft_tokens`: verified a step, root included.

    `histogram[i]`: verifications that accepted i drafts.
    """

    num_draft_tokens: int
    verify_ct: int = 0
    num_correct_drafts: int = 0
    histogram: list[int] = field(default_factory=list)

    def count(self, num_accepted: int) -> None:
        """A verification added `num_accepted` tokens, the bonus token included."""
        num_drafts = num_accepted - 1
        self.verify_ct += 1
        self.num_correct_drafts += num_drafts
        missing = num_drafts + 1 - len(self.histogram)
        if missing > 0:
            self.histogram += [0] * missing
        self.histogram[num_drafts] += 1

    @property
    def num_proposed_drafts(self) -> int:
        return self.verify_ct * (self.num_draft_tokens - 1)

    @property
    def accept_rate(self) -> float:
        """Accepted drafts of those proposed."""
        return self.num_correct_drafts / max(1, self.num_proposed_drafts)

    @property
    def accept_length(self) -> float:
        """Tokens a verification, bonus tokens included."""
        return (self.num_correct_drafts + self.verify_ct) / max(1, self.verify_ct)

    def to_meta_info(self, completion_tokens: int) -> dict[str, Any] | None:
        """`meta_info` of a finished request, new and old names; None without a verification."""
        if self.verify_ct == 0:
            return None
        return {
            "spec_verify_ct": self.verify_ct,
            "spec_accept_length": completion_tokens / self.verify_ct,
            "spec_accept_rate": self.accept_rate,
            "spec_num_correct_drafts": self.num_correct_drafts,
            "spec_num_proposed_drafts": self.num_proposed_drafts,
            "spec_correct_drafts_histogram": list(self.histogram),
            "spec_accept_token_num": self.num_correct_drafts,
            "spec_draft_token_num": self.num_proposed_drafts,
        }
