"""A thousand races of disarm against the node's timer, in virtual time: each has exactly one outcome."""

from __future__ import annotations

import asyncio
from collections import Counter

from rolloutd.ports import GuardState, Host
from tests.contracts.ssh_fixtures import step_context
from tests.sim.fault_injection import FaultyAccess
from tests.sim.fault_plan import NoFaults
from tests.sim.loop import SimLoop, SimProcess
from tests.sim.random_streams import Coverage, RandomStreams
from tests.sim.sim_guard import SimNodeGuard
from tests.sim.sim_node import SimNode
from tests.sim.world import SimWorld

RACES = 1000
AFTER_S = 30


def race(seed: int) -> GuardState:
    """Disarm a guard at about the time at which its timer ends; return the outcome."""
    streams = RandomStreams.of(seed)
    loop = SimLoop(streams.schedule)  # type: ignore[abstract]  # what it lacks must raise
    world = SimWorld(loop, streams, NoFaults(), Coverage())
    node = world.machines["n1"] = SimNode("n1", {})
    guard = SimNodeGuard(FaultyAccess(world, SimProcess("daemon")))
    ctx = step_context(Host("n1"), {"after": AFTER_S})

    async def run() -> GuardState:
        await guard.arm(ctx, order="1.1 database 0")
        node.version = "new"
        await asyncio.sleep(AFTER_S - 3.0 + streams.people.random() * 3.0)
        told = (await guard.disarm(ctx)).state
        await asyncio.sleep(2 * AFTER_S)
        assert (await guard.inspect(ctx)).state is told
        assert (await guard.restore(ctx)).state is told
        assert (await guard.disarm(ctx)).state is told
        return told

    with loop.entered():
        task = loop.create_task(run())
        while not task.done():
            loop.step()
        loop.end_all_tasks()
    outcome = task.result()
    assert node.version == ("new" if outcome is GuardState.CONFIRMED else "old")
    assert len({key for key in world.coverage.counts if key in ("guard:confirmed", "guard:restored")}) == 1
    return outcome


def test_each_race_has_exactly_one_outcome() -> None:
    outcomes = Counter(race(seed) for seed in range(RACES))
    assert set(outcomes) == {GuardState.CONFIRMED, GuardState.RESTORED}
    assert min(outcomes.values()) > RACES // 10
