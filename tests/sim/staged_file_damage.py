"""Damage of staged files on simulated nodes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation

DAMAGE_INTERVAL_S = 300.0
"""Mean time between two staged files that are damaged, mostly before the slot of their node."""


async def damage_staged_files(sim: Simulation) -> None:
    """Truncate staged files here and there, whatever the checkpoints of their nodes say."""
    damage = sim.world.streams.damage
    while not sim.faults_stopped:
        await asyncio.sleep(damage.expovariate(1.0 / DAMAGE_INTERVAL_S))
        machine = damage.choice(list(sim.world.machines.values()))
        if sim.faults_stopped or not machine.staged:
            continue
        digest = damage.choice(sorted(machine.staged))
        machine.damaged.setdefault(digest, sim.loop.time())
        sim.world.record(f"a staged file of {machine.name} is damaged")
        sim.coverage.count("fault:staged-file-damaged")
