"""When a canary that soaks is believed to have turned red."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from machines.model.decision import CheckSoaking
from machines.model.events import (
    NodesDiscovered,
    PreparationRecorded,
    RolloutCancelled,
    RolloutDeleted,
    StepRecorded,
)
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import DAEMON, FailureCode
from machines.model.step_record import StepAction, StepState
from machines.states import Phase, Trigger
from rolloutd.adapters.playbook_steps import PlaybookCheck
from rolloutd.engine.background import jobs
from rolloutd.engine.background.checks_outside_attempts import (
    RUN_INTERVAL_S,
    check_outside_attempt,
)
from rolloutd.engine.background.jobs import CommandJobs
from rolloutd.engine.drivers.check_execution import RETRY_MAX_S, TIMEOUT_S
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.ports import Check, Failed, Ok, StepContext, Unknown
from tests.contracts.fakes.check import FakeCheck
from tests.contracts.fakes.clock import FakeClock
from tests.contracts.fakes.runner import FakeRunner, Script, playbook_context
from tests.contracts.fakes.sources import find_source
from tests.rolloutd.control_environment import (
    KUBERNETES_NODES,
    PLAN,
    ControlEnvironment,
    control_environment,
)
from tests.rolloutd.decided_jobs import checks_of, command_jobs, start_decided
from tests.rolloutd.preparation_environment import plan_with

UNREACHABLE = Unknown("no answer within 15 s")


@asynccontextmanager
async def soaking(
    tmp_path: Path, within: str
) -> AsyncIterator[tuple[ControlEnvironment, FakeCheck, CommandJobs, str]]:
    """Serve a rollout whose two canaries soak, and what looks at them."""
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace("reachable: {}", f"reachable: {{within: {within}}}")
        rollout = await inside.start(text=text)
        for node in ("p1", "s1"):
            await inside.finish(rollout, node)
        check = FakeCheck()
        yield inside, check, watching(inside, check), rollout


def watching(inside: ControlEnvironment, check: Check) -> CommandJobs:
    """Return what looks at canaries by this check."""

    adapters = AdapterSet(FakeRunner(inside.run_host), {}, {"reachable": check}, find_source)
    return command_jobs(inside.state, adapters)


async def check_canaries(
    inside: ControlEnvironment, watch: CommandJobs, *, tick_s: float = RETRY_MAX_S
) -> None:
    """Look once at all canaries, however long that takes."""
    async with asyncio.TaskGroup() as tasks:
        start_decided(inside.state, watch, tasks, CheckSoaking)
        for _ in range(100):
            await asyncio.sleep(0)
            inside.clock.advance(tick_s)


@pytest.mark.parametrize(
    ("within", "answers", "phase"),
    [
        ("0s", (Failed("red"), Ok()), Phase.DONE),
        ("0s", (Failed("red"), Failed("red"), Ok()), Phase.FAILED),
        ("5m", (UNREACHABLE, UNREACHABLE, Ok()), Phase.DONE),
        ("5m", (UNREACHABLE,), Phase.FAILED),
    ],
)
async def test_a_check_is_red_that_stays_red(
    tmp_path: Path, within: str, answers: tuple[Ok | Failed | Unknown, ...], phase: Phase
) -> None:
    """A check that may take a while to turn green is not believed at its second look."""
    async with soaking(tmp_path, within) as (inside, check, watch, rollout):
        check.results["p1"] = answers
        await check_canaries(inside, watch)
        assert inside.state.index.target(rollout, "p1").phase is phase
        assert inside.state.index.target(rollout, "s1").phase is Phase.DONE


async def test_failed_canary_is_of_team_its_node_moved_to(tmp_path: Path) -> None:
    async with soaking(tmp_path, "0s") as (inside, check, watch, rollout):
        p1 = inside.state.index.nodes["p1"]
        await inside.commit(NodesDiscovered((replace(p1, labels={**p1.labels, "team": "search"}),)))
        assert inside.state.index.target(rollout, "p1").team == "payments"
        check.results["p1"] = (Failed("red"),)
        await check_canaries(inside, watch)
        failed = inside.state.index.target(rollout, "p1")
        assert (failed.phase, failed.team) == (Phase.FAILED, "search")


class RecordingCheck(FakeCheck):
    """A check that is red, and keeps what p1 was asked and when."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock
        self.calls: list[tuple[float, StepContext]] = []

    async def check(self, ctx: StepContext) -> Failed:
        if ctx.host.name == "p1":
            self.calls.append((self._clock.now(), ctx))
        return Failed("red")


async def test_each_try_of_soak_check_ends_by_its_timeout(tmp_path: Path) -> None:
    async with soaking(tmp_path, "5m") as (inside, _, _, rollout):
        check = RecordingCheck(inside.clock)
        await check_canaries(inside, watching(inside, check))
        assert inside.phase(rollout, "p1") is Phase.FAILED
        assert {ctx.deadline - at for at, ctx in check.calls} == {TIMEOUT_S}


async def test_soak_check_without_within_pauses_between_tries(tmp_path: Path) -> None:
    async with soaking(tmp_path, "0s") as (inside, _, _, rollout):
        check = RecordingCheck(inside.clock)
        await check_canaries(inside, watching(inside, check), tick_s=1.0)
        assert inside.phase(rollout, "p1") is Phase.FAILED
        first, second = (at for at, _ in check.calls)
        assert second - first >= RETRY_MAX_S
        assert not inside.state.step_progress, "only an attempt has progress"


async def test_soak_check_knows_what_the_isolator_saw(tmp_path: Path) -> None:
    text = PLAN.replace('command: {do: "true", undo: "true"}', "kubernetes: {}")
    text = text.replace("reachable: {}", "kubernetes: {within: 0s}")
    async with control_environment(tmp_path, nodes=KUBERNETES_NODES) as inside:
        rollout = await inside.start(text=text)
        for node in ("p1", "s1"):
            await inside.finish(rollout, node)
        saw = {"daemonset_pods": {"kube-system/cni": True}}
        await inside.commit(StepRecorded(inside.step(rollout, "p1", "isolate.0.kubernetes", prior=saw)))
        check = RecordingCheck(inside.clock)
        adapters = AdapterSet(FakeRunner(inside.run_host), {}, {"kubernetes": check}, find_source)
        await check_canaries(inside, command_jobs(inside.state, adapters))
        assert [ctx.prior for _, ctx in check.calls] == [saw, saw]


class InterleavingCheck(FakeCheck):
    """A check that is red, and slow enough for something to happen before it says so."""

    def __init__(self, happens: Callable[[], Awaitable[object]]) -> None:
        super().__init__()
        self._happens = happens

    async def check(self, ctx: StepContext) -> Failed:
        """Let it happen, once, and be red."""
        if not self.checked_nodes:
            self.checked_nodes.append(ctx.host.name)
            await self._happens()
        return Failed("red")


async def test_rollout_deleted_during_soak_check(
    tmp_path: Path,
) -> None:
    async with soaking(tmp_path, "0s") as (inside, _, _, rollout):

        async def over() -> None:
            now = inside.clock.now()
            await inside.commit(RolloutCancelled(rollout, DAEMON, "because", now))
            await inside.commit(RolloutDeleted(rollout, DAEMON, now))

        await check_canaries(inside, watching(inside, InterleavingCheck(over)))
        assert rollout not in inside.state.index.rollouts


async def test_a_canary_of_a_cancelled_rollout_takes_no_slot_by_turning_red(tmp_path: Path) -> None:
    async with soaking(tmp_path, "0s") as (inside, _, _, rollout):

        async def over() -> None:
            await inside.commit(RolloutCancelled(rollout, DAEMON, "because", inside.clock.now()))

        await check_canaries(inside, watching(inside, InterleavingCheck(over)))
        assert inside.phase(rollout, "p1") is inside.phase(rollout, "s1") is Phase.DONE


async def test_a_canary_that_another_rollout_takes_meanwhile_is_not_red_for_that(tmp_path: Path) -> None:
    async with soaking(tmp_path, "0s") as (inside, _, _, rollout):
        other = await inside.start(text=PLAN.replace("name: sysctl", "name: other"))

        async def taken() -> None:
            await inside.transition(other, "p1", Trigger.ADMITTED)

        await check_canaries(inside, watching(inside, InterleavingCheck(taken)))
        assert inside.phase(rollout, "p1") is Phase.DONE
        assert inside.phase(rollout, "s1") is Phase.FAILED


async def test_playbook_check_of_soaking_canary_is_found_again(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace("verify: [{reachable: {}}]", "verify: [{playbook: {file: undo.yml}}]")
        rollout = await inside.start(text=text)
        await inside.finish(rollout, "p1")
        inside.run_host.scripts = {"undo.yml": Script.LONG}
        spec = inside.state.index.rollout(rollout).plan.verify[0]

        checks = {"playbook": PlaybookCheck(playbook_context(inside.run_host))}
        adapters = AdapterSet(FakeRunner(inside.run_host), {}, checks, find_source)
        session = NodeSession(inside.state, adapters, rollout, "p1")
        first = asyncio.create_task(check_outside_attempt(checks_of(session), spec))
        while not inside.run_host.has_work("p1"):
            await asyncio.sleep(0)
        first.cancel()  # the daemon stops, its run does not
        await asyncio.wait({first})
        (run,) = inside.run_host.runs.values()
        run.end(Failed("the service answers 503"))
        assert await check_outside_attempt(checks_of(session), spec) == Failed("the service answers 503")
        assert len(inside.run_host.runs) == 1
        inside.run_host.scripts = {"undo.yml": Script.OK}
        for _ in range(2):
            assert isinstance(await check_outside_attempt(checks_of(session), spec), Ok)
        assert len(inside.run_host.runs) == 2, "a fresh pass stays valid"
        inside.clock.advance(RUN_INTERVAL_S)
        await check_outside_attempt(checks_of(session), spec)
        assert len(inside.run_host.runs) == 3


async def test_lost_playbook_check_is_cleaned_up_before_the_next(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace("verify: [{reachable: {}}]", "verify: [{playbook: {file: undo.yml}}]")
        rollout = await inside.start(text=text)
        await inside.finish(rollout, "p1")
        lost = inside.step(rollout, "p1", "soak.verify.0.playbook", StepAction.CHECK, handle="lost")
        await inside.commit(StepRecorded(replace(lost, state=StepState.UNKNOWN)))
        inside.run_host.scripts = {"undo.yml": Script.OK}
        spec = inside.state.index.rollout(rollout).plan.verify[0]

        checks = {"playbook": PlaybookCheck(playbook_context(inside.run_host))}
        adapters = AdapterSet(FakeRunner(inside.run_host), {}, checks, find_source)
        preparing = await inside.start(text=plan_with("one").replace("name: sysctl", "name: other"))
        now = inside.clock.now()
        stage = Preparation(preparing, "p1", "one", 1, PreparationState.RUNNING, "", now, now)
        await inside.commit(PreparationRecorded(stage))
        result = await check_outside_attempt(
            checks_of(NodeSession(inside.state, adapters, rollout, "p1")), spec
        )
        assert isinstance(result, Unknown)  # cleaning up would end the run of the stage too
        await inside.commit(PreparationRecorded(replace(stage, state=PreparationState.DONE)))
        session = NodeSession(inside.state, adapters, rollout, "p1")
        assert isinstance(await check_outside_attempt(checks_of(session), spec), Ok)
        records = await inside.state.store.load_steps(rollout, "p1")
        assert [r.action for r in records][-2:] == [StepAction.CLEAN_UP, StepAction.CHECK]
        assert not await inside.state.store.unfinished_runs("p1")


async def test_playbook_check_of_deleted_rollout_is_unknown(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace("verify: [{reachable: {}}]", "verify: [{playbook: {file: undo.yml}}]")
        rollout = await inside.start(text=text)
        await inside.finish(rollout, "p1")
        spec = inside.state.index.rollout(rollout).plan.verify[0]
        checks = {"playbook": PlaybookCheck(playbook_context(inside.run_host))}
        adapters = AdapterSet(FakeRunner(inside.run_host), {}, checks, find_source)
        now = inside.clock.now()
        await inside.commit(RolloutCancelled(rollout, DAEMON, "because", now))
        await inside.commit(RolloutDeleted(rollout, DAEMON, now))
        result = await check_outside_attempt(
            checks_of(NodeSession(inside.state, adapters, rollout, "p1")), spec
        )
        assert result == Failed(f"{rollout}: the rollout was deleted", code=FailureCode.UNKNOWN)


class CountingCheck(FakeCheck):
    """A check that counts how many of it run at once."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most = 0

    async def check(self, ctx: StepContext) -> Ok:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        self.checked_nodes.append(ctx.host.name)
        return Ok()


async def test_canaries_of_large_wave_are_checked_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_SOAK_CHECKS", 1)
    async with soaking(tmp_path, "0s") as (inside, _, _, _):
        check = CountingCheck()
        await check_canaries(inside, watching(inside, check))
        assert (sorted(check.checked_nodes), check.most) == (["p1", "s1"], 1)
