"""How busy this machine is while runs are active, and how much of that is theirs.

A wrapper measures the CPU time of its run's processes.  A node may be on this machine too, as a virtual
machine or in a test; what it does for a run is in no measure but the machine's own.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

MIN_QUIET_S = 30.0
"""A shorter time without runs has the daemon's steps between two of them."""


class Sample(NamedTuple):
    """Seconds since the boot, CPU seconds since then of all cores, and how many processes can run."""

    at: float
    busy_s: float
    runnable: float


def read_sample() -> Sample:
    """Return what the kernel counts now; nothing where it does not say."""
    try:
        at, idle_s = map(float, Path("/proc/uptime").read_text().split())
    except (OSError, ValueError):
        return Sample(math.nan, math.nan, math.nan)
    return Sample(at, at * (os.cpu_count() or 1) - idle_s, os.getloadavg()[0])


class MachineLoad:
    """The share of its time that a run keeps a core of this machine busy, and how many runs were active.

    What the machine does without runs is not theirs, and of busy cores they have no more than the share of
    their number among the processes that can run.
    """

    def __init__(self, read: Callable[[], Sample] = read_sample) -> None:
        self._read = read
        self._before = read()
        self._others = 0.0
        """Busy cores in the latest time without runs."""
        self._run_s = self._busy_s = self._active_s = 0.0

    def note(self, active: int) -> None:
        """Note that so many runs were active since the last call."""
        before, now = self._before, self._read()
        self._before = now
        elapsed_s = now.at - before.at
        if not elapsed_s > 0.0:  # also where nothing is known
            return
        busy = (now.busy_s - before.busy_s) / elapsed_s
        if active:
            self._run_s += active * elapsed_s
            self._active_s += active * active * elapsed_s
            self._busy_s += max(0.0, busy - self._others) * elapsed_s * active / max(active, now.runnable)
        elif elapsed_s >= MIN_QUIET_S:
            self._others = busy

    def decay(self, weight: float) -> None:
        """Let what was measured so far count so much less."""
        self._run_s, self._busy_s, self._active_s = (
            weight * each for each in (self._run_s, self._busy_s, self._active_s)
        )

    @property
    def cpu_share(self) -> float:
        return min(1.0, self._busy_s / self._run_s) if self._run_s else 0.0

    @property
    def active(self) -> float:
        """How many runs were active with a run, itself included, on average."""
        return self._active_s / self._run_s if self._run_s else 1.0
