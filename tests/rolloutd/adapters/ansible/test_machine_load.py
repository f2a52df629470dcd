"""What runs need of this machine, by samples of a modelled machine."""

from __future__ import annotations

import math

import pytest

from rolloutd.adapters.ansible.run_slots import MachineLoad, RunSlots, Sample, read_sample
from rolloutd.ports import RunLoad


class Machine:
    """A machine whose load a test sets; `pass_time` is with so many runs."""

    def __init__(self) -> None:
        self.now = self.busy_s = 0.0
        self.runnable = 0.0
        self.load = MachineLoad(lambda: Sample(self.now, self.busy_s, self.runnable))

    def pass_time(self, seconds: float, *, runs: int, busy: float) -> None:
        self.now += seconds
        self.busy_s += busy * seconds
        self.load.note(runs)


def test_busy_cores_are_those_of_the_runs() -> None:
    machine = Machine()
    machine.pass_time(10.0, runs=2, busy=1.6)
    assert (machine.load.cpu_share, machine.load.active) == (pytest.approx(0.8), 2.0)


def test_load_without_runs_is_not_theirs() -> None:
    machine = Machine()
    machine.pass_time(60.0, runs=0, busy=3.0)
    machine.pass_time(2.0, runs=0, busy=9.0)  # the daemon's own steps before a run
    machine.pass_time(10.0, runs=4, busy=3.4)
    assert machine.load.cpu_share == pytest.approx(0.1)


def test_runs_have_their_part_of_a_crowded_machine() -> None:
    machine = Machine()
    machine.runnable = 12.0
    machine.pass_time(10.0, runs=2, busy=2.0)
    assert machine.load.cpu_share == pytest.approx(1 / 6)


def test_number_of_runs_is_that_beside_a_run() -> None:
    machine = Machine()
    machine.pass_time(10.0, runs=1, busy=0.5)
    machine.pass_time(10.0, runs=3, busy=1.5)
    assert machine.load.active == (1 + 9) / 4
    assert machine.load.cpu_share == pytest.approx(0.5)


def test_kernel_counts_what_this_process_computes() -> None:
    before = read_sample()
    sum(number for number in range(3_000_000))
    after = read_sample()
    assert after.busy_s > before.busy_s
    assert after.at > before.at


def test_machine_without_counters_leaves_cpu_time_of_runs() -> None:
    nothing = Sample(math.nan, math.nan, math.nan)
    slots = RunSlots(None, 4, MachineLoad(lambda: nothing))
    slots.take()
    assert slots.status.load is None
    slots.release()
    slots.record_end(cpu_s=2.0, duration_s=8.0)
    assert slots.status.load == RunLoad(4, 0.25, 1.0)
