"""How far nodes are prepared, and a retry of a node whose prepare stage failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from machines.model.events import PreparationRecorded
from machines.model.preparation import Preparation, PreparationState
from machines.scheduler.decide import decide
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

PREPARED = PLAN.replace("  soak:", "  prepare: [{install: {playbook: site.yml}}]\n  soak:")


async def record(inside: ControlEnvironment, rollout: str, state: PreparationState, **more: Any) -> None:
    stage = inside.state.index.rollout(rollout).prepare_stages[0]
    content, now = stage.content_for(inside.state.index.nodes["p1"]), inside.clock.now()
    row = Preparation(rollout, "p1", "install", 1, state, content, now, now - 90.0, **more)
    await inside.commit(PreparationRecorded(row))


async def test_stages_counts_and_minutes_are_shown(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=PREPARED)
        await record(inside, rollout, PreparationState.DONE, bytes=7, text="unpacked")
        shown = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/prepare")
        states = {each["node"]: each["state"] for each in shown["stages"]}
        assert states == {"p1": "done", "p2": "waiting", "s1": "waiting", "s2": "waiting"}
        assert (shown["stages"][0]["bytes"], shown["stages"][0]["text"]) == (7, "unpacked")
        assert shown["prepared"] == {"done": 1, "total": 4}
        assert shown["minutes"] == {"slot": 0.0, "prepare": 1.5}


async def test_retry_prepares_failed_node_at_once(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=PREPARED)
        later = inside.clock.now() + 3600.0
        await record(inside, rollout, PreparationState.FAILED, text="no route", not_before=later)
        assert decide(inside.state.index, inside.clock.now()).preparations == ()
        await inside.request(
            "olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/retry", {"reason": "the link is up"}
        )
        due = decide(inside.state.index, inside.clock.now()).preparations
        assert ("p1", 2) in [(each.node, each.attempt) for each in due]
