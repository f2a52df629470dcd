"""Faults of the inventory that its source makes by itself, and the admin who accepts what it reports."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from machines.model.node import ACCEPTED_BY_PIN
from rolloutd.errors import RolloutdError
from tests.sim.people import OLGA

if TYPE_CHECKING:
    from rolloutd.engine.daemon import Daemon
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

    def _accept(self) -> None:
        """Let an admin accept what the source reports of a node: a quarantined one, if there is one."""
        life = self._sim.newest_daemon()
        if life is None or life.daemon is None or life.state is None:
            return
        nodes = life.state.index.nodes.values()
        wanted = [n.name for n in nodes if any(each.kind in ACCEPTED_BY_PIN for each in n.conflicts)]
        name = self._stream.choice(wanted or sorted(self._sim.world.machines))
        life.run(_pin(life.daemon, name))
        self._sim.coverage.count("user:pin")


async def _pin(daemon: Daemon, node: str) -> None:
    try:
        await daemon.pin_identity(node, OLGA.actor, "tests")
    except RolloutdError:
        return  # in flight, or gone: as people are told


_FAULTS = (InventoryFaults._accept,)
