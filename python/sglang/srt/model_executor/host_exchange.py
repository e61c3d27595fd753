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

from sglang.srt.layers.dispatch import read_place, write_place
from sglang.srt.layers.logits_processor import HostReport
from sglang.srt.platforms import current_platform

# Of the step that is being prepared, the one that runs, one that nobody has read yet, and a spare.
NUM_PLACES = 4
# In front of inputs and report; two values, so that what follows is aligned as kernels like it.
_HEAD = 2
_NOBODY = -1  # in place of a number


class HostExchange:
    """A ring of places in host memory; each step takes the next one, for inputs and report.

    On the host `begin`, the replay, `end`, once a step; in a captured step `receive` first and
    `write_report` last. All on the stream that is current when the exchange is made.
    """

    def __init__(self, num_values: int, num_reported: int, device: torch.device) -> None:
        """Room for so many inputs of a step, and requests of a report."""
        platform = current_platform()
        self._inputs = _ring(_HEAD + num_values)
        self._values: list[np.ndarray] = list(self._inputs.numpy())
        self._reports = _ring(1 + 2 * num_reported)
        self._done = [platform.event() for _ in range(NUM_PLACES)]
        self._stream = platform.current_stream()
        self._number = 1  # of the next step, as the host counts
        self._count = torch.ones(1, dtype=torch.int64, device=device)  # the same on the device
        self._received = torch.zeros(_HEAD + num_values, dtype=torch.int64, device=device)
        self.on_device = self._received[_HEAD:]  # int64 [num_values]
        # By number of reported requests; of each place.
        self._reports_of: dict[int, list[torch.Tensor]] = {}

    # -- the host's side ------------------------------------------------------------------------

    def begin(self, num_values: int) -> np.ndarray:
        """Host memory, int64 [num_values], to be filled; the step that had it before has ended."""
        place = self._number % NUM_PLACES
        self._done[place].synchronize()
        values = self._values[place]
        values[0] = self._number
        return values[_HEAD : _HEAD + num_values]

    def end(self, num_reported: int) -> HostReport:
        """After the replay: its report, of as many requests as it was captured of.

        It stays until so many further steps have begun that its place is taken again.
        """
        reports = self._reports_of.get(num_reported)
        if reports is None:
            reports = [row[: 1 + 2 * num_reported] for row in self._reports]
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
            place[_HEAD : _HEAD + len(values)] = values
            place[0] = _NOBODY
        yield
        # The device counted what the host did not.
        self._count.fill_(self._number)

    # -- in a step ------------------------------------------------------------------------------

    def receive(self, num_values: int) -> None:
        """Bring the step's inputs to `on_device`."""
        read_place(self._inputs, self._count, self._received[: _HEAD + num_values])

    def write_report(self, report: torch.Tensor) -> None:
        """The step's report, int64 [2, b], to the host, and on to the next place."""
        write_place(self._received[:1], report.view(-1), self._reports, self._count)


def _ring(size: int) -> torch.Tensor:
    return current_platform().pin(torch.zeros(NUM_PLACES, size, dtype=torch.int64))
