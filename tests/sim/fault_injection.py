"""Access of one daemon process to the simulated nodes, with injected faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rolloutd.errors import NodeUnreachable
from tests.sim.loop import SimProcess
from tests.sim.sim_node import SimNode
from tests.sim.world import SimWorld

TAKEOVER_GRACE_S = 1.0
"""Effects that began before another daemon took over may still end within this time."""


class PlantedError(Exception):
    """An unexpected error of an adapter: it must be reported, and end nothing."""


class FaultyAccess:
    """One daemon process's access to the world; `epoch` is its term, once it has one."""

    def __init__(self, world: SimWorld, process: SimProcess) -> None:
        self.world = world
        self.process = process
        self.epoch = 0

    @property
    def is_current_leader(self) -> bool:
        """Whether no later daemon has taken over: the current one does not know what an older one sees."""
        return self.epoch == self.world.epoch

    async def connect(self, node: str) -> SimNode:
        """Connect to a node; raises NodeUnreachable or TimeoutError."""
        world = self.world
        machine = world.machines[node]
        await world.latency(0.3)
        if world.fault_plan.chance("ssh-slow", 0.02):
            await asyncio.sleep(40.0)
        if world.fault_plan.chance("ssh-timeout", 0.02):
            world.checker.unhealthy_until[node] = world.loop.time()
            raise TimeoutError(f"{node}: no answer within 60 s")
        if not machine.up or world.fault_plan.chance("ssh-refused", 0.03):
            world.checker.unhealthy_until[node] = world.loop.time()
            raise NodeUnreachable(f"{node}: tcp connect refused")
        return machine

    def check_leadership(self, label: str) -> None:
        """Report a violation if this daemon starts an effect after another one has taken over."""
        world = self.world
        lost_leadership = (
            self.epoch < world.epoch and world.loop.time() > world.taken_over_at + TAKEOVER_GRACE_S
        )
        if lost_leadership and not world.is_finished:
            world.checker.report_violation(
                f"{self.process.name} acts ({label}) although another daemon has taken over"
            )

    async def run_effect(
        self,
        label: str,
        action: Callable[[], Any],
        *,
        on_refused: Callable[[], Any],
        already_started: bool = False,
    ) -> Any:
        """Change something in the world; an effect that already started was checked at its start."""
        if not already_started:
            self.check_leadership(label)
        return await self.world.run_effect(self.process, label, action, on_refused=on_refused)
