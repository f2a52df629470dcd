"""Faults of the inventory that its source makes by itself, and the admin who accepts what it reports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from machines.model.node import ACCEPTED_BY_PIN, ConflictKind
from machines.states import Phase
from rolloutd.errors import RolloutdError
from tests.sim.people import OLGA

if TYPE_CHECKING:
    from rolloutd.engine.daemon import Daemon
    from tests.sim.sim_node import SimNode
    from tests.sim.simulation import Simulation

FAULT_INTERVAL_S = 600.0
"""Between two faults, about: each lasts up to 15 minutes."""


class InventoryFaults:
    """Injects faults by a stream of their own, so that the other faults of a seed stay as they are."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self._stream = simulation.world.streams.inventories

    async def run(self) -> None:
        """Let something happen now and then, until the faults stop."""
        while not self._sim.faults_stopped:
            await asyncio.sleep(self._stream.expovariate(1.0 / FAULT_INTERVAL_S))
            if not self._sim.faults_stopped:
                _FAULTS[int(self._stream.random() * len(_FAULTS))](self)

    def _rename(self) -> None:
        self._change("listed_as", f"renamed-{self._stream.randrange(3)}", "fault:node-renamed")

    def _duplicate(self) -> None:
        self._change("has_twin", True, "fault:name-shared")

    def _invalidate(self) -> None:
        self._change("has_address", False, "fault:record-invalid")

    def _vanish_briefly(self) -> None:
        """Let a pending node vanish for five seconds, with an answer of the source in between."""
        life = self._sim.newest_daemon()
        if life is None or life.state is None:
            return
        index = life.state.index
        waiting = {t.node for name in index.rollouts for t in index.targets(name) if t.phase is Phase.PENDING}
        self._change("listed", False, "fault:pending-node-vanishes", sorted(waiting), length_s=5.0)

    def _change(
        self, name: str, value: Any, fault: str, nodes: Sequence[str] = (), length_s: float = 0.0
    ) -> None:
        """Change what the inventory has of a node, mostly of one at work, and change it back."""
        machines = self._sim.world.machines
        busy = [each.name for each in machines.values() if each.isolating_rollouts or each.is_inspected]
        machine = machines[self._stream.choice(nodes or busy or sorted(machines))]
        before = getattr(machine, name)
        setattr(machine, name, value)
        self._refresh()
        self._sim.coverage.count(fault)
        length_s = length_s or self._stream.choice((20.0, 120.0, 900.0))
        self._sim.loop.call_from_world(length_s, lambda: self._change_back(machine, name, before))

    def _change_back(self, machine: SimNode, name: str, before: Any) -> None:
        if not self._sim.faults_stopped:
            setattr(machine, name, before)
            self._refresh()

    def _refresh(self) -> None:
        life = self._sim.newest_daemon()
        if life is not None and life.daemon is not None:
            life.run(refresh(life.daemon))

    def _accept(self) -> None:
        """Let an admin accept what the source reports of a node: a quarantined one, if there is one."""
        life = self._sim.newest_daemon()
        if life is None or life.daemon is None or life.state is None:
            return
        nodes = life.state.index.nodes.values()
        kinds = {node.name: {each.kind for each in node.conflicts} for node in nodes}
        # The world knows its machines by one name.
        wanted = [each for each, found in kinds.items() if found & (ACCEPTED_BY_PIN - {ConflictKind.RENAMED})]
        names = [each for each, found in kinds.items() if ConflictKind.RENAMED not in found]
        if not names:
            return
        name = self._stream.choice(wanted or sorted(names))
        life.run(_pin(life.daemon, name))
        self._sim.coverage.count("user:pin")


async def _pin(daemon: Daemon, node: str) -> None:
    try:
        await daemon.pin_identity(node, OLGA.actor, "tests")
    except RolloutdError:
        return  # in flight, or gone: as people are told


async def refresh(daemon: Daemon) -> None:
    """Ask all sources."""
    daemon.refresh_inventory()


_FAULTS = (
    InventoryFaults._rename,
    InventoryFaults._duplicate,
    InventoryFaults._invalidate,
    InventoryFaults._vanish_briefly,
    InventoryFaults._accept,
)
