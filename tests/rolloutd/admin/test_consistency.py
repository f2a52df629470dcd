"""What the doctor holds for impossible in a database, and what only looks so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from machines.model.events import StepRecorded
from rolloutd.admin.doctor import find_violations
from tests.rolloutd.control_environment import control_environment


async def test_a_failed_node_that_is_to_be_tried_again_is_no_fault(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        await inside.fail(rollout, "p1")
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/retry", {"reason": "mended"})
        assert inside.state.index.target(rollout, "p1").isolated
        assert find_violations(inside.state.index) == []


async def test_a_waiting_node_that_nobody_put_back_is_one(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        done = inside.step(rollout, "p1", "isolate.0.command")
        inside.state.index.apply(StepRecorded(replace(done, attempt=1), isolated=True))
        assert find_violations(inside.state.index) == [f"p1 of {rollout} is pending and still isolated by us"]
