"""Runs go to the runner of their node, and are found again there, waited for, or unknown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from machines.model.actions import Isolate
from machines.model.events import NodesDiscovered
from machines.model.limits import RunnerProblem, RunnerRule
from machines.model.node import Node, NodeKind
from machines.model.reasons import ReasonCode
from machines.model.selector import parse_selector
from machines.rules.runners import queued_run_reason
from machines.states import Outcome, Trigger
from rolloutd.adapters.playbook_steps import PlaybookCheck, PlaybookIsolator
from rolloutd.engine import runners
from rolloutd.engine.background.checks_outside_attempts import check_outside_attempt
from rolloutd.engine.check_mode import CheckMode
from rolloutd.engine.drivers.isolation import Isolation, OtherAttempts
from rolloutd.engine.drivers.node_session import AdapterSet, NodeSession
from rolloutd.engine.drivers.step_journal import StepJournal
from rolloutd.engine.runners import RoutedRunners
from rolloutd.errors import AdapterFailed, NotFound, RunnerUnavailable
from rolloutd.ports import CLUSTER_ID, Artifact, Failed, Host, Ok, RunRequest, Unknown
from tests.contracts.fakes.runner import FakeRunner, Script, playbook_context
from tests.contracts.fakes.sources import SOURCE, find_source
from tests.machines.builders import reason_of
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import checks_of
from tests.rolloutd.engine.test_daemon import ALL_CANARIES, running
from tests.rolloutd.slow_store import adapters_of, daemon_of, loop_iterations
from tests.support.directory_runner import DirectoryRunner
from tests.support.waiting import wait_in_loop_until

LOCAL_RULE = RunnerRule("local")
RACK = "r1"
"""The rack of p1 and s1, whose playbooks the runner of the tests' own runs."""


class Elsewhere:
    """A daemon's state with a runner elsewhere, for rack r1, and that of this machine."""

    def __init__(self, inside: ControlEnvironment, directory: Path, *rules: RunnerRule) -> None:
        self.inside = inside
        self.directory = directory / "elsewhere"
        rule = RunnerRule("shelf", parse_selector(f"rack={RACK}"))
        limits = replace(inside.state.index.limits, runners=rules or (rule, LOCAL_RULE))
        inside.state.index.update_limits(limits)
        self.shelf = DirectoryRunner(self.directory)
        self.runners = self.open()

    def open(self, name: str = "shelf") -> RoutedRunners:
        """Return the runners as a daemon has them that has just started."""
        named = {name: DirectoryRunner(self.directory), "local": self.local()}
        return RoutedRunners(self.inside.state, named)

    def local(self) -> FakeRunner:
        return FakeRunner(self.inside.run_host, "0123456789ab")

    def adapters(self, directory: Path) -> AdapterSet:
        return replace(adapters_of(self.inside, directory), runners=self.runners)

    def request(self, node: str, run: str = "r1", playbook: str = "succeeds.yml") -> RunRequest:
        return RunRequest(run, Host(node, labels={}), SOURCE, playbook)


@pytest.fixture
async def elsewhere(tmp_path: Path) -> AsyncIterator[Elsewhere]:
    async with control_environment(tmp_path) as inside:
        inside.run_host.scripts = {"succeeds.yml": Script.OK, "never.yml": Script.LONG}
        made = Elsewhere(inside, tmp_path)
        try:
            yield made
        finally:
            made.shelf.end_all()


async def test_handle_names_runner_and_finds_run_again(elsewhere: Elsewhere) -> None:
    both = elsewhere.runners
    ids = [both.run_id_for("r1", node) for node in ("p1", "p2")]
    assert ids[1] == "r1@0123456789ab"
    assert ids[0].startswith("shelf.")
    requests = [elsewhere.request(node, run) for node, run in zip(("p1", "p2"), ids, strict=True)]
    assert [await both.start(request) for request in requests] == ids
    assert elsewhere.inside.run_host.started_runs == ["r1@0123456789ab"]
    again = elsewhere.open()
    assert not any(map(again.is_elsewhere, ids))
    for handle in ids:
        await until_over(again, handle)
        assert isinstance((await again.get_state(handle)).result, Ok)
    assert elsewhere.shelf.begun("p1") == ["r1"]
    # A label that changed meanwhile moves no run that has begun.
    assert await again.start(replace(requests[0], host=Host("p2"))) == ids[0]


async def until_over(both: RoutedRunners, handle: str) -> None:
    async with asyncio.timeout(60.0):
        while (await both.wait_for_change(handle)).result is None:
            pass


async def test_handle_of_removed_runner_is_unknown(elsewhere: Elsewhere) -> None:
    handle = await elsewhere.runners.start(elsewhere.request("p1"))
    for after in (elsewhere.open("renamed"), elsewhere.open("shelf.2")):
        assert after.is_elsewhere(handle)
        state = await after.get_state(handle)
        assert isinstance(state.result, Unknown)
        assert state.has_begun
        with pytest.raises(NotFound):
            _ = [event async for event in after.read_events(handle)]
    moved = Elsewhere(elsewhere.inside, elsewhere.directory)
    assert moved.runners.is_elsewhere(handle), "the same name at another place is another runner"


async def test_handle_of_other_machine_is_elsewhere(elsewhere: Elsewhere) -> None:
    assert elsewhere.runners.is_elsewhere("r1@ba9876543210")
    assert not elsewhere.runners.is_elsewhere("r1"), "a handle of rolloutd 0.1"


async def test_build_on_this_machine_is_run_by_it(elsewhere: Elsewhere) -> None:
    host = Host("p1", connection={"ansible_connection": "local"})
    assert await elsewhere.runners.start(replace(elsewhere.request("p1"), host=host)) == "r1"


async def test_node_without_runner_is_not_run_here(elsewhere: Elsewhere) -> None:
    both, index, run_host = elsewhere.runners, elsewhere.inside.state.index, elsewhere.inside.run_host
    rules = index.limits.runners
    index.update_limits(replace(index.limits, runners=rules[:1]))
    run_id = both.run_id_for("r1", "p2")
    starting = asyncio.create_task(both.start(elsewhere.request("p2", run_id)))
    await loop_iterations(20)
    assert not run_host.started_runs
    waits = queued_run_reason(index, "p2", both.statuses)
    assert waits is not None
    assert waits.code is ReasonCode.NO_RUNNER, "said also of a node in flight"
    index.update_limits(replace(index.limits, runners=rules))
    elsewhere.inside.clock.advance(runners.RETRY_S[-1])
    assert await starting == run_id
    assert run_host.started_runs == [run_id]


async def test_playbook_check_is_stopped_at_its_runner(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace("verify: [{reachable: {}}]", "verify: [{playbook: {file: undo.yml}}]")
        rollout = await inside.start(text=text)
        await inside.finish(rollout, "p1")
        both = Elsewhere(inside, tmp_path)
        context = replace(playbook_context(inside.run_host), runner=both.runners)
        adapters = AdapterSet(both.runners, {}, {"playbook": PlaybookCheck(context)}, find_source)
        session = NodeSession(inside.state, adapters, rollout, "p1")
        spec = inside.state.index.rollout(rollout).plan.verify[0]
        spec = replace(spec, params={**spec.params, "file": "never.yml"})
        checking = asyncio.create_task(check_outside_attempt(checks_of(session), spec))
        try:
            await wait_in_loop_until(lambda: both.shelf.has_work("p1"))
            (record,) = [each for each in await inside.state.store.load_steps(rollout, "p1") if each.handle]
            await both.open().cancel(record.handle)
            assert not both.shelf.has_work("p1")
            assert isinstance(await checking, Failed)
        finally:
            both.shelf.end_all()


async def test_playbook_isolator_is_found_where_it_began(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        text = PLAN.replace(
            '{command: {do: "true", undo: "true"}}', "{playbook: {file: site.yml, undo: undo.yml}}"
        )
        rollout = await inside.start(text=text)
        both = Elsewhere(inside, tmp_path)
        await inside.transition(rollout, "p1", Trigger.ADMITTED)
        spec = inside.state.index.rollout(rollout).plan.isolate[0]
        action = Isolate(replace(spec, params={**spec.params, "file": "never.yml"}), 1)

        async def isolate(routed: RoutedRunners) -> object:
            isolators = {
                "playbook": PlaybookIsolator(replace(playbook_context(inside.run_host), runner=routed))
            }
            session = NodeSession(inside.state, AdapterSet(routed, isolators, {}, find_source), rollout, "p1")
            journal = StepJournal(session)
            await journal.load()
            return await Isolation(session, journal, OtherAttempts(session)).isolate(action)

        isolating = asyncio.create_task(isolate(both.runners))
        try:
            await wait_in_loop_until(lambda: both.shelf.has_work("p1"))
            isolating.cancel()
            # Meanwhile the settings give the node to this machine.
            inside.state.index.update_limits(replace(inside.state.index.limits, runners=(LOCAL_RULE,)))
            again = both.open()
            isolating = asyncio.create_task(isolate(again))
            (record,) = [each for each in await inside.state.store.load_steps(rollout, "p1") if each.handle]
            await loop_iterations(20)
            await again.cancel(record.handle)
            assert isinstance(await isolating, Failed)
            assert not inside.run_host.started_runs, "not begun again on this machine"
        finally:
            both.shelf.end_all()


async def test_check_mode_reports_runner_that_is_down(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.run_host.scripts = {"site.yml": Script.OK}
        both = Elsewhere(inside, tmp_path)
        plan = inside.state.index.rollout(await inside.start()).plan
        inside.state.index.record_runner_problems({"shelf": RunnerProblem("no answer", inside.clock.now())})
        both.shelf.set_reachable(False)
        check_mode = CheckMode(inside.state, both.runners)
        report = await check_mode.check("p1", SOURCE, plan)
        assert "shelf" in report.problem
        assert "no answer" in report.problem


async def test_check_mode_takes_half_of_each_runner(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.run_host.scripts = {"never.yml": Script.OK}
        both = Elsewhere(inside, tmp_path)
        (status,) = [each for name, each in both.runners.statuses.items() if name == "shelf"]
        status.parallel = 2
        check_mode, plan = (
            CheckMode(inside.state, both.runners),
            inside.state.index.rollout(await inside.start()).plan,
        )
        plan = replace(plan, stages=(replace(plan.stages[0], playbook="never.yml"),))
        checks = [asyncio.create_task(check_mode.check(node, SOURCE, plan)) for node in ("p1", "s1", "p2")]
        try:
            await checks[-1]  # that of this machine, which the two before do not delay
            assert len([*both.directory.glob("runs/*")]) == 1
        finally:
            for each in checks:
                each.cancel()
            await asyncio.wait(checks)
            both.shelf.end_all()


async def test_start_waits_for_runner_that_is_down(elsewhere: Elsewhere) -> None:
    both, state = elsewhere.runners, elsewhere.inside.state
    elsewhere.shelf.set_reachable(False)
    starting = asyncio.create_task(both.start(elsewhere.request("p1")))
    await wait_in_loop_until(lambda: "p1" in both.statuses["shelf"].waiting)
    assert state.index.runner_problems["shelf"].detail.endswith("down")
    elsewhere.shelf.set_reachable(True)
    elsewhere.inside.clock.advance(runners.RETRY_S[-1])
    handle = await starting
    assert both.statuses["shelf"].waiting == {}
    assert state.index.runner_problems == {}
    await until_over(both, handle)


async def test_silent_runner_is_waited_for_until_run_is_over(elsewhere: Elsewhere) -> None:
    both, clock = elsewhere.runners, elsewhere.inside.clock
    handle = await both.start(elsewhere.request("p1", playbook="never.yml"))
    elsewhere.shelf.set_reachable(False)
    asking = asyncio.create_task(both.get_state(handle))
    await wait_in_loop_until(lambda: "shelf" in elsewhere.inside.state.index.runner_problems)
    elsewhere.shelf.set_reachable(True)
    clock.advance(runners.RETRY_S[-1])
    assert (await asking).result is None
    elsewhere.shelf.set_reachable(False)
    asking = asyncio.create_task(both.get_state(handle))
    await asyncio.sleep(0)
    clock.advance(elsewhere.request("p1").timeout_s + runners.END_MARGIN_S + runners.RETRY_S[-1])
    assert isinstance((await asking).result, Unknown)


async def test_malformed_answer_is_waited_for(elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run may be under way: it has not failed, and is not begun again."""
    both, clock = elsewhere.runners, elsewhere.inside.clock
    handle = await both.start(elsewhere.request("p1", playbook="never.yml"))
    index = elsewhere.inside.state.index

    async def answer_anything(self: DirectoryRunner, *_: object) -> object:
        return {}["status"]

    with monkeypatch.context() as patched:
        for name in ("get_state", "start"):
            patched.setattr(DirectoryRunner, name, answer_anything)
        asking = [
            asyncio.create_task(each)
            for each in (both.get_state(handle), both.start(elsewhere.request("p1", handle)))
        ]
        await wait_in_loop_until(lambda: "shelf" in index.runner_problems)
        await loop_iterations(20)
        assert "unexpected answer (KeyError" in index.runner_problems["shelf"].detail
    clock.advance(runners.RETRY_S[-1])
    state, again = await asyncio.gather(*asking)
    assert (state.result, again) == (None, handle)


async def test_runner_that_answers_again_is_seen(elsewhere: Elsewhere) -> None:
    both, index = elsewhere.runners, elsewhere.inside.state.index
    elsewhere.shelf.set_reachable(False)
    watching = asyncio.create_task(both.watch())
    await wait_in_loop_until(lambda: "shelf" in index.runner_problems)
    elsewhere.shelf.set_reachable(True)
    await pass_time(elsewhere.inside, lambda: not index.runner_problems)
    watching.cancel()


class HungRunner(DirectoryRunner):
    """A runner that never says whether it is available."""

    async def check_available(self) -> None:
        await asyncio.Event().wait()


async def test_hung_runner_delays_no_news_of_others(
    elsewhere: Elsewhere, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = elsewhere.inside.state.index
    elsewhere.shelf.set_reachable(False)
    named = {"hung": HungRunner(tmp_path / "hung"), "shelf": elsewhere.shelf}
    local = FakeRunner(elsewhere.inside.run_host)
    both = RoutedRunners(elsewhere.inside.state, {**named, "local": local})
    watching = asyncio.create_task(both.watch())
    await asyncio.sleep(0)
    # A daemon that starts must isolate no node for a runner that may be down.
    assert {name: each.detail for name, each in index.runner_problems.items()} == {
        "hung": "not asked yet",
        "shelf": "not asked yet",
    }
    await wait_in_loop_until(lambda: index.runner_problems["shelf"].detail.endswith("down"))
    watching.cancel()
    monkeypatch.setattr(runners, "CHECK_S", 0.01)
    watching = asyncio.create_task(both.watch())
    await wait_in_loop_until(lambda: index.runner_problems["hung"].detail == "no answer in time")
    watching.cancel()


class IdentityRunner(DirectoryRunner):
    """A runner of changes that begins one only once its target has an identity."""

    async def start(self, request: RunRequest) -> str:
        if CLUSTER_ID not in request.host.connection:
            raise RunnerUnavailable("east: no identity yet", part="east")
        return await super().start(request)


async def test_waiting_change_gets_its_targets_identity(elsewhere: Elsewhere, tmp_path: Path) -> None:
    inside, kind = elsewhere.inside, "flux"
    await inside.commit(NodesDiscovered((Node("east", NodeKind.CLUSTER),)))
    both = RoutedRunners(inside.state, {kind: IdentityRunner(tmp_path / kind), "local": elsewhere.local()})
    request = replace(elsewhere.request("east"), kind=kind, host=inside.state.host("east"))
    starting = asyncio.create_task(both.start(request))
    await wait_in_loop_until(lambda: inside.state.index.runner_problems)
    await inside.commit(NodesDiscovered((Node("east", NodeKind.CLUSTER, identity={CLUSTER_ID: "u1"}),)))
    await pass_time(inside, starting.done)
    assert await starting


class UnavailableStore:
    """What a runner keeps of ended runs, while its system is away."""

    async def list_artifacts(self) -> Sequence[Artifact]:
        raise RunnerUnavailable("shelf: down")

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        raise RunnerUnavailable("shelf: down")


class RefusingStore(UnavailableStore):
    """One whose system answers 404, as a proxy before it does while it is away."""

    async def list_artifacts(self) -> Sequence[Artifact]:
        raise AdapterFailed("shelf: HTTP status 404")


class FullStore:
    async def list_artifacts(self) -> Sequence[Artifact]:
        return [Artifact("r1", 0.0)]

    async def remove(self, name: str, *, unmodified_since: float) -> bool:
        return True


@pytest.mark.parametrize("store", [UnavailableStore(), RefusingStore()])
async def test_runs_of_available_runners_are_listed(elsewhere: Elsewhere, store: UnavailableStore) -> None:
    local = FakeRunner(elsewhere.inside.run_host)
    local.artifacts = FullStore()  # type: ignore[attr-defined]
    elsewhere.shelf.artifacts = store  # type: ignore[attr-defined]
    both = RoutedRunners(elsewhere.inside.state, {"shelf": elsewhere.shelf, "local": local})
    assert [each.name for each in await both.artifacts.list_artifacts()] == ["r1"]
    assert not await both.artifacts.remove(both.handle_of("shelf", "r2"), unmodified_since=0.0)


async def test_observing_daemon_removes_nothing_elsewhere(elsewhere: Elsewhere) -> None:
    local, index = FakeRunner(elsewhere.inside.run_host), elsewhere.inside.state.index
    local.artifacts = elsewhere.shelf.artifacts = FullStore()  # type: ignore[attr-defined]
    both = RoutedRunners(elsewhere.inside.state, {"shelf": elsewhere.shelf, "local": local})
    there = both.handle_of("shelf", "r1")
    assert [each.name for each in await both.artifacts.list_artifacts()] == ["r1", there]
    assert await both.artifacts.remove(there, unmodified_since=0.0)
    index.update_limits(replace(index.limits, observe_only=True))
    assert [each.name for each in await both.artifacts.list_artifacts()] == ["r1"]
    assert not await both.artifacts.remove(there, unmodified_since=0.0)


async def test_stored_runs_of_all_runners_are_listed(elsewhere: Elsewhere) -> None:
    assert await elsewhere.runners.artifacts.list_artifacts() == []
    assert await elsewhere.runners.artifacts.remove("gone.00000000=r1", unmodified_since=0.0)


async def test_rollout_walks_over_two_runners(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        inside.run_host.scripts = {"site.yml": Script.OK}
        both = Elsewhere(inside, tmp_path)
        text = PLAN.replace("soak: 10m", ALL_CANARIES)
        rollout = await inside.start(text=text)
        index = inside.state.index
        both.shelf.set_reachable(False)
        watching = asyncio.create_task(both.runners.watch())
        await wait_in_loop_until(lambda: index.runner_problems)
        async with running(daemon_of(inside, both.adapters(tmp_path))):
            await pass_time(inside, lambda: index.target(rollout, "p2").outcome is Outcome.CHANGED)
            now = inside.clock.now()
            assert reason_of(index, rollout, "p1", now).code is ReasonCode.RUNNER_DOWN
            both.shelf.set_reachable(True)
            await pass_time(inside, lambda: index.all_done(rollout))
        watching.cancel()
        assert {each.outcome for each in index.targets(rollout)} == {Outcome.CHANGED}
        elsewhere = {node for node in ("p1", "p2", "s1", "s2") if both.shelf.begun(node)}
        assert elsewhere == {"p1", "s1"}
        assert [len(both.shelf.begun(node)) for node in sorted(elsewhere)] == [1, 1]


async def pass_time(inside: ControlEnvironment, condition: Callable[[], object]) -> None:
    """Let the processes work and the clock go on until the condition holds."""
    async with asyncio.timeout(60.0):
        while not condition():
            await asyncio.sleep(0.005)
            inside.clock.advance(0.5)
