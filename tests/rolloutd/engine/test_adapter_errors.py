"""An adapter that raises what nobody foresaw costs the one question that it was asked, never the daemon."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines.model.decision import DryRun, Release
from machines.model.node import NodeHealth, Observation
from machines.model.plan import StepDef
from machines.model.rollout import FailureCode
from rolloutd.engine.adapter_failures import REPORTED_AFTER
from rolloutd.engine.background.checks_outside_attempts import check_outside_attempt
from rolloutd.engine.background.hold_release import RETRY_S
from rolloutd.engine.background.inventory_refresh import InventoryRefresher
from rolloutd.engine.background.node_observations import (
    RESTART_DELAY_S,
    HostOnlyObserver,
    OnDemandObserver,
    run_watch,
)
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.drivers.traffic_probes import probe_traffic
from rolloutd.engine.notifications import MAX_TRIES, NotificationDispatcher
from rolloutd.errors import AdapterFailed, NodeUnreachable
from rolloutd.ports import Busy, DiscoveredNode, Failed, Host, Ok, StepContext, Unknown
from rolloutd.ports.guards import adapter_errors
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import FakeRunner
from tests.contracts.fakes.sources import find_source
from tests.rolloutd.control_environment import KUBERNETES_NODES, PLAN, ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import carry_out, checks_of, command_jobs

UNEXPECTED_ERROR = KeyError("status")


class RaisingAdapter(FakeIsolator):
    """Every port that is asked beside the loop; each answer is a surprise."""

    source = "ams"
    name = "chat"

    def __init__(self, surprise: Exception = UNEXPECTED_ERROR) -> None:
        super().__init__()
        self._surprise = surprise

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        raise self._surprise

    async def release(self, host: Host) -> Ok | Busy:
        raise self._surprise

    async def refresh(self) -> Sequence[DiscoveredNode]:
        raise KeyError("metadata")

    async def dry_run(self, ctx: StepContext) -> Ok | Busy:
        raise KeyError("spec")

    async def check(self, ctx: StepContext) -> Ok | Unknown:
        raise PermissionError(13, "Permission denied", "/etc/key")

    async def send(self, title: str, text: str) -> None:
        raise KeyError("channel")


def gear(inside: ControlEnvironment, surprise: Exception = UNEXPECTED_ERROR) -> AdapterSet:
    surprised = RaisingAdapter(surprise)
    return AdapterSet(
        FakeRunner(inside.run_host), {"kubernetes": surprised}, {"reachable": surprised}, find_source
    )


@pytest.mark.parametrize("surprise", [KeyError("status"), TimeoutError(), OSError("no route to host")])
async def test_an_observer(tmp_path: Path, surprise: Exception) -> None:
    async with control_environment(tmp_path) as inside:
        await OnDemandObserver(inside.state, [RaisingAdapter(surprise)]).observe_now(["p1"])
        seen = inside.state.index.observation("p1")
        assert seen is not None
        assert seen.sight is NodeHealth.UNKNOWN


async def test_an_inventory(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        known = set(inside.state.index.nodes)

        await InventoryRefresher(inside.state, [RaisingAdapter()]).refresh()
        assert set(inside.state.index.nodes) == known
        assert inside.state.sources["ams"].error == "inventory ams: unexpected KeyError: 'metadata'"


async def test_a_rehearsal(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as inside:
        rollout = await inside.start(
            text=PLAN.replace(
                'isolate: [{command: {do: "true", undo: "true"}}]', "isolate: [{kubernetes: {}}]"
            )
        )
        await carry_out(inside.state, gear(inside), [DryRun(rollout, "p1")])
        index = inside.state.index
        told = index.dry_run_results.fresh(index.target(rollout, "p1"), inside.state.now())
        assert told is not None
        assert told.succeeds is None
        assert "unexpected KeyError" in told.why


@pytest.mark.parametrize("surprise", [KeyError("metadata"), TimeoutError()])
async def test_letting_go_a_kept_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, surprise: Exception
) -> None:
    async with control_environment(tmp_path) as inside:
        kept = Observation("p1", NodeHealth.DOWN, inside.state.now(), left_isolated_by="kubernetes")
        inside.state.index.record_observations([kept], inside.state.now())
        async with asyncio.TaskGroup() as tasks:
            command_jobs(inside.state, gear(inside, surprise)).start(tasks, [Release("p1")])
            while "could not be returned to service after its hold" not in caplog.text:
                await asyncio.sleep(0)
            while not inside.clock.sleepers:
                await asyncio.sleep(0)
            inside.clock.advance(RETRY_S)


async def test_a_check_of_a_canary_that_soaks(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        spec = inside.state.index.rollout(rollout).plan.verify[0]
        session = NodeSession(inside.state, gear(inside), rollout, "p1")
        said = await check_outside_attempt(checks_of(session), spec)
        assert isinstance(said, Failed)
        assert said.code is FailureCode.UNKNOWN
        assert said.text.startswith("this machine could not do it: [Errno 13]")


async def test_a_channel_gives_up_after_its_tries(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with control_environment(tmp_path) as inside:
        notifying = NotificationDispatcher(inside.state, [RaisingAdapter()])
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(notifying.run())
            await asyncio.sleep(0)
            await inside.submit()
            while "given up" not in caplog.text:
                await asyncio.sleep(0)
                inside.clock.advance(60.0)
            running.cancel()
    assert caplog.text.count("try ") >= MAX_TRIES


class RaisingShell:
    """A watch that sees one node up and then meets a surprise."""

    source = "ams"

    def __init__(self) -> None:
        self.begun = 0

    async def run(
        self,
        on_observed: Callable[[Sequence[Observation]], None],
        on_nodes_changed: Callable[[], None],
        on_tried: Callable[[str], None] = lambda error: None,
    ) -> None:
        self.begun += 1
        on_observed([Observation("p1", NodeHealth.UP, 0.0)])
        raise KeyError("metadata")


async def test_a_watch_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with control_environment(tmp_path) as inside:
        watch = RaisingShell()
        keeping = asyncio.create_task(run_watch(inside.state, watch, lambda: None))
        while watch.begun < 3:
            await asyncio.sleep(0)
            if inside.clock.sleepers:
                inside.clock.advance(RESTART_DELAY_S)
        keeping.cancel()
        assert "watch ams: broken, it restarts: watch ams: unexpected KeyError" in caplog.text


class BrokenWatch(RaisingShell):
    """A watch that breaks some times, then reaches its source."""

    def __init__(self, breaks: int) -> None:
        super().__init__()
        self._breaks = breaks

    async def run(
        self,
        on_observed: Callable[[Sequence[Observation]], None],
        on_nodes_changed: Callable[[], None],
        on_tried: Callable[[str], None] = lambda error: None,
    ) -> None:
        self.begun += 1
        if self.begun <= self._breaks:
            raise OSError("no route to host")
        on_tried("")
        await asyncio.Event().wait()


async def test_watch_that_keeps_failing_is_a_problem_until_it_answers(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        watch, problems = BrokenWatch(REPORTED_AFTER), [inside.state.problems()]
        keeping = asyncio.create_task(run_watch(inside.state, watch, lambda: None))
        while watch.begun <= REPORTED_AFTER:
            await asyncio.sleep(0)
            if problems[-1] != inside.state.problems():
                problems.append(inside.state.problems())
                health = await inside.request("nora", "get", "/v1/health")
                assert health["trouble"] == (problems[-1][0] if problems[-1] else None)
            if inside.clock.sleepers:
                inside.clock.advance(RESTART_DELAY_S)
        keeping.cancel()
        assert problems[1][0].startswith("watch ams has failed 5 times in a row since ")
        assert problems[1][0].endswith("watch ams: no route to host")
        assert inside.state.problems() == ()


async def test_observer_that_keeps_failing_is_a_problem_and_the_nodes_reason(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        silent = HostOnlyObserver(RaisingAdapter(OSError("no route to host")), "observe.0.prometheus")
        observer = OnDemandObserver(inside.state, [silent])
        for _ in range(REPORTED_AFTER - 1):
            await observer.observe_now(["p1"])
        assert inside.state.problems() == ()
        await observer.observe_now(["p1"])
        (problem,) = inside.state.problems()
        assert problem.startswith("observe.0.prometheus has failed 5 times in a row")
        seen = inside.state.index.observation("p1")
        assert seen is not None
        assert seen.why == "observe.0.prometheus: no route to host"


class MalformedAdapter(RaisingAdapter):
    """Every port again; each answer is of another shape than its port names."""

    async def observe(self, hosts: Sequence[Host]) -> Any:
        return ["p1"]

    async def release(self, host: Host) -> Any:
        return None

    async def refresh(self) -> Any:
        return ["p1"]

    async def dry_run(self, ctx: StepContext) -> Any:
        return False

    async def check(self, ctx: StepContext) -> Any:
        return True

    async def inspect(self, ctx: StepContext) -> Any:
        return "idle"


async def test_an_answer_of_another_shape_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start()
        state, strange = inside.state, MalformedAdapter()
        adapters = gear(inside)
        adapters = replace(
            adapters,
            isolators={"command": strange},
            checks={"reachable": strange},
            probes={"kubernetes": strange},
        )
        await OnDemandObserver(state, [strange]).observe_now(["p1"])
        assert (seen := state.index.observation("p1")) is not None
        assert seen.sight is NodeHealth.UNKNOWN

        spec = state.index.rollout(rollout).plan.verify[0]
        said = await check_outside_attempt(checks_of(NodeSession(state, adapters, rollout, "p1")), spec)
        wrong = "check reachable: returned True, which is not a valid result"
        assert said == Failed(wrong, code=FailureCode.UNKNOWN)

        probe = StepDef("traffic.0.kubernetes", "kubernetes")
        assert isinstance(await probe_traffic(NodeSession(state, adapters, rollout, "p1"), probe), Unknown)

        await carry_out(state, adapters, [DryRun(rollout, "p1")])
        told = state.index.dry_run_results.fresh(state.index.target(rollout, "p1"), state.now())
        assert told is not None
        assert told.succeeds is None

        known = set(state.index.nodes)

        await InventoryRefresher(state, [strange]).refresh()
        assert set(state.index.nodes) == known
        assert "which is not a valid result" in state.sources["ams"].error


class VerboseObserver(RaisingAdapter):
    """An observer that also tells of nodes which nobody asked for."""

    async def observe(self, hosts: Sequence[Host]) -> Sequence[Observation]:
        return [Observation(name, NodeHealth.UP, 2e9) for name in ("p1", "moon")]


async def test_an_observer_that_tells_of_a_node_nobody_knows(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        await OnDemandObserver(inside.state, [VerboseObserver()]).observe_now(["p1"])
        seen = inside.state.index.observation("p1")
        assert seen is not None
        assert seen.sight is NodeHealth.UP
        assert inside.state.index.observation("moon") is None


@pytest.mark.parametrize("kind", ["command", "haproxy"])
async def test_a_kept_node_whose_isolator_keeps_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async with control_environment(tmp_path) as inside:
        inside.state.index.record_observations(
            [Observation("p1", NodeHealth.DOWN, inside.state.now(), left_isolated_by=kind)], 0.0
        )
        adapters = replace(gear(inside), isolators={"command": FakeIsolator()})
        async with asyncio.TaskGroup() as tasks:
            command_jobs(inside.state, adapters).start(tasks, [Release("p1")])
            while not inside.clock.sleepers:
                await asyncio.sleep(0)
            inside.clock.advance(RETRY_S)
        assert "could not be returned to service after its hold" in caplog.text


def test_what_is_raised_on_purpose_passes() -> None:
    for purposeful in (NodeUnreachable("n1 does not answer"), TimeoutError("late"), asyncio.CancelledError()):
        with pytest.raises(type(purposeful)) as raised, adapter_errors("probe x"):
            raise purposeful
        assert raised.value is purposeful
    with (
        pytest.raises(AdapterFailed, match="x: unexpected ZeroDivisionError"),
        adapter_errors("probe x"),
    ):
        raise ZeroDivisionError("by zero")
