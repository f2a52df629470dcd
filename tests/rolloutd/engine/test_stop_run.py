"""A person's order to stop is carried out, in whatever moment of the node's life it comes."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from machines.model.events import NodeOrdered, StepRecorded
from machines.model.rollout import Actor, ActorKind, NodeOrder
from machines.states import Phase, Trigger
from rolloutd.adapters.playbook_steps import PlaybookCheck
from rolloutd.engine.drivers.driver import Driver
from tests.contracts.fakes.runner import Script, playbook_context
from tests.rolloutd.control_environment import PLAN, control_environment
from tests.rolloutd.slow_store import adapters_of, loop_iterations

OLGA = Actor(ActorKind.PERSON, "olga", 1001)


@pytest.mark.parametrize("isolated", [False, True])
@pytest.mark.parametrize("moment", range(12))
async def test_a_node_stops_that_is_about_to_be_maintained(
    tmp_path: Path, moment: int, isolated: bool
) -> None:
    """The order comes so many turns of the loop after a driver took the node up, as after a restart."""

    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        if isolated:
            await inside.commit(StepRecorded(inside.step(rollout, "p1", "isolate.0.command"), isolated=True))
        inside.run_host.scripts = {"site.yml": Script.LONG}
        gear = adapters_of(inside, tmp_path)
        driver = Driver(inside.state, gear, rollout, "p1", daemon_started_at=inside.clock.now())
        driving = asyncio.create_task(driver.run())
        await loop_iterations(moment)
        await inside.commit(NodeOrdered(rollout, "p1", NodeOrder.STOP, OLGA, "because", inside.clock.now()))
        await loop_iterations(5)  # the daemon tells the driver at its next turn
        driver.stop_current_action()
        await loop_iterations(50)
        try:
            target = inside.state.index.target(rollout, "p1")
            assert (target.phase, target.order) == (Phase.FAILED, None)
            assert target.last_text.endswith("by order of olga")
            assert not inside.run_host.has_work("p1")
        finally:
            driving.cancel()
            await asyncio.wait({driving})


async def test_stop_order_ends_run_of_playbook_check(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace("verify: [{reachable: {}}]", "verify: [{playbook: {file: undo.yml}}]")
        rollout = await inside.start(text=text)
        inside.run_host.scripts = {"site.yml": Script.OK, "undo.yml": Script.LONG}
        await inside.isolate(rollout, "p1")
        await inside.transition(rollout, "p1", Trigger.MAINTAINED)
        checks = {"playbook": PlaybookCheck(playbook_context(inside.run_host))}
        adapters = replace(adapters_of(inside, tmp_path), checks=checks)
        driver = Driver(inside.state, adapters, rollout, "p1", daemon_started_at=inside.clock.now())
        driving = asyncio.create_task(driver.run())
        try:
            await loop_iterations(50)
            assert inside.run_host.has_work("p1")
            assert await inside.state.store.unfinished_runs("p1")
            now = inside.clock.now()
            await inside.commit(NodeOrdered(rollout, "p1", NodeOrder.STOP, OLGA, "because", now))
            driver.stop_current_action()
            await loop_iterations(50)
            assert inside.state.index.target(rollout, "p1").phase is Phase.FAILED
            assert not inside.run_host.has_work("p1")
        finally:
            driving.cancel()
            await asyncio.wait({driving})
