"""Reports follow the events of a node in order, and none that fails hinders anything."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from machines.model.events import StepRecorded
from machines.model.step_record import StepAction, StepState
from machines.model.train import OutageProgress
from machines.states import Trigger
from rolloutd.engine.background.progress_reports import ProgressReporter
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.ports import Host, ProgressReport
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import find_source
from tests.rolloutd.control_environment import KUBERNETES_NODES, PLAN, ControlEnvironment, control_environment

STEP = "isolate.0.kubernetes"
CLUSTER_PLAN = PLAN.replace('isolate: [{command: {do: "true", undo: "true"}}]', "isolate: [{kubernetes: {}}]")


class ReportingIsolator(FakeIsolator):
    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.shown: list[tuple[str, str, str]] = []
        self.isolated_for: list[tuple[str, ...]] = []
        self._error = error

    async def report(self, host: Host, report: ProgressReport) -> None:
        self.shown.append((host.name, report.kind.value, report.text))
        self.isolated_for.append(tuple(report.isolated_for))
        if self._error is not None:
            raise self._error


def reporter(env: ControlEnvironment, isolator: FakeIsolator) -> ProgressReporter:
    return ProgressReporter(
        env.state, AdapterSet(FakeRunner(env.run_host), {"kubernetes": isolator}, {}, find_source)
    )


async def test_reports_follow_events_in_order(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as env:
        isolator = ReportingIsolator()
        sender = reporter(env, isolator)
        rollout = await env.start(text=CLUSTER_PLAN)
        await env.transition(rollout, "p1", Trigger.ADMITTED)
        blocked = replace(env.step(rollout, "p1", STEP, text="db holds it"), state=StepState.BUSY)
        await env.commit(StepRecorded(blocked, True))
        env.clock.advance(13.0)
        await env.transition(rollout, "p1", Trigger.ISOLATED)
        returned = env.step(rollout, "p1", STEP, StepAction.REVERT, text="in service as before")
        await env.commit(StepRecorded(returned, False))
        async with asyncio.TaskGroup() as tasks:
            sender.send_queued(tasks)
        assert isolator.shown == [
            ("p1", "admitted", f"{rollout}, attempt 1: isolation begins"),
            ("p1", "blocked", "db holds it"),
            ("p1", "isolated", "isolated in 14s"),
            ("p1", "returned", "in service as before"),
        ]


async def test_report_names_each_rollout_that_shares_isolation(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as env:
        isolator = ReportingIsolator()
        sender = reporter(env, isolator)
        plans = [CLUSTER_PLAN.replace("name: sysctl", f"name: {name}") for name in ("kernel", "driver")]
        first, second = [await env.start(text=plan) for plan in plans]
        train = {"rollouts": [first, second], "reason": "x"}
        await env.request("adam", "put", "/v1/trains/t", train)
        await env.transition(first, "p1", Trigger.ADMITTED)
        await env.commit(StepRecorded(env.step(first, "p1", STEP), True))
        for trigger in (Trigger.ISOLATED, Trigger.MAINTAINED):
            await env.transition(first, "p1", trigger)
        env.state.index.record_outage(first, "p1", OutageProgress(1, has_passed=True, waits=True))
        await env.transition(second, "p1", Trigger.ADMITTED, joins_outage=True)
        await env.commit(StepRecorded(env.step(second, "p1", STEP), True))
        await env.transition(second, "p1", Trigger.ISOLATED)
        async with asyncio.TaskGroup() as tasks:
            sender.send_queued(tasks)
        assert isolator.isolated_for == [(), (first,), (first,), (first,), (first, second)]


@pytest.mark.parametrize("error", [KeyError("uid"), TimeoutError(), OSError("no route to host")])
async def test_failed_report_is_logged_and_next_sent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as env:
        isolator = ReportingIsolator(error)
        sender = reporter(env, isolator)
        rollout = await env.start(text=CLUSTER_PLAN)
        await env.transition(rollout, "p1", Trigger.ADMITTED)
        await env.transition(rollout, "p1", Trigger.ISOLATED)
        async with asyncio.TaskGroup() as tasks:
            sender.send_queued(tasks)
        assert [kind for _, kind, _ in isolator.shown] == ["admitted", "isolated"]
        assert caplog.text.count("p1: not reported") == 2


async def test_plan_without_reporting_isolator_queues_nothing(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as env:
        isolator = ReportingIsolator()
        sender = reporter(env, isolator)
        await env.transition(await env.start(), "p1", Trigger.ADMITTED)
        async with asyncio.TaskGroup() as tasks:
            sender.send_queued(tasks)
        assert not isolator.shown
