"""What happens in the world beside the daemon: power cuts, outages, clocks that jump, two daemons at once."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import TYPE_CHECKING, Any

from rolloutd.daemon import Daemon
from rolloutd.store import database
from tests.sim import plans
from tests.sim.life import remove_lock
from tests.sim.world import Machine

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class Trouble:
    """Lets things happen, as the seed says; what breaks by itself mends by itself after a while."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation

    async def happen(self, until: float, storm: float) -> None:
        """Let something happen about every minute, with the probability `storm`; `until` is of the loop."""
        faults = self._sim.world.chances.faults
        while self._sim.loop.time() < until:
            await asyncio.sleep(faults.expovariate(1.0 / 60.0))
            if faults.random() < storm:
                _HAPPENINGS[int(faults.random() * len(_HAPPENINGS))](self)

    def _some(self) -> Machine:
        return self._sim.world.chances.faults.choice(list(self._sim.world.machines.values()))

    def _crash(self) -> None:
        faults = self._sim.world.chances.faults
        self._sim.crash_in = faults.randrange(1, 400)
        self._sim.restart_at = self._sim.loop.time() + faults.choice((0.0, 0.0, 60.0, 1800.0))
        if faults.random() < 0.2:
            self._sim.world.lose_power()

    def _stop(self) -> None:
        """Let somebody restart the service."""
        life = self._sim.newest()
        if life is not None:
            self._sim.marks.hit("fault:stopped")
            life.stop()

    def _second_daemon(self) -> None:
        """Let somebody remove the lock and start the daemon a second time."""
        if self._sim.newest() is None:
            return
        if self._sim.world.chances.faults.random() < 0.7:
            remove_lock(self._sim.state_dir)
            self._sim.marks.hit("fault:two-daemons")
        else:
            self._sim.marks.hit("fault:started-twice")
        self._sim.begin_life()

    def _for_a_while(self, thing: Any, name: str, value: Any) -> None:
        """Let something be otherwise, and after a while as it was."""
        before, length_s = getattr(thing, name), self._sim.world.chances.faults.choice((20.0, 120.0, 900.0))
        setattr(thing, name, value)
        if isinstance(thing, Machine):
            self._sim.world.court.blemished[thing.name] = self._sim.loop.time() + length_s
        self._sim.loop.apart(length_s, lambda: None if self._sim.peace else setattr(thing, name, before))

    def _outage(self) -> None:
        self._for_a_while(self._some(), "up", False)
        self._sim.marks.hit("fault:node-down")

    def _old_boot(self) -> None:
        self._for_a_while(self._some(), "red", True)
        self._sim.marks.hit("fault:old-boot-id")

    def _stick(self) -> None:
        self._for_a_while(self._some(), "stuck", True)
        self._sim.marks.hit("fault:isolation-never-ends")

    def _resettle(self) -> None:
        """Let somebody write other limits and have them read: a daemon that misses it starts with them."""
        self._sim.settings = plans.changed(self._sim.world.chances.faults, self._sim.settings)
        life = self._sim.newest()
        if life is not None:
            life.ask(life.reload(self._sim.settings))

    def _put_in_service(self) -> None:
        """Let somebody put a node in service at which we are."""
        ours = [machine for machine in self._sim.world.machines.values() if machine.ours]
        if ours and self._sim.world.undo_ours(self._sim.world.chances.faults.choice(ours)):
            self._sim.marks.hit("fault:isolation-undone")

    def _shrink(self) -> None:
        """Let a node vanish from the inventory, mostly one that we are at, and let somebody refresh it."""
        ours = [machine for machine in self._sim.world.machines.values() if machine.ours or machine.looked]
        self._lose(self._sim.world.chances.faults.choice(ours) if ours else self._some())

    def _lose(self, machine: Machine) -> None:
        self._for_a_while(machine, "listed", False)
        life = self._sim.newest()
        if life is not None and life.daemon is not None:
            life.ask(_refresh(life.daemon))
        self._sim.marks.hit("fault:inventory-shrinks")

    def _vanish(self) -> None:
        """Let a node vanish in the short while in which it is isolated, or verified."""
        machine = self._some()
        ended = self._sim.world.chances.faults.choice(("admitted", "maintained"))
        upon, when = self._sim.world.upon, f"commit {ended}:{machine.name}"

        def vanish() -> None:
            del upon[when]
            if not self._sim.peace:
                self._lose(machine)

        upon[when] = vanish

    def _relabel(self) -> None:
        faults = self._sim.world.chances.faults
        machine = self._some()
        key, value = faults.choice((("team", "a"), ("team", "b"), ("rack", "r2"), ("zone", "z1")))
        self._for_a_while(machine, "labels", {**machine.labels, key: value})
        self._sim.marks.hit("fault:label-changes")

    def _lose_source(self) -> None:
        self._for_a_while(self._sim.world, "source_fails", True)
        self._sim.marks.hit("fault:source-fails")

    def _jump(self) -> None:
        self._sim.world.skew_s += self._sim.world.chances.faults.choice((-600.0, -30.0, 30.0, 600.0, 7200.0))
        self._sim.marks.hit("fault:clock-jumps")

    def _lock_database(self) -> None:
        """Let somebody's shell keep the database locked for a while."""
        self._sim.marks.hit("fault:database-locked")
        path = self._sim.state_dir / database.FILE_NAME
        if not path.exists():
            return
        held = sqlite3.connect(path, isolation_level=None, timeout=0.0)
        try:
            held.execute("BEGIN IMMEDIATE")
        except sqlite3.Error:
            held.close()
            return
        self._sim.loop.apart(self._sim.world.chances.faults.choice((1.0, 20.0, 90.0)), held.close)


async def _refresh(daemon: Daemon) -> None:
    daemon.refresh()


_HAPPENINGS = (
    *(Trouble._crash, Trouble._crash, Trouble._crash, Trouble._stop, Trouble._second_daemon),
    Trouble._outage,
    *(Trouble._old_boot, Trouble._stick, Trouble._shrink, Trouble._vanish, Trouble._relabel),
    *(Trouble._put_in_service, Trouble._resettle),
    *(Trouble._lose_source, Trouble._jump, Trouble._lock_database),
)
