"""A node that was skipped and left isolated comes back by a person's word, as patiently as by its plan."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rolloutd.driving.driver import CHECK_EVERY_MOST_S, Driver
from rolloutd.ports import Failed, Ok
from tests.contracts.twins.check import FakeCheck
from tests.rolloutd.control_house import PLAN, House, house
from tests.rolloutd.slow_house import gear_of, turns

PATIENT = PLAN.replace("reachable: {}", "reachable: {within: 5m}")


async def left_isolated(inside: House) -> str:
    """Return a rollout of which p1 failed, was skipped, and is still isolated."""
    rollout = await inside.start(text=PATIENT)
    await inside.fail(rollout, "p1")
    skip = {"reason": "because", "put_back": "leave"}
    await inside.ask("olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/skip", skip)
    return rollout


async def test_its_checks_may_take_as_long_as_the_plan_says(tmp_path: Path) -> None:
    async with house(tmp_path) as inside:
        rollout = await left_isolated(inside)
        await inside.ask("olga", "post", "/v1/nodes/p1/return", {})
        check = FakeCheck()
        check.answers["p1"] = (Failed("no answer yet"), Failed("no answer yet"), Ok())
        driver = Driver(inside.state, gear_of(inside, tmp_path, check=check), rollout, "p1", alive_since=0.0)
        driving = asyncio.create_task(driver.drive())
        for _ in range(10):
            await turns(20)
            inside.clock.advance(CHECK_EVERY_MOST_S)
        await driving
        assert inside.state.index.target(rollout, "p1").order is None
        assert not inside.state.index.holds
