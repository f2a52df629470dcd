"""Scheduled drift checks: when they are due, and that a plan that keeps its change changes a node again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from machines.model.decision import CheckDrift
from machines.model.events import DriftRecorded, NodesDiscovered
from machines.states import Outcome, Phase
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import Script
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import command_jobs, start_decided
from tests.rolloutd.slow_store import adapters_of, daemon_of

KEEPING = PLAN.replace("  soak: 10m", '  keep: true\n  every: 2h\n  canary: {select: "", max_parallel: 9}')


async def finished_rollout(inside: ControlEnvironment) -> str:
    rollout = await inside.start(text=KEEPING)
    for target in list(inside.state.index.targets(rollout)):
        await inside.finish(rollout, target.node)
    inside.run_host.scripts = {"site.yml": Script.CHANGE}
    inside.run_host.compliant = {"p1", "p2", "s1"}
    return rollout


async def test_drift_is_checked_once_interval_has_passed(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await finished_rollout(inside)
        adapters = adapters_of(inside, tmp_path)
        jobs, found = command_jobs(inside.state, adapters), []
        for hours in (1.9, 0.2, 1.0):
            inside.clock.advance(hours * 3600)
            checked = len(inside.run_host.checked_runs)
            async with asyncio.TaskGroup() as tasks:
                start_decided(inside.state, jobs, tasks, CheckDrift)
            found.append(len(inside.run_host.checked_runs) - checked)
        assert found == [0, 4, 0]
        drifted = inside.state.index.counters(rollout).drifted
        assert drifted == {"s2"}


async def test_done_nodes_are_checked_before_the_others_are_done(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=KEEPING)
        await inside.finish(rollout, "p1")
        inside.run_host.scripts = {"site.yml": Script.CHANGE}
        adapters = adapters_of(inside, tmp_path)
        jobs = command_jobs(inside.state, adapters)
        for hours in (1.9, 0.2):
            inside.clock.advance(hours * 3600)
            async with asyncio.TaskGroup() as tasks:
                start_decided(inside.state, jobs, tasks, CheckDrift)
        assert len(inside.run_host.checked_runs) == 1
        assert inside.state.index.counters(rollout).drifted == {"p1"}


async def test_drifted_node_is_changed_again_as_of_its_new_team(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await finished_rollout(inside)
        loop = daemon_of(inside, adapters_of(inside, tmp_path, FakeIsolator()))
        daemon = asyncio.create_task(loop.run())
        try:
            await asyncio.wait_for(loop.first_iteration_done.wait(), 30)
            s2 = inside.state.index.nodes["s2"]
            moved = NodesDiscovered((replace(s2, labels={**s2.labels, "team": "payments"}),))
            drifted = DriftRecorded(rollout, "s2", inside.clock.now(), ("set the limit",))
            await inside.commit(moved, drifted)
            async with asyncio.timeout(30):
                while inside.state.index.target(rollout, "s2").attempt < 2 or not all(
                    target.phase is Phase.DONE for target in inside.state.index.targets(rollout)
                ):
                    await asyncio.sleep(0)
                    inside.clock.advance(0.01)
                    inside.observe_all_up()
        finally:
            daemon.cancel()
            await asyncio.wait({daemon})
        attempts = {t.node: (t.attempt, t.outcome) for t in inside.state.index.targets(rollout)}
        once, twice = (1, Outcome.CHANGED), (2, Outcome.CHANGED)
        assert inside.state.index.target(rollout, "s2").team == "payments"
        assert attempts == {"p1": once, "p2": once, "s1": once, "s2": twice}
        assert [run.split(".")[1] for run in inside.run_host.started_runs] == ["s2"]
        assert inside.state.index.rollout(rollout).ended_at is None
