"""A person's order to stop is carried out, in whatever moment of the node's life it comes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from machines.events import NodeOrdered, StepRecorded
from machines.rollout import Actor, ActorKind, Order
from machines.states import Phase, Trigger
from rolloutd.driving.driver import Driver
from tests.contracts.twins.runner import Script
from tests.rolloutd.control_house import house
from tests.rolloutd.slow_house import gear_of, turns

OLGA = Actor(ActorKind.PERSON, "olga", 1001)


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("moment", range(12))
async def test_a_node_stops_that_is_about_to_be_maintained(
    tmp_path: Path, moment: int, isolated: bool
) -> None:
    """The order comes so many turns of the loop after a driver took the node up, as after a restart."""

    async with house(tmp_path) as inside:
        rollout = await inside.start()
        await inside.move(rollout, "p1", Trigger.ADMITTED)
        if isolated:
            await inside.commit(StepRecorded(inside.step(rollout, "p1", "isolate.0.command"), isolated=True))
        inside.world.scripts = {"site.yml": Script.LONG}
        gear = gear_of(inside, tmp_path)
        driver = Driver(inside.state, gear, rollout, "p1", alive_since=inside.clock.now())
        driving = asyncio.create_task(driver.drive())
        await turns(moment)
        await inside.commit(NodeOrdered(rollout, "p1", Order.STOP, OLGA, "because", inside.clock.now()))
        await turns(5)  # the daemon tells the driver at its next turn
        driver.stop_now()
        await turns(50)
        try:
            target = inside.state.index.target(rollout, "p1")
            assert (target.phase, target.order) == (Phase.FAILED, None)
            assert target.last_text.endswith("by order of olga")
            assert not inside.world.busy("p1")
        finally:
            driving.cancel()
            await asyncio.wait({driving})
