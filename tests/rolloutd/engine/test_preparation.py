"""Prepare stages over nodes in memory: disturbances, checkpoints, and retries where they stopped."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from machines.facts.preparations import BUILD_NODE
from machines.model.events import PreparationRecorded, RolloutEnded
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import FailureCode
from machines.scheduler.decide import decide
from machines.scheduler.preparing import may_begin
from machines.states import Phase
from rolloutd.control.client import ApiError
from rolloutd.engine.drivers.node_session import AdapterSet, PreparationAdapters
from rolloutd.engine.notifications import NotificationDispatcher
from rolloutd.engine.preparation.preparer import Preparer
from rolloutd.errors import NodeUnreachable, NotFound
from rolloutd.ports import Checkpoint, Host, Ok, RunRequest, RunState, Unknown, without_rollout
from tests.contracts.fakes.notifier import FakeNotifier
from tests.contracts.fakes.runner import FakeRunner, Script
from tests.contracts.fakes.stager import FakeStager
from tests.rolloutd.control_environment import NODES, PLAN, URL, ControlEnvironment, control_environment

STAGES = ("one", "two", "three", "four")
IDLE = {"boot-id": "b1", "unit/app.service": "pid 7", "sysctl/net.core.somaxconn": "128"}


def plan_with(*stages: str) -> str:
    items = ", ".join(f"{{install: {{name: {name}, playbook: site.yml}}}}" for name in stages)
    return PLAN.replace("  soak:", f"  prepare: [{items}]\n  soak:")


@dataclass
class Fleet:
    """What is on the nodes: snapshots and checkpoints; `disturb` is what a run does, `cut` ends a login.

    So many snapshots after a run get no answer as `silent` says; `cleaned` has the nodes on which lost runs
    were ended.
    """

    state: dict[str, dict[str, str]] = field(default_factory=dict)
    facts: dict[str, dict[tuple[str, str], Checkpoint]] = field(default_factory=dict)
    disturb: Mapping[str, str] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    silent: int = 0
    cleaned: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    edited: bool = False
    stager: FakeStager = field(default_factory=FakeStager)
    tree: Path = Path("/tree")
    build: Callable[[Path], None] = field(default=lambda manifest: None)
    """What a build's playbook does, given the path of its manifest."""

    async def snapshot(self, host: Host, *, timeout_s: float) -> Mapping[str, str]:
        if self.silent and self.runs:
            self.silent -= 1
            raise NodeUnreachable(f"{host.name}: no answer")
        return dict(self.state.setdefault(host.name, dict(IDLE)))

    async def read(self, host: Host, *, timeout_s: float) -> Mapping[tuple[str, str], Checkpoint] | None:
        return None if self.edited else dict(self.facts.setdefault(host.name, {}))

    async def write(self, host: Host, checkpoint: Checkpoint, *, timeout_s: float) -> None:
        if checkpoint.stage in self.cut:
            raise NodeUnreachable(f"{host.name}: the connection was lost")
        self.facts[host.name][checkpoint.plan, checkpoint.stage] = checkpoint

    async def remove(self, host: Host, rollout: str, *, timeout_s: float) -> None:
        self.facts[host.name] = without_rollout(self.facts[host.name], rollout)


class InstallingRunner(FakeRunner):
    """A runner whose runs change the node as the fleet says, and end at once."""

    def __init__(self, inside: ControlEnvironment, fleet: Fleet) -> None:
        super().__init__(inside.run_host)
        self._fleet = fleet

    async def start(self, request: RunRequest) -> str:
        _, node, _, stage, attempt = request.run_id.rsplit(".", 4)
        self._fleet.runs.append(f"{node}.{stage}.{attempt}")
        if "rolloutd_manifest" in request.variables:
            self._fleet.build(Path(str(request.variables["rolloutd_manifest"])))
        else:
            self._fleet.state[node].update(self._fleet.disturb)
        return await super().start(request)

    async def clean_up_stale_runs(self, host: Host, *, keep: str | None, timeout_s: float) -> Ok | Unknown:
        self._fleet.cleaned.append(host.name)
        return await super().clean_up_stale_runs(host, keep=keep, timeout_s=timeout_s)

    async def wait_for_change(self, handle: str) -> RunState:
        await asyncio.sleep(0)
        return await super().get_state(handle)


async def prepare_all(inside: ControlEnvironment, fleet: Fleet, tree_failure: str = "") -> None:
    """Carry out what the core decides, until it decides nothing more."""

    async def tree(rollout: str) -> Path:
        if tree_failure:
            raise NotFound(tree_failure)
        return fleet.tree

    ports = PreparationAdapters({"ssh": fleet.stager}, fleet, fleet)
    preparer = Preparer(
        inside.state, AdapterSet(InstallingRunner(inside, fleet), {}, {}, tree, preparation=ports)
    )
    while wanted := decide(inside.state.index, inside.clock.now()).preparations:
        async with asyncio.TaskGroup() as tasks:
            preparer.request(tasks, wanted)


async def test_node_that_is_being_cleaned_is_not_prepared(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=plan_with("install"))
        wanted = decide(inside.state.index, inside.clock.now()).preparations
        assert wanted
        inside.state.nodes_being_cleaned |= {each.node for each in wanted}

        async def tree(rollout: str) -> Path:
            raise AssertionError(f"a stage of {rollout} has begun")

        preparer = Preparer(inside.state, AdapterSet(FakeRunner(inside.run_host), {}, {}, tree))
        async with asyncio.TaskGroup() as tasks:
            preparer.request(tasks, wanted)
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


BUILDING = (
    plan_with("build").replace("{install: {", "{build: {").replace("site.yml}}]", "site.yml}}, {stage: {}}]")
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
        inside.clock.advance(600.0)
        await prepare_all(inside, fleet)
        assert fleet.cleaned == ["p1"]


async def test_manifest_of_earlier_try_is_not_taken(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=BUILDING)
        fleet = Fleet(build=write_built)
        inside.run_host.scripts["site.yml"] = Script.FAIL
        await prepare_all(inside, fleet)
        inside.run_host.scripts["site.yml"] = Script.OK
        fleet.build = lambda path: None
        inside.clock.advance(600.0)
        await prepare_all(inside, fleet)
        row = inside.state.index.preparation(rollout, BUILD_NODE, "build")
        assert row is not None
        assert (row.attempt, row.state) == (2, PreparationState.FAILED)
        fleet.build = write_built
        inside.clock.advance(600.0)
        inside.observe_all_up()
        await prepare_all(inside, fleet)
        assert {name for name, _ in fleet.stager.files} == {"p1", "p2", "s1", "s2"}


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
        artifact = f"{{name: app, version: '1', path: app, sha256: {'ab' * 32}, size: 3}}"
        files = {"site.yml": "- hosts: all\n", "undo.yml": "- hosts: all\n"}
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


async def test_edited_fact_removes_nothing(tmp_path: Path) -> None:
    async with control_environment(tmp_path, nodes=NODES[:1]) as inside:
        fleet = Fleet(tree=tmp_path)
        brought = write_artifacts(inside, fleet, "1")
        rollout = await inside.start(text=TWO_STAGES)
        await prepare_all(inside, fleet)
        fleet.edited = True
        await cancel(inside, fleet, rollout)
        assert staged(fleet) == brought
