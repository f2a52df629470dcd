"""Prepare stages over nodes in memory: disturbances, checkpoints, and retries where they stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from machines.facts.node_work import NodeWork, WorkKind
from machines.facts.preparations import BUILD_NODE
from machines.model.decision import Prepare
from machines.model.events import NodesRemoved, PreparationRecorded
from machines.model.preparation import PreparationState
from machines.model.rollout import FailureCode
from machines.scheduler.decide import decide
from machines.states import Phase
from rolloutd.control.client import ApiError
from rolloutd.engine.drivers.node_session import AdapterSet
from rolloutd.engine.notifications import NotificationDispatcher
from rolloutd.engine.runners import FOLLOW_RETRY_S, FOLLOW_TRIES, follow_with_retries
from rolloutd.ports import Failed, PinnedSource
from tests.contracts.fakes.notifier import FakeNotifier
from tests.contracts.fakes.runner import FakeRunner
from tests.rolloutd.control_environment import NODES, control_environment
from tests.rolloutd.decided_jobs import carry_out
from tests.rolloutd.preparation_environment import Fleet, plan_with, prepare_all

STAGES = ("one", "two", "three", "four")


async def test_node_that_is_being_cleaned_is_not_prepared(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with("install"))
        wanted = decide(inside.state.index, inside.clock.now()).of(Prepare)
        assert wanted
        for each in wanted:
            inside.state.index.record_work(NodeWork(WorkKind.CLEANING, each.node))

        async def no_source(rollout: str) -> PinnedSource:
            raise AssertionError(f"a stage of {rollout} has begun")

        adapters = AdapterSet(FakeRunner(inside.run_host), {}, {}, no_source)
        await carry_out(inside.state, adapters, wanted)
        assert not await inside.state.store.load_preparations(rollout)


@pytest.mark.parametrize(
    ("disturb", "difference"),
    [
        ({"unit/app.service": "pid 9"}, "unit/app.service: pid 7 -> pid 9"),
        ({"port/tcp/8080": "0.0.0.0"}, "port/tcp/8080: absent -> 0.0.0.0"),
        ({"sysctl/net.core.somaxconn": "512"}, "sysctl/net.core.somaxconn: 128 -> 512"),
        ({"boot-id": "b2", "unit/app.service": "pid 9"}, "boot-id: b1 -> b2"),
    ],
    ids=["restart", "port", "sysctl", "reboot"],
)
async def test_disturbing_install_is_caught_on_first_canary(
    tmp_path: Path, disturb: Mapping[str, str], difference: str
) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with("install"))
        fleet = Fleet(disturb=disturb)
        await prepare_all(inside, fleet)
        assert fleet.runs == ["p1.install.1"]
        target = inside.state.index.target(rollout, "p1")
        assert target.phase is Phase.FAILED
        assert target.failure is not None
        assert (target.failure.code, target.failure.message) == (FailureCode.PREPARE_DISTURBED, difference)
        # The retry of the node resolves nothing: people look, and vote to proceed.
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/retry", {"reason": "mended"})
        await prepare_all(inside, fleet)
        assert fleet.runs == ["p1.install.1"]
        fleet.disturb = {}
        await inside.vote("olga", rollout, "proceed")
        await prepare_all(inside, fleet)
        assert fleet.runs[:2] == ["p1.install.1", "p1.install.2"]
        assert sorted(fleet.runs[2:]) == ["p2.install.1", "s1.install.1", "s2.install.1"]


async def test_disturbance_and_failed_stage_are_notified_once(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        people = FakeNotifier()
        dispatcher = NotificationDispatcher(inside.state, [people], ["disturbed", "prepare-failed"])
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(dispatcher.run())
            disturbed = await inside.start(text=plan_with("one"))
            await prepare_all(inside, Fleet(disturb={"boot-id": "b2"}))
            failed = await inside.start(text=plan_with("one").replace("name: sysctl", "name: other"))
            await prepare_all(inside, Fleet(cut={"one"}))
            for _ in range(5):
                inside.clock.advance(10.0)
                for _ in range(200):
                    await asyncio.sleep(0)
            task.cancel()
        text = "\n".join(f"{title}\n{text}" for title, text in people.sent)
        assert text.count(f"p1 was disturbed in service by {disturbed}\nprepare.one: boot-id: b1 -> b2") == 1
        assert text.count(f"the preparation of {failed} has stopped\nprepare stage one failed on") == 1
        assert "failed in" not in text


async def test_retry_after_cut_connection_starts_at_third_stage(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with(*STAGES))
        fleet = Fleet(cut={"three"})
        await prepare_all(inside, fleet)
        assert "p1.three.1" in fleet.runs
        assert "p1.four.1" not in fleet.runs
        row = inside.state.index.preparation(rollout, "p1", "three")
        assert row is not None
        assert row.state is PreparationState.FAILED
        fleet.cut, fleet.runs = set(), []
        inside.clock.advance(60.0)
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/retry", {"reason": "link"})
        await prepare_all(inside, fleet)
        assert [run for run in fleet.runs if run.startswith("p1.")] == ["p1.three.2", "p1.four.1"]


async def test_same_content_starts_no_run_and_forced_stage_exactly_one(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        fleet = Fleet()
        await inside.start(text=plan_with("one", "two"))
        await prepare_all(inside, fleet)
        assert len(fleet.runs) == 8
        fleet.runs.clear()
        again = await inside.start(text=plan_with("one", "two"), again=True)
        await prepare_all(inside, fleet)
        assert fleet.runs == []
        rows = await inside.state.store.load_preparations(again)
        assert {row.state for row in rows} == {PreparationState.SKIPPED}
        await inside.start(text=plan_with("one", "two"), supersede=True, force_stages=["two"])
        await prepare_all(inside, fleet)
        assert sorted(fleet.runs) == [f"{node}.two.1" for node in ("p1", "p2", "s1", "s2")]


async def test_stage_forced_on_one_node_runs_only_there(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        fleet = Fleet()
        await inside.start(text=plan_with("one", "two"))
        await prepare_all(inside, fleet)
        fleet.runs.clear()
        more = {"supersede": True, "force_stages": ["two"]}
        with pytest.raises(ApiError) as refused:
            await inside.submit(text=plan_with("one", "two"), **more, force_nodes=["p1", "p9"])
        assert refused.value.body["errors"][0]["found"] == "p9"
        rollout = await inside.start(text=plan_with("one", "two"), **more, force_nodes=["s2"])
        await prepare_all(inside, fleet)
        assert fleet.runs == ["s2.two.1"]
        shown = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        assert shown["forced_stages"] == [{"stage": "two", "nodes": ["s2"]}]
        listed = (await inside.request("nora", "get", f"/v1/rollouts/{rollout}/prepare"))["preparations"]
        assert [(each["node"], each["stage"]) for each in listed if each["forced"]] == [("s2", "two")]


async def test_cancelled_rollout_removes_what_it_brought(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        fleet = Fleet()
        rollout = await inside.start(text=plan_with("one"))
        await prepare_all(inside, fleet)
        assert all(fleet.facts[node] for node in ("p1", "p2", "s1", "s2"))
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "wrong"})
        await prepare_all(inside, fleet)
        assert not any(fleet.facts.values())


async def test_disturbance_is_found_after_two_tries_without_answer(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with("install"))
        # The snapshot after the first try and the one before the second get no answer.
        fleet = Fleet(disturb={"boot-id": "b2"}, silent=2)
        for _ in range(3):
            await prepare_all(inside, fleet)
            inside.clock.advance(600.0)
            inside.observe_all_up()
        assert fleet.runs == ["p1.install.1"]
        failure = inside.state.index.target(rollout, "p1").failure
        assert failure is not None
        assert failure.message == "boot-id: b1 -> b2"


async def test_retry_keeps_snapshot_and_ends_lost_run(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with("install"))
        fleet = Fleet(silent=1)
        await prepare_all(inside, fleet)
        row = inside.state.index.preparation(rollout, "p1", "install")
        assert row is not None
        await inside.commit(PreparationRecorded(replace(row, handle="run-1")))
        fleet.state["p1"]["boot-id"] = "b2"
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/retry", {"reason": "link"})
        await prepare_all(inside, fleet)
        assert fleet.cleaned == ["p1"]
        assert fleet.runs == ["p1.install.1"]
        assert inside.state.index.target(rollout, "p1").phase is Phase.FAILED


async def test_rest_of_cancelled_run_is_cleaned_before_comparison(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with("install"))
        fleet = Fleet(result=Failed("cancelled", code=FailureCode.INTERFERENCE))
        await prepare_all(inside, fleet)
        row = inside.state.index.preparation(rollout, "p1", "install")
        assert row is not None
        assert (row.state, bool(row.handle)) == (PreparationState.FAILED, True)
        fleet.result, fleet.state["p1"]["boot-id"] = None, "b2"  # by what was left of the run
        inside.clock.advance(600.0)
        inside.observe_all_up()
        await prepare_all(inside, fleet)
        assert fleet.cleaned == ["p1"]
        assert fleet.runs == ["p1.install.1"]
        assert inside.state.index.target(rollout, "p1").phase is Phase.FAILED


async def test_node_that_leaves_during_clean_up_ends_its_stage(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with("install"))
        fleet = Fleet(result=Failed("cancelled", code=FailureCode.INTERFERENCE))
        await prepare_all(inside, fleet)
        inside.clock.advance(600.0)
        inside.observe_all_up()
        fleet.during_clean_up = lambda: inside.commit(NodesRemoved(("p1",)))
        await prepare_all(inside, fleet)
        row = inside.state.index.preparation(rollout, "p1", "install")
        assert row is not None
        assert "p1.install.2" not in fleet.runs
        assert row.state is PreparationState.FAILED
        assert row.text == "the rollout was closed, or the node left, before the stage ended"


@pytest.mark.parametrize("is_superseded", [False, True], ids=["cancelled", "superseded"])
async def test_stage_of_rollout_closed_meanwhile_begins_not(tmp_path: Path, *, is_superseded: bool) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        rollout = await inside.start(text=plan_with("install"))
        fleet = Fleet(result=Failed("cancelled", code=FailureCode.INTERFERENCE))
        await prepare_all(inside, fleet)
        inside.clock.advance(600.0)
        inside.observe_all_up()

        async def close() -> None:
            fleet.result, fleet.during_clean_up = None, None
            if is_superseded:
                await inside.start(text=plan_with("other"), supersede=True)
            else:
                await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "wrong"})

        fleet.during_clean_up = close
        await prepare_all(inside, fleet)
        row = inside.state.index.preparation(rollout, "p1", "install")
        assert row is not None
        assert "p1.install.2" not in fleet.runs
        assert (row.attempt, row.state) == (2, PreparationState.FAILED)


async def test_run_that_could_not_be_followed_is_found_again(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with("install"))
        fleet = Fleet(faults=FOLLOW_TRIES - 1)
        async with asyncio.TaskGroup() as tasks:
            preparing = tasks.create_task(prepare_all(inside, fleet))
            while not preparing.done():
                if inside.clock.sleepers:
                    inside.clock.advance(FOLLOW_RETRY_S)
                await asyncio.sleep(0)
        row = inside.state.index.preparation(rollout, "p1", "install")
        assert row is not None
        assert (row.state, row.attempt) == (PreparationState.DONE, 1)
        assert not fleet.cleaned


async def test_last_try_to_follow_gives_its_fault_at_once() -> None:
    tries = pauses = 0

    async def follow() -> Failed:
        nonlocal tries
        tries += 1
        return Failed(f"try {tries}: no memory left")

    async def may_follow_again() -> bool:
        nonlocal pauses
        pauses += 1
        return pauses < FOLLOW_TRIES  # the rollout is closed in a pause after the last try

    outcome = await follow_with_retries(follow, may_follow_again)
    assert outcome == Failed(f"try {FOLLOW_TRIES}: no memory left")
    assert pauses == FOLLOW_TRIES - 1


@pytest.mark.parametrize("stage", ["build", "install"])
async def test_error_of_stage_fails_it_and_ends_no_daemon(tmp_path: Path, stage: str) -> None:
    async with control_environment(tmp_path) as inside:
        text = plan_with("install").replace("{install: {name: install,", f"{{{stage}: {{name: {stage},")
        rollout = await inside.start(text=text)
        await prepare_all(inside, Fleet(), tree_failure="the source is gone; submit the plan again")
        row = inside.state.index.preparation(rollout, BUILD_NODE if stage == "build" else "p1", stage)
        assert row is not None
        assert (row.state, row.attempt) == (PreparationState.FAILED, 1)
        assert row.text == "the source is gone; submit the plan again"
