"""How far one life of the daemon reaches into the world: connections that fail, acts that go any way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rolloutd.errors import NodeUnreachable
from tests.sim.loop import Process
from tests.sim.world import Machine, World

TAKEOVER_GRACE_S = 1.0
"""An act that was begun when another daemon took over is on its way; a later one has no excuse."""


class Reach:
    """What one life can reach of the world; `epoch` is its tenure, once it has one."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.epoch = 0

    @property
    def reigns(self) -> bool:
        """Whether no later life has taken over: whoever decides does not know what a deposed one sees."""
        return self.epoch == self.world.epoch

    async def ask(self, node: str) -> Machine:
        """Connect to a node; raises NodeUnreachable or TimeoutError."""
        world = self.world
        machine = world.machines[node]
        await world.latency(0.3)
        if world.mischief.chance("ssh-slow", 0.02):
            await asyncio.sleep(40.0)
        if world.mischief.chance("ssh-timeout", 0.02):
            world.court.blemished[node] = world.loop.time()
            raise TimeoutError(f"{node}: no answer within 60 s")
        if not machine.up or world.mischief.chance("ssh-refused", 0.03):
            world.court.blemished[node] = world.loop.time()
            raise NodeUnreachable(f"{node}: tcp connect refused")
        return machine

    def mind_tenure(self, label: str) -> None:
        """Accuse this life if it begins to act although another has taken over."""
        world = self.world
        deposed = self.epoch < world.epoch and world.loop.time() > world.taken_over_at + TAKEOVER_GRACE_S
        if deposed and not world.over:
            world.court.accuse(f"{self.process.name} acts ({label}) although another daemon has taken over")

    async def effect(
        self, label: str, act: Callable[[], Any], *, refused: Callable[[], Any], on_its_way: bool = False
    ) -> Any:
        """Change something in the world; what is on its way was begun before, and minded then."""
        if not on_its_way:
            self.mind_tenure(label)
        return await self.world.effect(self.process, label, act, refused=refused)
