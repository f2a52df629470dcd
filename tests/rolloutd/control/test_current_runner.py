"""The runner that executes a node's run now, in the answers about nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines.model.limits import RunnerRule
from machines.model.selector import parse_selector
from rolloutd.engine.state import StepProgress
from rolloutd.ports import RunnerStatus
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.support.note_change import note_installed

CHANGE = PLAN.replace("{playbook: site.yml}\n  rollback: {playbook: undo.yml}", "{note: {text: a}}")
AWX = RunnerRule("awx", parse_selector("team=payments"))


async def runners(inside: ControlEnvironment, rollout: str) -> dict[str, Any]:
    nodes = (await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes"))["nodes"]
    status = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
    in_flight = {each["node"]: each["runner"] for each in status["in_flight"]}
    found = {each["node"]: each["runner"] for each in nodes}
    assert {node: found[node] for node in in_flight} == in_flight
    return found


@pytest.mark.parametrize(
    ("text", "names", "step", "shown"),
    [
        (PLAN, ("local",), "run.configure", (None, None)),
        (PLAN, ("awx", "local"), "run.configure", ("awx", "local")),
        (PLAN, ("awx", "local"), "isolate.0.command", (None, None)),
        (CHANGE, ("local",), "run.configure", ("note", "note")),
    ],
)
async def test_node_names_the_runner_of_its_run(
    tmp_path: Path, text: str, names: tuple[str, ...], step: str, shown: tuple[str | None, ...]
) -> None:
    with note_installed():
        async with control_environment(tmp_path) as inside:
            rollout = await inside.start(text=text)
            state = inside.state
            state.runners = {name: RunnerStatus() for name in names}
            rules = tuple(AWX if name == "awx" else RunnerRule(name) for name in names)
            state.index.update_limits(replace(state.index.limits, runners=rules))
            for node in ("p1", "s1"):
                await inside.isolate(rollout, node)
                state.step_progress[rollout, node] = StepProgress(step=step)
            found = await runners(inside, rollout)
            assert (found["p1"], found["s1"]) == shown
            assert found["p2"] is None
