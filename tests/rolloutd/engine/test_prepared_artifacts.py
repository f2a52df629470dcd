"""Builds and staged artifacts over nodes in memory: what is made, kept and removed."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines.facts.preparations import BUILD_NODE
from machines.model.decision import Prepare
from machines.model.events import DriftRecorded, PreparationRecorded, RolloutEnded
from machines.model.preparation import CLEANUP, Preparation, PreparationState, StagedComparison
from machines.model.rollout import FailureCode
from machines.scheduler.decide import decide
from machines.scheduler.stage_admission import may_begin
from machines.states import Trigger
from rolloutd.control.client import ApiError
from rolloutd.ports import Checkpoint, Failed, Host
from tests.contracts.fakes.runner import Script
from tests.rolloutd.control_environment import NODES, PLAN, URL, ControlEnvironment, control_environment
from tests.rolloutd.decided_jobs import carry_out
from tests.rolloutd.preparation_environment import Fleet, plan_with, prepare_all, preparing_adapters

BUILDING = (
    plan_with("build").replace("{install: {", "{build: {").replace("site.yml}}]", "site.yml}}, {stage: {}}]")
)
PLAYBOOK_CLEANS = plan_with().replace(
    "prepare: []",
    "prepare: {stages: [{install: {name: one, playbook: site.yml}}], cleanup: {playbook: undo.yml}}",
)
BUILT = b"built"
BUILT_DIGEST = hashlib.sha256(BUILT).hexdigest()
MANIFEST = f'artifacts: [{{name: app, version: "1", path: app, size: 5, sha256: "{BUILT_DIGEST}"}}]\n'


@pytest.mark.parametrize(
    ("manifest", "problem"),
    [
        (None, "artifacts.yml: the build has not written it; write it to rolloutd_manifest"),
        (MANIFEST[:-20], "artifacts.yml:1"),
        (MANIFEST.replace("path: app", "path: ../app"), "this path leaves the manifest's directory"),
    ],
    ids=["none", "truncated", "outside"],
)
async def test_build_without_valid_manifest_fails(tmp_path: Path, manifest: str | None, problem: str) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=BUILDING)
        fleet = Fleet(build=lambda path: write_text(path, manifest))
        await prepare_all(inside, fleet)
        row = inside.state.index.preparation(rollout, BUILD_NODE, "build")
        assert row is not None
        assert row.state is PreparationState.FAILED
        assert problem in row.text
        assert not fleet.stager.files
        assert await paused_reason(inside, rollout) == "prepare-failed"


async def test_lost_build_is_ended_on_its_host(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=BUILDING.replace("{build: {", "{build: {host: p1, "))
        fleet = Fleet(build=write_built)
        inside.run_host.scripts["site.yml"] = Script.FAIL
        await prepare_all(inside, fleet)
        row = inside.state.index.preparation(rollout, BUILD_NODE, "build")
        assert row is not None
        await inside.commit(PreparationRecorded(replace(row, handle="lost")))
        assert fleet.cleaned == []
        await inside.start(text=plan_with("install").replace("name: sysctl", "name: other"))
        await prepare_all(inside, fleet)  # before the build is tried again
        assert fleet.cleaned == ["p1"]
        inside.clock.advance(600.0)
        await prepare_all(inside, fleet)
        assert fleet.cleaned == ["p1", "p1"]


async def test_manifest_of_earlier_try_is_not_taken(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=BUILDING)
        fleet = Fleet(build=write_built)
        inside.run_host.scripts["site.yml"] = Script.FAIL
        await prepare_all(inside, fleet)
        inside.run_host.scripts["site.yml"] = Script.OK
        fleet.build = lambda path: None
        reason = (await inside.request("nora", "get", f"/v1/rollouts/{rollout}"))["reason"]
        assert reason["lifted_by"] == f"rolloutctl retry {rollout} --reason ..., or time"
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/retry", {"reason": "disk"})
        await prepare_all(inside, fleet)
        row = inside.state.index.preparation(rollout, BUILD_NODE, "build")
        assert row is not None
        assert (row.attempt, row.state) == (2, PreparationState.FAILED)
        fleet.build = write_built
        inside.clock.advance(600.0)
        inside.observe_all_up()
        await prepare_all(inside, fleet)
        assert {name for name, _ in fleet.stager.files} == {"p1", "p2", "s1", "s2"}
        with pytest.raises(ApiError) as refused:
            await inside.request("olga", "post", f"/v1/rollouts/{rollout}/retry", {"reason": "disk"})
        assert refused.value.body["code"] == "not-failed"


def write_text(path: Path, text: str | None) -> None:
    if text is not None:
        path.write_text(text)


def write_built(manifest: Path) -> None:
    manifest.write_text(MANIFEST)
    manifest.with_name("app").write_bytes(BUILT)


async def paused_reason(inside: ControlEnvironment, rollout: str) -> str:
    status = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
    return str(status["reason"]["code"])


async def test_template_without_label_is_refused_at_submit(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        digest = hashlib.sha256(b"app").hexdigest()
        artifact = f"{{name: app, version: '1', path: app, sha256: {digest}, size: 3}}"
        files = {"site.yml": "- hosts: all\n", "undo.yml": "- hosts: all\n", "app": "app"}
        inside.sources.commit(URL, {**files, "artifacts.yml": f"artifacts: [{artifact}]\n"}, ["main"])
        stage = "{stage: {to: '/srv/{{ node.labels.%s }}'}}"
        text = PLAN.replace("  soak:", f"  prepare: [{stage}]\n  soak:")
        with pytest.raises(ApiError) as refused:
            await inside.submit(text=text % "site")
        errors = str(refused.value.body["errors"])
        assert "spec.prepare[0].stage.to" in errors
        assert "for node p1" in errors
        await inside.submit(text=text % "rack")


async def test_builds_of_two_rollouts_run_at_once(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        text = plan_with("one").replace("{install: {", "{build: {")
        rollouts = [
            await inside.start(text=text.replace("sysctl", name)) for name in ("sysctl", "netsettings")
        ]
        now = inside.clock.now()
        running = Preparation(rollouts[0], BUILD_NODE, "one", 1, PreparationState.RUNNING, "", now, now)
        await inside.commit(PreparationRecorded(running))
        assert may_begin(inside.state.index, rollouts[1], BUILD_NODE, "one", now)


TWO_STAGES = plan_with().replace(
    "prepare: []", "prepare: [{stage: {name: app, manifest: a.yml}}, {stage: {name: conf, manifest: b.yml}}]"
)


def write_artifacts(inside: ControlEnvironment, fleet: Fleet, version: str) -> set[str]:
    """Make version so-and-so of the two manifests the newest; return the digests of the artifacts."""
    texts = {"site.yml": "- hosts: all\n", "undo.yml": "- hosts: all\n"}
    digests = set()
    for name in "ab":
        content = f"{name} {version}".encode()
        digest, file = hashlib.sha256(content).hexdigest(), f"{name}-{version}"
        (fleet.tree / file).write_bytes(content)
        texts[file] = content.decode()
        entry = f'{{name: {name}, version: "1", path: {file}, sha256: "{digest}", size: {len(content)}}}'
        texts[f"{name}.yml"] = f"artifacts:\n  - {entry}\n"
        digests.add(digest)
    inside.sources.commit(URL, texts, ["main"])
    return digests


def staged(fleet: Fleet, node: str = "p1") -> set[str]:
    return {path.split("/")[-2] for name, path in fleet.stager.files if name == node}


async def roll_out(inside: ControlEnvironment, fleet: Fleet, **more: Any) -> str:
    """Prepare and finish a rollout of the newest artifacts; return its id."""
    rollout = await inside.start(text=TWO_STAGES, **more)
    await prepare_all(inside, fleet)
    # A node that may be current is checked first, which nothing here does.
    inside.state.index.record_comparison(StagedComparison(rollout, "p1", inside.clock.now()))
    await inside.finish(rollout, "p1")
    await inside.commit(RolloutEnded(rollout, inside.clock.now()))
    return rollout


async def cancel(inside: ControlEnvironment, fleet: Fleet, rollout: str) -> None:
    await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "wrong"})
    await prepare_all(inside, fleet)


async def test_rollback_fetches_nothing_and_third_generation_is_removed(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        first = write_artifacts(inside, fleet, "1")
        await roll_out(inside, fleet)
        second = write_artifacts(inside, fleet, "2")
        await roll_out(inside, fleet)
        assert staged(fleet) == first | second
        write_artifacts(inside, fleet, "1")
        back = await roll_out(inside, fleet, again=True)
        rows = await inside.state.store.load_preparations(back)
        assert sum(row.bytes for row in rows) == 0
        third = write_artifacts(inside, fleet, "3")
        await roll_out(inside, fleet)
        assert staged(fleet) == first | third


async def test_stage_whose_checkpoint_lost_its_answer_is_done(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=TWO_STAGES)
        write = fleet.write

        async def write_and_lose(host: Host, checkpoint: Checkpoint, *, timeout_s: float) -> None:
            await write(host, checkpoint, timeout_s=timeout_s)
            fleet.write = write  # type: ignore[method-assign]
            raise TimeoutError("no answer")

        fleet.write = write_and_lose  # type: ignore[method-assign]
        await prepare_all(inside, fleet)
        inside.clock.advance(600.0)
        inside.observe_all_up()
        await prepare_all(inside, fleet)
        row = inside.state.index.preparation(rollout, "p1", "app")
        assert row is not None
        # Skipped, it would not be removed with its rollout, and cleaning would take it for an old one's.
        assert (row.attempt, row.state) == (2, PreparationState.DONE)


@pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
async def test_generation_that_was_only_staged_replaces_none(tmp_path: Path, restarted: bool) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        first = write_artifacts(inside, fleet, "1")
        await roll_out(inside, fleet)
        write_artifacts(inside, fleet, "2")
        await inside.start(text=TWO_STAGES)
        await prepare_all(inside, fleet)
        third = write_artifacts(inside, fleet, "3")
        await inside.start(text=TWO_STAGES, supersede=True)
        if restarted:  # the daemon does not load the rollout that only staged its artifacts
            await inside.restart()
            inside.observe_all_up()
        await prepare_all(inside, fleet)
        assert first | third <= staged(fleet)


async def test_drifted_node_that_waits_again_keeps_what_it_runs(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        await roll_out(inside, fleet)
        second = write_artifacts(inside, fleet, "2")
        rollout = await inside.start(text=TWO_STAGES.replace("  maintain:", "  keep: true\n  maintain:"))
        await prepare_all(inside, fleet)
        await inside.finish(rollout, "p1")
        await inside.commit(DriftRecorded(rollout, "p1", inside.clock.now(), ("set the limit",)))
        await inside.transition(rollout, "p1", Trigger.DRIFTED)
        third = write_artifacts(inside, fleet, "3")
        await inside.start(text=TWO_STAGES, supersede=True)
        await prepare_all(inside, fleet)
        assert second | third <= staged(fleet)


async def test_cancelled_rollout_leaves_artifacts_of_drifted_node(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        brought = write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=TWO_STAGES.replace("  maintain:", "  keep: true\n  maintain:"))
        await prepare_all(inside, fleet)
        await inside.finish(rollout, "p1")
        await inside.commit(DriftRecorded(rollout, "p1", inside.clock.now(), ("set the limit",)))
        await inside.transition(rollout, "p1", Trigger.DRIFTED)
        await cancel(inside, fleet, rollout)
        assert staged(fleet) == brought
        rows = (await inside.request("nora", "get", f"/v1/rollouts/{rollout}/prepare"))["preparations"]
        assert "the node has its change" in next(row["text"] for row in rows if row["stage"] == "cleanup")


async def test_cancelled_rollout_leaves_artifacts_that_nodes_run(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        first = write_artifacts(inside, fleet, "1")
        await roll_out(inside, fleet)
        for version in ("2", "3"):
            inside.clock.advance(1.0)
            brought = write_artifacts(inside, fleet, version)
            rollout = await inside.start(text=TWO_STAGES)
            await prepare_all(inside, fleet)
            assert staged(fleet) == first | brought
            await cancel(inside, fleet, rollout)
            assert staged(fleet) == first


async def test_restaged_artifacts_outlive_cancelled_rollout(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        first = write_artifacts(inside, fleet, "1")
        await roll_out(inside, fleet)
        second = write_artifacts(inside, fleet, "2")
        await roll_out(inside, fleet)
        lost = next(key for key in fleet.stager.files if key[1].split("/")[-2] in second)
        fleet.stager.files.pop(lost)
        await inside.restart()  # the daemon does not load rollouts that have ended
        inside.observe_all_up()
        rollout = await inside.start(text=TWO_STAGES, again=True)
        await prepare_all(inside, fleet)
        assert lost in fleet.stager.files
        await cancel(inside, fleet, rollout)
        assert staged(fleet) == first | second


async def test_cleanup_playbook_runs_on_nodes_without_the_change(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        fleet, rollout = Fleet(), await inside.start(text=PLAYBOOK_CLEANS)
        await prepare_all(inside, fleet)
        await inside.finish(rollout, "p1")
        fleet.runs.clear()
        inside.run_host.scripts["undo.yml"] = Script.FAIL
        await cancel(inside, fleet, rollout)
        assert sorted(fleet.runs) == [f"{node}.cleanup.1" for node in ("p2", "s1", "s2")]
        fleet.runs.clear()
        inside.run_host.scripts["undo.yml"] = Script.OK
        for _ in range(2):
            inside.clock.advance(600.0)
            await prepare_all(inside, fleet)
        assert sorted(fleet.runs) == [f"{node}.cleanup.2" for node in ("p2", "s1", "s2")]
        rows = (await inside.request("nora", "get", f"/v1/rollouts/{rollout}/prepare"))["preparations"]
        cleaned = {row["node"]: row["state"] for row in rows if row["stage"] == "cleanup"}
        assert cleaned == dict.fromkeys(("p2", "s1", "s2"), "done")


async def test_restarted_daemon_finds_cleanup_that_runs(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet, rollout = Fleet(), await inside.start(text=PLAYBOOK_CLEANS)
        await prepare_all(inside, fleet)
        fleet.runs.clear()
        inside.run_host.scripts["undo.yml"] = Script.OK

        def kill_daemon() -> None:
            fleet.after_start = lambda: None
            raise asyncio.CancelledError

        fleet.after_start = kill_daemon
        await cancel(inside, fleet, rollout)
        assert fleet.cleaned == []
        row = inside.state.index.preparation(rollout, "p1", CLEANUP)
        assert row is not None
        assert (row.attempt, row.state) == (1, PreparationState.DONE)


async def test_artifacts_of_cancelled_rollout_stay_for_a_later_one_that_ended(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        brought = write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=TWO_STAGES)
        await prepare_all(inside, fleet)
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "wrong"})
        await roll_out(inside, fleet, again=True)
        await prepare_all(inside, fleet)
        assert staged(fleet) == brought
        await inside.restart()
        await prepare_all(inside, fleet)
        assert staged(fleet) == brought


async def test_cleanup_begins_not_after_a_later_submit(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=TWO_STAGES)
        await prepare_all(inside, fleet)
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "wrong"})
        decided = decide(inside.state.index, inside.clock.now()).of(Prepare)
        assert [each.stage for each in decided] == [CLEANUP]
        await inside.submit(text=TWO_STAGES, again=True)
        await carry_out(inside.state, preparing_adapters(inside, fleet), decided)
        assert inside.state.index.preparation(rollout, "p1", CLEANUP) is None


async def test_repeated_cleanup_begins_not_after_later_submit(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet, rollout = Fleet(), await inside.start(text=PLAYBOOK_CLEANS)
        await prepare_all(inside, fleet)
        fleet.result = Failed("cancelled", code=FailureCode.INTERFERENCE)
        await cancel(inside, fleet, rollout)
        inside.clock.advance(600.0)
        inside.observe_all_up()

        async def submit() -> None:
            fleet.result, fleet.during_clean_up = None, None
            await inside.submit(text=PLAYBOOK_CLEANS, again=True)

        fleet.during_clean_up = submit
        await prepare_all(inside, fleet)
        row = inside.state.index.preparation(rollout, "p1", CLEANUP)
        assert row is not None
        assert "p1.cleanup.2" not in fleet.runs
        assert (row.attempt, row.state) == (2, PreparationState.FAILED)


async def test_edited_fact_removes_nothing(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        brought = write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=TWO_STAGES)
        await prepare_all(inside, fleet)
        fleet.edited = True
        await cancel(inside, fleet, rollout)
        assert staged(fleet) == brought
