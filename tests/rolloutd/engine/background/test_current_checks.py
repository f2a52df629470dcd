"""Nodes that may need nothing: check mode decides, and no slot, isolation or run is spent on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from machines.facts.node_work import WAITS_FOR, NodeWork, WorkKind
from machines.model.configuration import Compliance
from machines.model.decision import Admit, CheckIfCurrent
from machines.scheduler.decide import decide
from machines.states import Outcome, Phase
from rolloutd.engine.check_mode import CheckMode
from rolloutd.ports import RunEvent, RunRequest
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import FakeRunner, Script
from tests.contracts.fakes.sources import find_source
from tests.machines.builders import reason_of
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import carry_out
from tests.rolloutd.slow_store import adapters_of, daemon_of

SKIPPING = PLAN.replace("  soak: 10m", '  skip_compliant: true\n  canary: {select: "", max_parallel: 9}')


async def roll_out(inside: ControlEnvironment, tmp_path: Path) -> dict[str, tuple[Outcome | None, int]]:
    """Let a daemon finish a rollout; return each node's outcome and attempts."""
    rollout = await inside.start(text=SKIPPING)
    daemon = asyncio.create_task(daemon_of(inside, adapters_of(inside, tmp_path, FakeIsolator())).run())
    try:
        async with asyncio.timeout(30):
            while not all(t.phase is Phase.DONE for t in inside.state.index.targets(rollout)):
                await asyncio.sleep(0)
                inside.clock.advance(0.01)
                inside.observe_all_up()
    finally:
        daemon.cancel()
        await asyncio.wait({daemon})
    return {t.node: (t.outcome, t.attempt) for t in inside.state.index.targets(rollout)}


async def test_skip_compliant_isolates_only_nodes_that_change(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.run_host.scripts = {"site.yml": Script.CHANGE}
        inside.run_host.compliant = {"p1", "s2"}
        found = await roll_out(inside, tmp_path)
        current, changed = (Outcome.ALREADY_CURRENT, 0), (Outcome.CHANGED, 1)
        assert found == {"p1": current, "p2": changed, "s1": changed, "s2": current}
        assert sorted(run.split(".")[1] for run in inside.run_host.started_runs) == ["p2", "s1"]


async def test_unknown_compliance_is_changed_like_any_node(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.run_host.scripts = {"site.yml": Script.UNCHECKED}
        inside.run_host.compliant = {"p1", "p2", "s1", "s2"}
        found = await roll_out(inside, tmp_path)
        assert set(found.values()) == {(Outcome.CHANGED, 1)}


async def test_node_is_not_checked_while_it_is_cleaned(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=SKIPPING)
        inside.run_host.compliant = {"p1", "p2"}
        inside.state.index.record_work(NodeWork(WorkKind.CLEANING, "p1"))
        adapters = adapters_of(inside, tmp_path, FakeIsolator())
        await carry_out(inside.state, adapters, [CheckIfCurrent(rollout, node) for node in ("p1", "p2")])
        assert [inside.phase(rollout, node) for node in ("p1", "p2")] == [Phase.PENDING, Phase.DONE]


@pytest.mark.parametrize(
    "kind", sorted(WAITS_FOR[WorkKind.CHECK_MODE] - {WorkKind.ATTEMPT, WorkKind.KEPT_DOWN})
)
async def test_check_mode_says_what_it_waits_for(tmp_path: Path, kind: WorkKind) -> None:
    async with control_environment(tmp_path) as inside:
        plan = inside.state.index.rollout(await inside.start()).plan
        inside.state.index.record_work(NodeWork(kind, "p1"))
        report = await CheckMode(inside.state, FakeRunner(inside.run_host)).check(
            "p1", await find_source(""), plan
        )
        assert report.compliance is Compliance.UNKNOWN
        assert report.problem.startswith("p1 ")
        assert not inside.run_host.runs


async def test_check_run_whose_start_gave_no_answer_is_ended(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.run_host.scripts = {"site.yml": Script.LONG}
        runner = FakeRunner(inside.run_host)
        start = runner.start

        async def start_and_lose(request: RunRequest) -> str:
            await start(request)
            raise TimeoutError("no answer")

        runner.start = start_and_lose  # type: ignore[method-assign]
        plan = inside.state.index.rollout(await inside.start()).plan
        report = await CheckMode(inside.state, runner).check("p1", await find_source(""), plan)
        assert report.compliance is Compliance.UNKNOWN
        (run,) = inside.run_host.runs.values()
        assert run.result is not None, "it would run beside an attempt"


class DiffingRunner(FakeRunner):
    """Runs whose task shows what it would write."""

    async def read_events(self, handle: str, offset: int = 0) -> AsyncIterator[RunEvent]:
        yield RunEvent(1, 0.0, "changed", "write", {"task": "write", "diff": "-key=old7\n+key=Zq7x-9\n"})


@pytest.mark.parametrize("shows", [False, True])
async def test_diff_has_values_of_shown_variables_alone(tmp_path: Path, shows: bool) -> None:
    async with control_environment(tmp_path, show_vars=["psk"] if shows else []) as inside:
        text = PLAN.replace(
            "{playbook: site.yml}", "{playbook: site.yml, vars: {psk: [{key: Zq7x-9}], n: 7}}"
        )
        plan = inside.state.index.rollout(await inside.start(text=text)).plan
        check_mode = CheckMode(inside.state, DiffingRunner(inside.run_host))
        report = await check_mode.check("p1", await find_source(""), plan)
        assert report.changes[0].diff == f"-key=old7\n+key={'Zq7x-9' if shows else '{{ vars.psk }}'}\n"


async def test_node_in_check_mode_is_not_admitted(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        inside.observe_all_up()
        inside.run_host.scripts = {"site.yml": Script.LONG}
        check = CheckMode(inside.state, FakeRunner(inside.run_host))
        source, plan = await find_source(rollout), inside.state.index.rollout(rollout).plan
        drift = asyncio.create_task(check.check("p1", source, plan, rollout=rollout))
        async with asyncio.timeout(10):
            while not inside.run_host.runs:
                await asyncio.sleep(0)
        twice = await check.check("p1", source, plan, rollout=rollout)
        assert "check mode" in twice.problem
        decision = decide(inside.state.index, inside.clock.now())
        assert "p1" not in [each.node for each in decision.of(Admit)]
        assert reason_of(inside.state.index, rollout, "p1", inside.clock.now()).code == "check-mode"
        drift.cancel()
        await asyncio.gather(drift, return_exceptions=True)
        decision = decide(inside.state.index, inside.clock.now())
        assert "p1" in [each.node for each in decision.of(Admit)]
