"""Staged files that changed on a node are staged again there, before its slot and before an install."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from machines.model.decision import Admit, CompareStaged
from machines.model.events import NodesRemoved
from machines.model.preparation import COMPARISON_RETRY_S, Preparation, PreparationState
from machines.scheduler.decide import decide
from machines.states import Phase
from tests.rolloutd.control_environment import NODES, ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import carry_out
from tests.rolloutd.engine.test_prepared_artifacts import TWO_STAGES, roll_out, write_artifacts
from tests.rolloutd.preparation_environment import Fleet, plan_with, prepare_all, preparing_adapters

STAGE_THEN_INSTALL = plan_with().replace(
    "prepare: []", "prepare: [{stage: {manifest: a.yml}}, {install: {playbook: site.yml}}]"
)


def damage(fleet: Fleet, node: str, stage: str) -> str:
    """Truncate the staged file of a stage on a node, and return its path."""
    (path,) = (path for name, path in fleet.stager.files if name == node and f"/{stage}-" in path)
    fleet.stager.files[node, path] = b""
    return path


def row_of(inside: ControlEnvironment, rollout: str, node: str, stage: str) -> Preparation:
    row = inside.state.index.preparation(rollout, node, stage)
    assert row is not None
    return row


def admitted(inside: ControlEnvironment) -> list[str]:
    return [each.node for each in decide(inside.state.index, inside.clock.now()).of(Admit)]


async def test_truncated_file_is_staged_again_on_its_node_alone(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=TWO_STAGES)
        await prepare_all(inside, fleet)
        assert admitted(inside) == ["p1"]  # the canary
        whole = dict(fleet.stager.files)
        path = damage(fleet, "p1", "a")
        inside.clock.advance(600.0)
        inside.observe_all_up()
        assert admitted(inside) == []
        await prepare_all(inside, fleet)
        assert fleet.stager.files == whole
        assert admitted(inside) == ["p1"]
        row = row_of(inside, rollout, "p1", "app")
        text = f"a 1: {path} has 0 bytes, not 3; staged again"
        assert (row.state, row.attempt, row.bytes, row.text) == (PreparationState.DONE, 2, 3, text)
        others = [
            ("p1", "conf"),
            *((node, stage) for node in ("p2", "s1", "s2") for stage in ("app", "conf")),
        ]
        assert {row_of(inside, rollout, *each).attempt for each in others} == {1}
        shown = (await inside.request("nora", "get", f"/v1/rollouts/{rollout}/prepare"))["preparations"]
        assert text in {each["text"] for each in shown}


async def test_damaged_file_of_same_content_is_not_skipped(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        await roll_out(inside, fleet)
        whole = dict(fleet.stager.files)
        damage(fleet, "p1", "a")
        again = await inside.start(text=TWO_STAGES, again=True)
        await prepare_all(inside, fleet)
        assert fleet.stager.files == whole
        states = {stage: row_of(inside, again, "p1", stage) for stage in ("app", "conf")}
        assert states["app"].state is PreparationState.DONE
        assert "has 0 bytes, not 3" in states["app"].text
        assert states["conf"].state is PreparationState.SKIPPED


async def test_install_reads_no_damaged_file(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=STAGE_THEN_INSTALL)
        stage_files = fleet.stager.stage

        async def stage_and_damage(*args: object, **kwargs: object) -> object:
            result = await stage_files(*args, **kwargs)  # type: ignore[arg-type]
            if not fleet.stager.comparisons:
                damage(fleet, "p1", "a")
            return result

        fleet.stager.stage = stage_and_damage  # type: ignore[assignment,method-assign]
        await prepare_all(inside, fleet)
        assert fleet.runs == ["p1.install.1"]
        assert all(fleet.stager.files.values())
        assert row_of(inside, rollout, "p1", "stage").attempt == 2
        assert admitted(inside) == ["p1"]


@pytest.mark.parametrize(("moment", "attempt"), [("before_start", 2), ("after_start", 1)])
async def test_resumed_install_compares_unless_its_run_began(
    tmp_path: Path, moment: str, attempt: int
) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=STAGE_THEN_INSTALL)

        def kill_daemon() -> None:
            setattr(fleet, moment, lambda: None)
            damage(fleet, "p1", "a")
            raise asyncio.CancelledError

        setattr(fleet, moment, kill_daemon)
        await prepare_all(inside, fleet)
        # A run that began before the damage has read whole files.
        assert [run.request.attempt for run in inside.run_host.runs.values()] == [attempt]
        assert row_of(inside, rollout, "p1", "install").attempt == attempt
        assert row_of(inside, rollout, "p1", "stage").attempt == 2
        assert all(fleet.stager.files.values())
        assert admitted(inside) == ["p1"]


async def test_node_without_answer_fails_nothing(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=TWO_STAGES)
        await prepare_all(inside, fleet)
        inside.clock.advance(600.0)
        inside.observe_all_up()
        fleet.stager.down = {"p1"}
        await prepare_all(inside, fleet)
        assert admitted(inside) == []
        target = inside.state.index.target(rollout, "p1")
        assert (target.phase, target.attempt, target.failure) == (Phase.PENDING, 0, None)
        assert row_of(inside, rollout, "p1", "app").state is PreparationState.DONE
        reason = (await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes/p1"))["reason"]
        assert (reason["code"], reason["text"]) == (
            "staged-unknown",
            "the staged files on p1 cannot be compared: p1: no answer",
        )
        fleet.stager.down = set()
        inside.clock.advance(COMPARISON_RETRY_S)
        inside.observe_all_up()
        await prepare_all(inside, fleet)
        assert admitted(inside) == ["p1"]


async def test_file_that_changes_again_and_again_is_staged_with_pauses(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=TWO_STAGES)
        for attempt in (1, 2):
            inside.clock.advance(600.0)
            inside.observe_all_up()
            await prepare_all(inside, fleet)
            assert row_of(inside, rollout, "p1", "app").attempt == attempt
            damage(fleet, "p1", "a")
        inside.clock.advance(600.0)
        inside.observe_all_up()
        await prepare_all(inside, fleet)
        row = row_of(inside, rollout, "p1", "app")
        assert row.state is PreparationState.WAITING
        assert row.not_before > inside.clock.now()


@pytest.mark.parametrize("obstacle", ["cancelled", "gone"])
async def test_difference_of_rollout_that_is_over_is_ignored(tmp_path: Path, obstacle: str) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=TWO_STAGES)
        await prepare_all(inside, fleet)
        damage(fleet, "p1", "a")
        inside.clock.advance(600.0)
        inside.observe_all_up()
        wanted = decide(inside.state.index, inside.clock.now()).of(CompareStaged)
        assert wanted
        compare = fleet.stager.compare

        async def compare_late(*args: object, **kwargs: object) -> object:
            found = await compare(*args, **kwargs)  # type: ignore[arg-type]
            assert found
            if obstacle == "cancelled":
                path = f"/v1/rollouts/{rollout}/cancel"
                await inside.request("olga", "post", path, {"reason": "wrong"})
            else:
                await inside.commit(NodesRemoved(("p1",)))
            return found

        fleet.stager.compare = compare_late  # type: ignore[assignment,method-assign]
        await carry_out(inside.state, preparing_adapters(inside, fleet), wanted)
        assert row_of(inside, rollout, "p1", "app").state is PreparationState.DONE


async def test_playbook_that_stages_is_given_the_artifacts(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        stage = "{stage: {manifest: a.yml, method: playbook, playbook: site.yml, vars: {mine: 1}}}"
        await inside.start(text=plan_with().replace("prepare: []", f"prepare: [{stage}]"))
        await prepare_all(inside, fleet)
        (run,) = inside.run_host.runs.values()
        (artifact,) = run.request.variables["rolloutd_artifacts"]
        digest = artifact["sha256"]
        assert run.request.variables["mine"] == 1
        assert (artifact["name"], artifact["version"], artifact["size"]) == ("a", "1", 3)
        assert artifact["src"] == f"{tmp_path}/a-1"
        assert artifact["path"] == f"/var/cache/rolloutd/{digest}/a-1"
        assert admitted(inside) == ["p1"]
