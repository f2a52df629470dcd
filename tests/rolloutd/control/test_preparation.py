"""How far nodes are prepared, a retry, what nodes remember, and the report of their artifacts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from machines.invariants.violations import violation
from machines.model.decision import Prepare
from machines.model.events import ArtifactsBuilt, PreparationRecorded, RolloutDeleted
from machines.model.preparation import ArtifactKind, ManifestEntry, Preparation, PreparationState
from machines.model.rollout import Actor, ActorKind
from machines.scheduler.decide import decide
from rolloutd.cli.main import main
from rolloutd.control.client import ApiError
from rolloutd.ports import Checkpoint, StagedArtifact
from tests.contracts.fakes.checkpoints import FakeCheckpoints
from tests.rolloutd.commands.test_commands import steer
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

OLGA = Actor(ActorKind.PERSON, "olga", 1001)
RIGHT, OLD = "a" * 64, "b" * 64
PREPARED = PLAN.replace(
    "  maintain:", "  prepare: [{build: {playbook: site.yml}}, {stage: {}}]\n  maintain:"
).replace("name: sysctl", "name: app")


def checkpoint(sha256: str) -> Checkpoint:
    return Checkpoint(
        *("app", "stage", "c" * 64, "d" * 64, "app-1", 1_800_000_000.0),
        {"app": StagedArtifact("1.2.3", sha256, f"/var/cache/rolloutd/{sha256}/app")},
    )


async def run_cli(inside: ControlEnvironment, *words: str) -> int:
    return await asyncio.to_thread(main, [*words, "--socket", str(inside.client.path)])


async def test_each_difference_is_named_by_site(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = FakeCheckpoints()
    key = ("app", "stage")
    nodes.facts = {"p1": {key: checkpoint(RIGHT)}, "p2": {key: checkpoint(OLD)}}
    nodes.down = {"s1"}
    async with control_environment(tmp_path, checkpoints=nodes) as inside:
        rollout = await inside.start(text=PREPARED)
        entry = ManifestEntry("app", "1.2.3", ArtifactKind.FILE, 5, RIGHT, path="app")
        await inside.commit(ArtifactsBuilt(rollout, "build", (entry,), inside.clock.now()))
        answer = await inside.request("olga", "get", f"/v1/rollouts/{rollout}/artifacts?by=team")
        assert answer["unreadable"] == ["s1"]
        assert [(each["site"], each["found"], each["nodes"]) for each in answer["artifacts"]] == [
            ("payments", RIGHT, ["p1"]),
            ("payments", OLD, ["p2"]),
            ("search", "", ["s2"]),
        ]
        assert await run_cli(inside, "artifacts", "report", rollout, "--by", "team") == 1
        printed = capsys.readouterr()
        assert "differs" in printed.out
        assert f"app: p2 carry {OLD}, the manifest has {RIGHT}" in printed.err
        assert "app: s2 do not carry it" in printed.err
        assert await run_cli(inside, "checkpoints", rollout) == 0
        printed = capsys.readouterr()
        assert "app 1.2.3" in printed.out
        assert "s1: s1: no answer" in printed.err
        assert await run_cli(inside, "checkpoints", "p2") == 0
        assert capsys.readouterr().out.count("app 1.2.3") == 1
        assert await run_cli(inside, "checkpoints", "p9") == 1


async def test_status_and_prepare_show_how_far_the_nodes_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=PREPARED)
        entry = ManifestEntry("app", "1.2.3", ArtifactKind.FILE, 5, RIGHT, path="app")
        began = inside.clock.now()
        for node, state, took_s in (("", "done", 60.0), ("p1", "done", 120.0), ("p2", "failed", 30.0)):
            stage = "build" if not node else "stage"
            at, known = began + took_s, inside.state.index.preparations(rollout)
            assert known is not None
            stages = {each.name: each for each in known.rollout.prepare_stages}
            content = known.content(stages[stage], inside.state.index.nodes[node]) if node else ""
            row = Preparation(rollout, node, stage, 1, PreparationState(state), content, at, began, bytes=5)
            built = [] if node else [ArtifactsBuilt(rollout, "build", (entry,), at)]
            await inside.commit(PreparationRecorded(row), *built)
        shown = await inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        assert shown["prepared"] == {"done": 1, "total": 4}
        assert shown["minutes"] == {"slot": 0.0, "prepare": 3.5}
        gates = {each["gate"]: each["prepared"] for each in shown["gates"]}
        # The canaries p1 and s1 are before it.
        assert gates == {"start": None, "continue": {"done": 0, "total": 2}, "proceed": None}
        nodes = (await inside.request("nora", "get", f"/v1/rollouts/{rollout}/nodes"))["nodes"]
        minutes = {each["node"]: each["minutes"]["prepare"] for each in nodes}
        assert minutes == {"p1": 2.0, "p2": 0.5, "s1": 0.0, "s2": 0.0}
        listed = (await inside.request("nora", "get", f"/v1/rollouts/{rollout}/prepare"))["preparations"]
        assert {(each["node"], each["stage"], each["state"]) for each in listed} == {
            ("localhost", "build", "done"),
            ("p1", "stage", "done"),
            ("p2", "stage", "failed"),
            ("s1", "stage", "waiting"),
            ("s2", "stage", "waiting"),
        }
        assert len({each["content"] for each in listed if each["node"] != "localhost"}) == 1
        assert await run_cli(inside, "prepare", rollout) == 0
        assert "p2" in capsys.readouterr().out
        assert await run_cli(inside, "status", rollout) == 0
        printed = capsys.readouterr().out
        assert "25 %   1 of 4 nodes prepared" in printed
        assert "    0 of the 2 nodes after it prepared" in printed


INSTALLING = PLAN.replace("  soak:", "  prepare: [{install: {playbook: site.yml}}]\n  soak:")


async def test_retry_prepares_failed_node_at_once(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=INSTALLING)
        later = inside.clock.now() + 3600.0
        stage = inside.state.index.rollout(rollout).prepare_stages[0]
        content, now = stage.content_for(inside.state.index.nodes["p1"]), inside.clock.now()
        times = {"at": now, "began_at": now - 90.0, "not_before": later}
        failed = Preparation(rollout, "p1", "install", 1, PreparationState.FAILED, content, **times)
        await inside.commit(PreparationRecorded(failed))
        assert decide(inside.state.index, inside.clock.now()).of(Prepare) == ()
        await inside.request(
            "olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/retry", {"reason": "the link is up"}
        )
        due = decide(inside.state.index, inside.clock.now()).of(Prepare)
        assert ("p1", 2) in [(each.node, each.attempt) for each in due]


async def test_rollout_with_running_stage_cannot_be_deleted(tmp_path: Path) -> None:
    async with control_environment(tmp_path) as inside:
        rollout = await inside.start(text=INSTALLING)
        now = inside.clock.now()
        times = {"at": now, "began_at": now, "not_before": now}
        stage = Preparation(rollout, "p1", "install", 1, PreparationState.RUNNING, "c" * 64, **times)
        await inside.commit(PreparationRecorded(stage))
        await steer(inside, "olga", rollout, "cancel")
        deletion = RolloutDeleted(rollout, OLGA, now)
        assert violation(inside.state.index, deletion, now) == (
            f"{rollout} cannot be deleted: its stage runs on p1"
        )
        with pytest.raises(ApiError, match="p1 still runs stage install") as unsettled:
            await inside.request("olga", "delete", f"/v1/rollouts/{rollout}")
        assert unsettled.value.code == "not-settled"
        await inside.commit(PreparationRecorded(replace(stage, state=PreparationState.FAILED)))
        await inside.request("olga", "delete", f"/v1/rollouts/{rollout}")
