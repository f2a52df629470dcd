"""What happens to whole clusters: they are new, paused, not available, and their objects change."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.sim.inventory_faults import refresh

if TYPE_CHECKING:
    from tests.sim.sim_node import SimNode
    from tests.sim.simulation import Simulation

INTERVAL_S = 240.0
"""Between two events, about: each lasts up to 15 minutes."""


class ClusterFaults:
    """Lets something happen to clusters, by a stream of their own."""

    def __init__(self, simulation: Simulation) -> None:
        self._sim = simulation
        self._stream = simulation.world.streams.clusters

    async def run(self) -> None:
        """Let something happen now and then, until the faults stop."""
        while not self._sim.faults_stopped:
            await asyncio.sleep(self._stream.expovariate(1.0 / INTERVAL_S))
            machine = self._stream.choice(list(self._sim.world.machines.values()))
            event, length_s = self._stream.randrange(4), self._stream.choice((20.0, 120.0, 900.0))
            if self._sim.faults_stopped:
                return
            if not machine.initialized:
                self._make_progress(machine)
            elif event == 0:
                self._change(machine, "paused", True, length_s)
            elif event == 1:
                self._change(machine, "up", False, length_s)
            elif event == 2 and machine.available:
                self._change(machine, "available", False, length_s)
            elif self._stream.random() < 0.5:
                self._move(machine)
            else:
                self._sim.world.triggers[f"commit admitted:{machine.name}"] = partial(self._move, machine)

    def _make_progress(self, machine: SimNode) -> None:
        """Let a new cluster appear, and then have a control plane."""
        machine.initialized, machine.listed = machine.listed, True
        self._sim.coverage.count("fault:cluster-joins")
        self._hear()

    def _move(self, machine: SimNode) -> None:
        """Give a cluster another endpoint, also in the short while between its start and its run."""
        if not self._sim.faults_stopped:
            self._change(machine, "endpoint", f"{machine.name}-{self._stream.choice('ab')}", 0.0)

    def _change(self, machine: SimNode, name: str, value: Any, length_s: float) -> None:
        """Change a cluster, for a while where `length_s` is one."""
        before = getattr(machine, name)
        setattr(machine, name, value)
        self._sim.coverage.count(f"fault:cluster-{name}")
        self._hear()
        if length_s:
            self._sim.world.checker.unhealthy_until[machine.name] = self._sim.loop.time() + length_s
            self._sim.loop.call_from_world(length_s, lambda: self._change_back(machine, name, before))

    def _change_back(self, machine: SimNode, name: str, before: Any) -> None:
        if not self._sim.faults_stopped:
            setattr(machine, name, before)
            self._hear()

    def _hear(self) -> None:
        """Let the daemon hear of it, as a watch reports it."""
        life = self._sim.newest_daemon()
        if life is not None and life.daemon is not None:
            life.run(refresh(life.daemon))
