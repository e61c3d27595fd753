"""How captured steps meet the host: in page-locked memory, which they read and write themselves.

Every call to the driver costs the host as much as a small step of the scheduler. So nothing is
copied before a replay and nothing after it: the host leaves the inputs in a ring of places, and the
step fetches them and leaves its report there. Which place it is both sides count for themselves;
inputs have a number that comes back with the report, so that a wrong count is noticed.
Owns the memory on both sides and the events after the steps. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from sglang.srt.layers.logits_processor import HostReport
from sglang.srt.layers.step_frame import HEAD, HostRings
from sglang.srt.platforms import current_platform

# Of the step that is being prepared, the one that runs, one that nobody has read yet, and a spare.
NUM_PLACES = 4
_NOBODY = 0  # in place of a number


class HostExchange:
    """A ring of places in host memory; each step takes the next one, for inputs and report.

    `begin`, the replay, `end`, once a step. The captured step begins with `step_frame.receive` or
    `receive_decode` and ends with `choose_and_report`. All on the stream that is current when the
    exchange is made.
    """

    def __init__(self, num_values: int, num_reported: int, device: torch.device) -> None:
        """Room for so many inputs of a step, and requests of a report."""
        platform = current_platform()
        self.rings = HostRings(
            inputs=platform.pin(torch.zeros(NUM_PLACES, HEAD + num_values, dtype=torch.int64)),
            reports=platform.pin(torch.zeros(NUM_PLACES, 1 + 2 * num_reported, dtype=torch.int64)),
            count=torch.ones(1, dtype=torch.int64, device=device),
            received=torch.zeros(HEAD + num_values, dtype=torch.int64, device=device),
        )
        self.on_device = self.rings.received[HEAD:]  # int64 [num_values]: inputs of the step
        self._values: list[np.ndarray] = list(self.rings.inputs.numpy())
        self._done = [platform.event() for _ in range(NUM_PLACES)]
        self._stream = platform.current_stream()
        self._number = 1  # of the next step
        # By number of reported requests; of each place.
        self._reports_of: dict[int, list[torch.Tensor]] = {}

    def begin(self, num_values: int) -> np.ndarray:
        """Host memory, int64 [num_values], to be filled; the step that had it before has ended."""
        place = self._number % NUM_PLACES
        self._done[place].synchronize()
        values = self._values[place]
        values[0] = self._number
        return values[HEAD : HEAD + num_values]

    def end(self, num_reported: int) -> HostReport:
        """After the replay: its report, of as many requests as it was captured of.

        It stays until the step that is `NUM_PLACES` later begins.
        """
        reports = self._reports_of.get(num_reported)
        if reports is None:
            reports = [row[: 1 + 2 * num_reported] for row in self.rings.reports]
            self._reports_of[num_reported] = reports
        number = self._number
        place = number % NUM_PLACES
        report = HostReport(reports[place], number, self._done[place])
        report.done.record(self._stream)
        self._number = number + 1
        return report

    @contextmanager
    def uncounted(self, values: np.ndarray) -> Iterator[None]:
        """Around captures, and replays without `begin` and `end`: all have these inputs."""
        current_platform().synchronize()
        for place in self._values:
            place[HEAD : HEAD + len(values)] = values
            place[0] = _NOBODY
        try:
            yield
        finally:
            # The device counted what the host did not.
            self.rings.count.fill_(self._number)
