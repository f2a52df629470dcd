"""Faults of the simulated world: power cuts, outages, clock jumps, two daemons."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING, Any

from rolloutd.engine.daemon import Daemon
from rolloutd.store.sqlite import database
from tests.sim import plans
from tests.sim.daemon_process import remove_lock
from tests.sim.sim_node import SimNode

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class FaultSchedule:
    """Injects faults by the seed; a fault ends after a while."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation

    async def run(self, until: float, fault_probability: float) -> None:
        """Let something happen about every minute, with the probability `storm`; `until` is of the loop."""
        faults = self._sim.world.streams.faults
        while self._sim.loop.time() < until:
            await asyncio.sleep(faults.expovariate(1.0 / 60.0))
            if faults.random() < fault_probability:
                _FAULTS[int(faults.random() * len(_FAULTS))](self)

    def _random_node(self) -> SimNode:
        return self._sim.world.streams.faults.choice(list(self._sim.world.machines.values()))

    def _crash(self) -> None:
        faults = self._sim.world.streams.faults
        self._sim.steps_to_crash = faults.randrange(1, 400)
        self._sim.restart_at = self._sim.loop.time() + faults.choice((0.0, 0.0, 60.0, 1800.0))
        if faults.random() < 0.2:
            self._sim.world.lose_power()

    def _stop(self) -> None:
        """Let an admin restart the service."""
        daemon = self._sim.newest_daemon()
        if daemon is not None:
            self._sim.coverage.count("fault:stopped")
            daemon.stop()

    def _second_daemon(self) -> None:
        """Let an admin remove the lock and start the daemon a second time."""
        if self._sim.newest_daemon() is None:
            return
        if self._sim.world.streams.faults.random() < 0.7:
            remove_lock(self._sim.state_dir)
            self._sim.coverage.count("fault:two-daemons")
        else:
            self._sim.coverage.count("fault:started-twice")
        self._sim.start_daemon()

    def _change_temporarily(self, subject: Any, name: str, value: Any) -> None:
        """Let something be otherwise, and after a while as it was."""
        before, length_s = getattr(subject, name), self._sim.world.streams.faults.choice((20.0, 120.0, 900.0))
        setattr(subject, name, value)
        if isinstance(subject, SimNode):
            self._sim.world.checker.unhealthy_until[subject.name] = self._sim.loop.time() + length_s
        self._sim.loop.call_from_world(
            length_s, lambda: None if self._sim.faults_stopped else setattr(subject, name, before)
        )

    def _outage(self) -> None:
        self._change_temporarily(self._random_node(), "up", False)
        self._sim.coverage.count("fault:node-down")

    def _fail_checks(self) -> None:
        self._change_temporarily(self._random_node(), "fails_checks", True)
        self._sim.coverage.count("fault:old-boot-id")

    def _block_drain(self) -> None:
        self._change_temporarily(self._random_node(), "stuck", True)
        self._sim.coverage.count("fault:isolation-never-ends")

    def _change_settings(self) -> None:
        """Let an admin write other limits."""
        self._sim.change_settings(
            plans.with_random_limits(self._sim.world.streams.faults, self._sim.settings)
        )

    def _put_in_service(self) -> None:
        """Let an admin put a node in service at which we are."""
        ours = [machine for machine in self._sim.world.machines.values() if machine.isolating_rollouts]
        if ours and self._sim.world.undo_isolation_by_other(self._sim.world.streams.faults.choice(ours)):
            self._sim.coverage.count("fault:isolation-undone")

    def _remove_busy_node(self) -> None:
        """Let a node vanish from the inventory, mostly one that we are at, and let an admin refresh it."""
        ours = [
            machine
            for machine in self._sim.world.machines.values()
            if machine.isolating_rollouts or machine.is_inspected
        ]
        self._unlist(self._sim.world.streams.faults.choice(ours) if ours else self._random_node())

    def _unlist(self, machine: SimNode) -> None:
        self._change_temporarily(machine, "listed", False)
        daemon = self._sim.newest_daemon()
        if daemon is not None and daemon.daemon is not None:
            daemon.run(_refresh(daemon.daemon))
        self._sim.coverage.count("fault:inventory-shrinks")

    def _remove_node_in_phase(self) -> None:
        """Let a node vanish in the short while in which it is isolated, or verified."""
        machine = self._random_node()
        ended = self._sim.world.streams.faults.choice(("admitted", "maintained"))
        upon, when = self._sim.world.triggers, f"commit {ended}:{machine.name}"

        def vanish() -> None:
            del upon[when]
            if not self._sim.faults_stopped:
                self._unlist(machine)

        upon[when] = vanish

    def _relabel(self) -> None:
        faults = self._sim.world.streams.faults
        machine = self._random_node()
        key, value = faults.choice((("team", "a"), ("team", "b"), ("rack", "r2"), ("zone", "z1")))
        self._change_temporarily(machine, "labels", {**machine.labels, key: value})
        self._sim.coverage.count("fault:label-changes")

    def _dispute_node(self) -> None:
        """Let the inventory have a node as offline for a while, and let an admin refresh it."""
        self._change_temporarily(self._random_node(), "disputed", True)
        daemon = self._sim.newest_daemon()
        if daemon is not None and daemon.daemon is not None:
            daemon.run(_refresh(daemon.daemon))
        self._sim.coverage.count("fault:node-disputed")

    def _lose_source(self) -> None:
        self._change_temporarily(self._sim.world, "source_fails", True)
        self._sim.coverage.count("fault:source-fails")

    def _jump_clock(self) -> None:
        self._sim.world.skew_s += self._sim.world.streams.faults.choice((-600.0, -30.0, 30.0, 600.0, 7200.0))
        self._sim.coverage.count("fault:clock-jumps")

    def _lock_database(self) -> None:
        """Let a user's shell keep the database locked for a while."""
        self._sim.coverage.count("fault:database-locked")
        path = self._sim.state_dir / database.FILE_NAME
        if not path.exists():
            return
        held = sqlite3.connect(path, isolation_level=None, timeout=0.0)
        try:
            held.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:
            held.close()
            return
        self._sim.loop.call_from_world(self._sim.world.streams.faults.choice((1.0, 20.0, 90.0)), held.close)


async def _refresh(daemon: Daemon) -> None:
    daemon.refresh_inventory()


_FAULTS = (
    *(
        FaultSchedule._crash,
        FaultSchedule._crash,
        FaultSchedule._crash,
        FaultSchedule._stop,
        FaultSchedule._second_daemon,
    ),
    FaultSchedule._outage,
    *(
        FaultSchedule._fail_checks,
        FaultSchedule._block_drain,
        FaultSchedule._remove_busy_node,
        FaultSchedule._remove_node_in_phase,
        FaultSchedule._relabel,
        FaultSchedule._dispute_node,
    ),
    *(FaultSchedule._put_in_service, FaultSchedule._change_settings),
    *(FaultSchedule._lose_source, FaultSchedule._jump_clock, FaultSchedule._lock_database),
)
