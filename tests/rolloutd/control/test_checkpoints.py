"""What nodes remember of prepare stages, and the report of the artifacts that they carry."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from machines.model.events import ArtifactsBuilt
from machines.model.preparation import ArtifactKind, ManifestEntry
from rolloutd.cli.main import main
from rolloutd.ports import Checkpoint, StagedArtifact
from tests.contracts.fakes.checkpoints import FakeCheckpoints
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

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
        answer = await inside.request("nora", "get", f"/v1/rollouts/{rollout}/artifacts?by=team")
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
