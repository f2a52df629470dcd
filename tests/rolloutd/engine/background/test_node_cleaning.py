"""What goes from nodes after the end of their rollouts, when, and what stays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from machines.facts.node_work import WorkKind
from machines.model.events import NodeCleaned, PreparationRecorded, RolloutEnded
from machines.model.preparation import Preparation, PreparationState
from machines.model.rollout import DAEMON
from rolloutd.cli.main import main
from rolloutd.control.client import ApiError
from rolloutd.engine.background.node_cleaning import INTERVAL_S, NodeCleaner
from rolloutd.engine.state import State
from rolloutd.ports import Checkpoint, NodeFile, StagedArtifact
from rolloutd.settings.retention import CLEANING_GIVEN_UP_AFTER_S
from tests.contracts.fakes.checkpoints import FakeCheckpoints
from tests.contracts.fakes.node_files import FakeNodeFiles
from tests.contracts.fakes.stager import FakeStager
from tests.rolloutd.control_environment import (
    ACCOUNTS,
    PLAN,
    ControlEnvironment,
    control_environment,
    settings_of,
)

DAY_S = 86_400.0
FENCE = NodeFile("fence", "/var/lib/rolloutd-fence/p1")
GUARD = NodeFile("guard", "/var/lib/rolloutd/guard/p1/R.1")
PLAN_OF_P1 = PLAN.replace('targets: ""', 'targets: "team=payments,rack=r1"')


@dataclass(slots=True)
class Nodes:
    """A fleet with what rollouts left on it, and what removes that."""

    files: FakeNodeFiles = field(default_factory=FakeNodeFiles)
    checkpoints: FakeCheckpoints = field(default_factory=FakeCheckpoints)
    stager: FakeStager = field(default_factory=FakeStager)
    cleaner: NodeCleaner | None = None
    inside: ControlEnvironment | None = None

    def make_cleaner(self, state: State) -> NodeCleaner:
        self.cleaner = NodeCleaner(state, self.files, self.checkpoints, [self.stager])
        return self.cleaner

    async def pass_time(self, seconds: float) -> None:
        """Let time pass and the daemon clean what is due then."""
        assert self.inside is not None
        assert self.cleaner is not None
        self.inside.clock.advance(seconds)
        self.inside.observe_all_up()
        await self.cleaner.clean_due()

    def remember(self, rollout: str, digest: str, plan: str = "sysctl", **more: Any) -> None:
        """Stage an artifact on p1, with its checkpoint."""
        path = f"/srv/{digest}/app.deb"
        self.stager.files["p1", path] = b""
        artifact = StagedArtifact("1", digest, path)
        checkpoint = Checkpoint(plan, "stage", "c", "change", rollout, 0.0, {"app": artifact}, **more)
        self.checkpoints.facts.setdefault("p1", {})[plan, "stage"] = checkpoint

    def staged(self) -> list[str]:
        return sorted(path.split("/")[2] for _, path in self.stager.files)


@asynccontextmanager
async def fleet(tmp_path: Path) -> AsyncIterator[tuple[ControlEnvironment, Nodes]]:
    nodes = Nodes()
    async with control_environment(tmp_path, cleaner=nodes.make_cleaner) as inside:
        nodes.inside = inside
        nodes.files.files["p1"] = [FENCE, GUARD]
        yield inside, nodes


async def finished(inside: ControlEnvironment, name: str = "sysctl", **more: Any) -> str:
    """Return a rollout that has changed p1 and has ended."""
    rollout = await inside.start(text=PLAN_OF_P1.replace("name: sysctl", f"name: {name}"), **more)
    await inside.finish(rollout, "p1")
    await inside.commit(RolloutEnded(rollout, inside.clock.now()))
    return rollout


async def clean(inside: ControlEnvironment, subject: str, who: str = "adam", **body: Any) -> list[Any]:
    body = {"reason": "because", **body}
    lines = await inside.stream_lines(f"/v1/clean/{subject}", who=who, method="POST", body=body)
    return [(f["what"], f["path"], f["result"], f["reason"]) for line in lines for f in line["files"]]


async def test_node_is_cleaned_once_after_its_last_rollout(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (inside, nodes):
        rollout = await finished(inside)
        await nodes.pass_time(29 * DAY_S)
        assert nodes.files.calls == 0
        await nodes.pass_time(2 * DAY_S)
        await nodes.pass_time(INTERVAL_S)
        assert nodes.files.files["p1"] == []
        assert nodes.files.calls == 1
        (entry,) = await inside.state.store.read_audit(event=NodeCleaned.__name__)
        fields = json.loads(entry.text)["fields"]
        assert fields["removed"] == [FENCE.path, GUARD.path]
        nodes.files.files["p1"] = [FENCE]
        assert rollout != await finished(inside, "again")
        await nodes.pass_time(31 * DAY_S)
        assert nodes.files.files["p1"] == []


@pytest.mark.parametrize("changed", [{"keep": {"on_nodes": None}}, {"observe_only": True}], ids=str)
async def test_setting_turns_background_cleaning_off(tmp_path: Path, changed: dict[str, Any]) -> None:
    async with fleet(tmp_path) as (inside, nodes):
        await finished(inside)
        inside.state.settings = settings_of(**changed)
        await nodes.pass_time(31 * DAY_S)
        assert nodes.files.calls == 0


async def test_unreachable_node_is_retried_with_backoff(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (inside, nodes):
        await finished(inside)
        nodes.files.down.add("p1")
        await nodes.pass_time(31 * DAY_S)
        calls = []
        for _ in range(8):
            await nodes.pass_time(INTERVAL_S)
            calls.append(nodes.files.calls)
        assert calls == [2, 2, 3, 3, 3, 3, 4, 4]
        nodes.make_cleaner(inside.state)  # another daemon
        nodes.files.down.clear()
        await nodes.pass_time(INTERVAL_S)
        assert nodes.files.files["p1"] == []


async def test_silent_node_is_given_up_after_a_month(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (inside, nodes):
        await finished(inside)
        await nodes.pass_time(31 * DAY_S + CLEANING_GIVEN_UP_AFTER_S)
        assert nodes.files.calls == 0


async def test_node_of_an_open_rollout_stays_as_it_is(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (inside, nodes):
        await finished(inside)
        other = await inside.start(text=PLAN.replace("name: sysctl", "name: other"))
        await nodes.pass_time(31 * DAY_S)
        assert nodes.files.calls == 0
        assert await clean(inside, "p1") == [("node", "", "kept", f"{other} is not over there")]
        with pytest.raises(ApiError, match="not over; wait, or cancel it"):
            await clean(inside, other)
        assert nodes.files.calls == 0


async def test_checkpoints_and_artifacts_of_present_changes_stay(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (inside, nodes):
        present = await finished(inside)
        nodes.remember(present, "aa", previous=("a0",))
        deleted = await finished(inside, "deleted")
        nodes.remember(deleted, "bb", "deleted")
        nodes.remember("R-of-another", "cc", "foreign")
        await inside.request("olga", "delete", f"/v1/rollouts/{deleted}")
        expected = [
            ("fence", FENCE.path, None),
            ("guard", GUARD.path, None),
            ("artifact", "/srv/bb", None),
            ("checkpoint", "sysctl/stage", "the node has its change"),
            ("checkpoint", "deleted/stage", None),
            ("checkpoint", "foreign/stage", "no rollout of this database"),
        ]
        found = await clean(inside, "p1", dry_run=True)
        assert found == [(*each[:2], "kept" if each[2] else "found", each[2]) for each in expected]
        assert nodes.staged() == ["aa", "bb", "cc"]
        assert nodes.files.files["p1"]
        found = await clean(inside, present)
        assert found == [(*each[:2], "kept" if each[2] else "removed", each[2]) for each in expected]
        assert nodes.staged() == ["aa", "cc"]
        assert nodes.checkpoints.facts["p1"].keys() == {("sysctl", "stage"), ("foreign", "stage")}


async def test_artifacts_that_later_rollout_uses_stay(tmp_path: Path) -> None:
    """The second rollout of the same content skipped the stage: the node works with the first one's files."""
    async with fleet(tmp_path) as (inside, nodes):
        first = await finished(inside)
        nodes.remember(first, "bb", previous=("aa",))
        nodes.stager.files["p1", "/srv/aa/app.deb"] = b""
        second = await finished(inside, again=True)
        for rollout, state in ((first, PreparationState.DONE), (second, PreparationState.SKIPPED)):
            row = Preparation(rollout, "p1", "stage", 1, state, "c", 0.0, 0.0)
            # The facts have no stages of this plan; only the database is asked.
            store = inside.state.store
            await store.commit([PreparationRecorded(row)], actor=DAEMON, cause="test", at=inside.clock.now())
        await clean(inside, "p1")
        assert nodes.staged() == ["aa", "bb"]
        assert nodes.checkpoints.facts["p1"]["sysctl", "stage"].content == "c"


async def test_rollback_keeps_the_artifacts_before_it(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (inside, nodes):
        rollout = await finished(inside)
        nodes.remember(rollout, "aa", previous=("a0",))
        nodes.stager.files["p1", "/srv/a0/app.deb"] = b""
        await inside.request("olga", "delete", f"/v1/rollouts/{rollout}")
        await clean(inside, "p1")
        assert nodes.staged() == ["a0"]
        (left,) = nodes.checkpoints.facts["p1"].values()
        assert (left.content, left.previous) == ("", ("a0",))


async def test_nothing_begins_on_a_node_meanwhile(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (inside, nodes):
        await finished(inside)
        begun, may_end = asyncio.Event(), asyncio.Event()
        original = nodes.files.clean

        async def slow(*args: Any, **options: Any) -> Any:
            begun.set()
            await may_end.wait()
            return await original(*args, **options)

        nodes.files.clean = slow  # type: ignore[method-assign]
        assert nodes.cleaner is not None
        cleaning = asyncio.create_task(nodes.cleaner.clean("p1"))
        await begun.wait()
        assert [each.kind for each in inside.state.index.recorded_work("p1")] == [WorkKind.CLEANING]
        assert "is being cleaned" in (await nodes.cleaner.clean("p1")).problem
        may_end.set()
        assert (await cleaning).problem == ""
        assert not list(inside.state.index.recorded_work("p1"))


async def test_command_lists_removes_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def run(*words: str) -> int:
        return await asyncio.to_thread(main, [*words, "--socket", str(inside.client.path)])

    async with fleet(tmp_path) as (inside, nodes):
        rollout = await finished(inside)
        inside.name_service.current = ACCOUNTS["adam"]
        assert await run("clean", "p1") == 2
        assert await run("clean", "p1", "--dry-run") == 0
        assert "found" in capsys.readouterr().out
        assert await run("clean", rollout, "--reason", "disk", "--yes", "--json") == 0
        (first, _) = json.loads(capsys.readouterr().out)
        assert first == {
            "node": "p1",
            "what": "fence",
            "path": FENCE.path,
            "result": "removed",
            "reason": None,
        }
        assert await run("clean", "p1", "--reason", "again", "--yes") == 0
        assert "nothing was left" in capsys.readouterr().err
        nodes.files.down.add("p1")
        assert await run("clean", "p1", "--reason", "again", "--yes") == 1
        (entry, _) = await inside.state.store.read_audit(event=NodeCleaned.__name__)
        assert json.loads(entry.text)["cause"] == "clean: disk"
        for who, subject in (("sara", "p1"), ("ida", rollout)):
            with pytest.raises(ApiError) as refused:
                await clean(inside, subject, who)
            assert refused.value.status == 403
        assert await clean(inside, "p1", "paul") == [("node", "", "kept", "p1: no answer")]


async def test_isolated_node_of_a_closed_rollout_stays(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (inside, _):
        rollout = await inside.start(text=PLAN_OF_P1)
        await inside.fail(rollout, "p1")
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", {"reason": "over"})
        assert inside.state.index.target(rollout, "p1").isolated
        assert await clean(inside, "p1") == [("node", "", "kept", f"{rollout} is not over there")]
