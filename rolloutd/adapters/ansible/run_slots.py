"""Slots of the runs on this machine: a number, or as many as the processor cores can carry.

A run waits for its node most of the time, so a core carries several.  How many is measured: the CPU time of
the runs that have ended, by their duration.  While the cores are busy runs last longer, so the number falls
until the runs need BUSY_SHARE of the cores.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rolloutd.concurrency.slots import Slots
from rolloutd.ports import RunLoad, TunedRunnerStatus

UNMEASURED = 16
"""Runs at once before one has ended."""

MIN_PER_CORE, MAX_PER_CORE = 2, 16
"""Bounds of the measured number; a run has some 35 MB of memory."""

BUSY_SHARE = 0.9
"""Share of the cores that runs may use; the rest is the daemon's and sshd's."""

DECAY = 0.9
"""Weight of the earlier runs when another has ended: about the last ten count."""

MIN_QUIET_S = 30.0
"""A shorter time without runs has the daemon's steps between two of them."""


class RunSlots:
    """The runs that are active, and those that wait in `status`."""

    def __init__(
        self, parallel: int | None, cores: int | None = None, machine: MachineLoad | None = None
    ) -> None:
        """`parallel` None follows the cores."""
        self._is_measured = parallel is None
        self._cores = cores or len(os.sched_getaffinity(0))
        self._cpu_s = self._duration_s = 0.0
        self._machine = machine or MachineLoad()
        self.status = TunedRunnerStatus(parallel or UNMEASURED)
        self._slots = Slots(lambda: self.status.parallel)

    async def acquire(self, node: str) -> None:
        """Wait for a slot; the status shows the node meanwhile."""
        since = time.time()
        if self._slots.active >= self.status.parallel:
            self.status.waiting.setdefault(node, since)
        try:
            await self._slots.acquire()
        finally:
            if self.status.waiting.get(node) == since:
                del self.status.waiting[node]
        self._note_active()

    def take(self) -> None:
        """Count a run of an earlier daemon, also beyond the limit."""
        self._slots.take()
        self._note_active()

    def release(self) -> None:
        self._slots.release()
        self._note_active()

    def _note_active(self) -> None:
        self._machine.note(self.status.active)
        self.status.active = self._slots.active

    def record_end(self, cpu_s: float, duration_s: float) -> None:
        self._cpu_s = self._cpu_s * DECAY + cpu_s
        self._duration_s = self._duration_s * DECAY + duration_s
        if self._duration_s > 0.0:
            share = max(min(1.0, self._cpu_s / self._duration_s), self._machine.cpu_share)
            self.status.load = RunLoad(self._cores, share, self._machine.active)
        self._machine.decay(DECAY)
        if self._is_measured and self._cpu_s > 0:
            wanted = int(self._cores * BUSY_SHARE * self._duration_s / self._cpu_s)
            bounds = self._cores * MIN_PER_CORE, self._cores * MAX_PER_CORE
            self.status.parallel = min(max(wanted, bounds[0]), bounds[1])
            self._slots.admit()


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
