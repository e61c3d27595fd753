"""How captured steps meet the host: inputs come by one copy, reports go by the step's own write.

Every launch costs the host as much as a small step of the scheduler. So all inputs of a step are
one copy, and its report is written to the host by the step itself, at a place that it is told with
its inputs. Owns the memory on both sides and the events after the steps. Scheduler thread only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from sglang.srt.layers.dispatch import write_to_place
from sglang.srt.layers.logits_processor import HostReport
from sglang.srt.platforms import current_platform

# Of the step that is being prepared, the one that runs, one that nobody has read yet, and a spare.
NUM_PLACES = 4


class _Copy(NamedTuple):
    source: torch.Tensor
    target: torch.Tensor


class HostExchange:
    """A ring of places in host memory; each step takes the next one, for inputs and report.

    `begin`, `send`, the replay, `end`: in this order, once a step. The number of values is that of
    a captured size, of which there are few: views are made once for each.
    """

    def __init__(self, num_values: int, num_reported: int, device: torch.device) -> None:
        """Room for so many inputs of a step, and requests of a report."""
        platform = current_platform()
        # Behind the inputs: the step's place.
        host = torch.zeros(num_values + 1, dtype=torch.int64)
        self._hosts = [platform.pin(host.clone()) for _ in range(NUM_PLACES)]
        self._values: list[np.ndarray] = [host.numpy() for host in self._hosts]
        self._reports = platform.pin(torch.zeros(NUM_PLACES, 2 * num_reported, dtype=torch.int64))
        self._done = [platform.event() for _ in range(NUM_PLACES)]
        self._next = 0
        self.on_device = host.to(device, copy=True)  # int64 [num_values + 1]
        # By number of values, and by number of reported requests; of each place.
        self._copies: dict[int, list[_Copy]] = {}
        self._reports_of: dict[int, list[torch.Tensor]] = {}

    def begin(self, num_values: int) -> np.ndarray:
        """Host memory, int64 [num_values], to be filled; the step that had it before has ended."""
        self._done[self._next].synchronize()
        return self._values[self._next][:num_values]

    def send(self, num_values: int) -> None:
        """Copy what was filled since `begin` to the device, in stream order."""
        copies = self._copies.get(num_values)
        if copies is None:
            target = self.on_device[: num_values + 1]
            copies = [_Copy(host[: num_values + 1], target) for host in self._hosts]
            self._copies[num_values] = copies
        self._values[self._next][num_values] = self._next
        source, target = copies[self._next]
        target.copy_(source, non_blocking=True)

    def write_report(self, report: torch.Tensor, num_values: int) -> None:
        """In a step of so many inputs: write its report, int64 [2, b], to its place."""
        place = self.on_device[num_values : num_values + 1]
        write_to_place(report.view(-1), self._reports, place)

    def end(self, num_reported: int) -> HostReport:
        """After the replay: its report, of as many requests as it was captured of.

        It stays until so many further steps have begun that its place is taken again.
        """
        reports = self._reports_of.get(num_reported)
        if reports is None:
            reports = [row[: 2 * num_reported].view(2, -1) for row in self._reports]
            self._reports_of[num_reported] = reports
        report = HostReport(reports[self._next], self._done[self._next])
        report.done.record()
        self._next = (self._next + 1) % NUM_PLACES
        return report
