"""What an isolator says beforehand reaches the core, and what it does not say in time holds nobody up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from machines.facts.dry_runs import DryRunResult
from machines.model.decision import Admit, DryRun
from machines.scheduler.decide import decide
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.tasks import JOB_RETRY_S
from rolloutd.errors import NodeUnreachable
from rolloutd.ports import Busy, Ok, StepContext
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import find_source
from tests.rolloutd.control_environment import KUBERNETES_NODES, PLAN, ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import command_jobs

CANARIES = 'canary: {select: "team in (payments,search)", max_parallel: 9}\n  isolate: [{kubernetes: {}}]'
CORDONED = PLAN.replace('isolate: [{command: {do: "true", undo: "true"}}]', CANARIES)


class DryRunIsolator(FakeIsolator):
    """An isolator that can say beforehand: p1 cannot go, s1 cannot be asked."""

    def __init__(self, silent: asyncio.Event | None = None) -> None:
        super().__init__()
        self._silent = silent

    async def dry_run(self, ctx: StepContext) -> Ok | Busy:
        """Say it, or wait for ever."""
        if self._silent is not None:
            await self._silent.wait()
        if ctx.host.name == "s1":
            raise NodeUnreachable("cluster ams does not answer")
        return Busy("held by budget web") if ctx.host.name == "p1" else Ok()


async def run_dry_runs(inside: ControlEnvironment, isolator: FakeIsolator) -> list[str]:
    """Rehearse what the core asks for, and return who starts then."""

    gear = AdapterSet(FakeRunner(inside.run_host), {"kubernetes": isolator}, {}, find_source)
    now = inside.state.now()
    asked = decide(inside.state.index, now)
    assert asked.of(Admit) == ()
    assert {each.node for each in asked.of(DryRun)} == {"p1", "p2", "s1", "s2"}
    async with asyncio.TaskGroup() as tasks:
        jobs = command_jobs(inside.state, gear)
        jobs.start(tasks, asked.of(DryRun) * 2)
    return [start.node for start in decide(inside.state.index, now).of(Admit)]


async def test_dry_run_success_first_and_unknown_not_blocked(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as inside:
        inside.observe_all_up()
        await inside.start(text=CORDONED)
        assert sorted(await run_dry_runs(inside, DryRunIsolator())) == ["p2", "s1"]


async def test_an_isolator_that_cannot_say_or_does_not_in_time_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutd.engine.background.dry_runs.DRY_RUN_TIMEOUT_S", 0.01)
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as inside:
        inside.observe_all_up()
        await inside.start(text=CORDONED)
        assert sorted(await run_dry_runs(inside, DryRunIsolator(asyncio.Event()))) == ["p1", "s1"]


async def test_blocker_of_isolator_that_no_longer_applies_is_forgotten(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as inside:
        rollout = await inside.start(text=CORDONED)
        now = inside.state.now()
        blocked = DryRunResult(rollout, "p1", False, now, "held", is_permanent=True, step="isolate.1.gone")
        inside.state.index.record_dry_run(blocked)
        adapters = AdapterSet(FakeRunner(inside.run_host), {"kubernetes": FakeIsolator()}, {}, find_source)
        async with asyncio.TaskGroup() as tasks:
            command_jobs(inside.state, adapters).start(tasks, [blocked])
            for _ in range(10):
                await asyncio.sleep(0)
            problems = inside.state.problems()
            inside.clock.advance(JOB_RETRY_S)
        assert problems == ()
        assert inside.state.index.dry_run_results.permanent() == []
