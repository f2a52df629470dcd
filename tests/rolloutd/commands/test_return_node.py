"""A node that was skipped and left isolated comes back by a person's word, as patiently as by its plan."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rolloutd.engine.drivers.check_execution import RETRY_MAX_S
from rolloutd.engine.drivers.driver import Driver
from rolloutd.ports import Failed, Ok
from tests.contracts.fakes.check import FakeCheck
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.slow_store import adapters_of, loop_iterations

PATIENT = PLAN.replace("reachable: {}", "reachable: {within: 5m}")


async def left_isolated(inside: ControlEnvironment) -> str:
    """Return a rollout of which p1 failed, was skipped, and is still isolated."""
    rollout = await inside.start(text=PATIENT)
    await inside.fail(rollout, "p1")
    skip = {"reason": "because", "put_back": "leave"}
    await inside.request("olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/skip", skip)
    return rollout


async def test_its_checks_may_take_as_long_as_the_plan_says(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await left_isolated(inside)
        await inside.request("olga", "post", "/v1/nodes/p1/return", {})
        check = FakeCheck()
        check.results["p1"] = (Failed("no answer yet"), Failed("no answer yet"), Ok())
        driver = Driver(
            inside.state, adapters_of(inside, tmp_path, check=check), rollout, "p1", daemon_started_at=0.0
        )
        driving = asyncio.create_task(driver.run())
        for _ in range(10):
            await loop_iterations(20)
            inside.clock.advance(RETRY_MAX_S)
        await driving
        assert inside.state.index.target(rollout, "p1").order is None
        assert not inside.state.index.holds
