"""What goes from the disk and what stays: the settings' `keep`, by a clock that a test turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import (
    ConfigurationPruned,
    NodesRemoved,
    RolloutDeleted,
    RunOutputPruned,
    StepRecorded,
)
from machines.model.rollout import Actor, ActorKind
from machines.model.step_record import StepAction, StepRecord, StepState
from machines.states import Outcome, Phase, Trigger
from rolloutd.concurrency import garbage
from rolloutd.engine.background import retention
from rolloutd.engine.background.audit_export import AuditExporter
from rolloutd.engine.background.retention import BATCH_SIZE, RetentionCleaner
from rolloutd.errors import AdapterFailed, LeadershipLost, RunnerUnavailable, SourceFailed, StoreFailed
from tests.contracts.fakes.artifacts import FakeArtifactStore
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment

DAY_S = 86_400.0
BECAUSE = {"reason": "because"}
OLGA = Actor(ActorKind.PERSON, "olga", 1001)


@dataclass(slots=True)
class RunStorage:
    """A house with shelves, and what tidies them."""

    inside: ControlEnvironment
    runs: FakeArtifactStore
    trees: FakeArtifactStore
    pruning: RetentionCleaner

    def run(self, rollout: str, number: int = 1) -> str:
        """Put a run of a rollout on its shelf, just now."""
        name = f"{rollout}.p{number}.1.configure.1"
        self.runs.artifacts[name] = self.inside.clock.now()
        return name

    async def after(self, days: float) -> list[str]:
        """Let days go by, tidy up, and return the runs that are left."""
        self.inside.clock.advance(days * DAY_S)
        await self.pruning.remove_expired()
        return list(self.runs.artifacts)


@asynccontextmanager
async def disk(tmp_path: Path, **changed: Any) -> AsyncIterator[RunStorage]:
    """Serve a house whose shelves are empty."""
    async with control_environment(tmp_path, **changed) as inside:
        runs, trees = FakeArtifactStore(), FakeArtifactStore()
        audit = AuditExporter(inside.state, tmp_path / "segments", b"key")
        yield RunStorage(inside, runs, trees, RetentionCleaner(inside.state, runs, [trees], audit))


async def ended(inside: ControlEnvironment, name: str = "sysctl") -> str:
    """Return a rollout that was cancelled before it began."""
    rollout = await inside.submit(text=PLAN.replace("name: sysctl", f"name: {name}"))
    await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", BECAUSE)
    return rollout


async def test_records_removed_after_a_year(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        rollout = await ended(inside)
        await made.after(364)
        assert rollout in {each.id for each in await inside.state.store.list_rollout_records()}
        await made.after(2)
        assert await inside.state.store.list_rollout_records() == ()
        entries = (await inside.request("nora", "get", f"/v1/audit?rollout={rollout}&kind=RecordsPruned"))[
            "entries"
        ]
        assert [len(each["entry"]["fields"]["nodes"]) for each in entries] == [4, 0]
        assert entries[0]["entry"]["cause"] == "the settings keep records of closed rollouts for 365d"


async def test_removal_of_records_continues_after_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "NODES_PER_REMOVAL", 1)
    async with disk(tmp_path) as made:
        inside, commits = made.inside, 0
        rollout = await ended(inside)
        commit = inside.state.store.commit

        async def dies(*args: Any, **named: Any) -> Any:
            nonlocal commits
            commits += 1
            if commits == 3:
                raise StoreFailed("killed")
            return await commit(*args, **named)

        inside.state.store.commit = dies  # type: ignore[method-assign]
        with pytest.raises(StoreFailed):
            await made.after(366)
        assert len(await inside.state.store.load_targets(rollout)) == 2
        await made.pruning.remove_expired()
        assert await inside.state.store.list_rollout_records() == ()


@pytest.mark.parametrize(
    "error", [SourceFailed("bucket: away"), RunnerUnavailable("awx: 404"), KeyError("x")]
)
async def test_failed_part_does_not_stop_others(tmp_path: Path, error: Exception) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        await ended(inside)
        made.trees.artifacts["tree-old"] = inside.clock.now()
        inside.clock.advance(366 * DAY_S)
        made.runs.error = error
        task = asyncio.create_task(made.pruning.run())
        try:
            async with asyncio.timeout(60):
                while retention.CONDITION not in inside.state.conditions:
                    await asyncio.sleep(0)
                assert inside.state.conditions[retention.CONDITION].startswith(
                    "retention: not all that has expired was removed: "
                )
                assert await inside.state.store.list_rollout_records() == ()
                assert not made.trees.artifacts
                made.runs.error = None
                made.pruning.wake_up()
                while retention.CONDITION in inside.state.conditions:
                    await asyncio.sleep(0)
        finally:
            task.cancel()


async def test_daemon_that_lost_its_term_removes_nothing_more(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        await ended(made.inside)
        made.trees.artifacts["tree-old"] = made.inside.clock.now()
        made.runs.error = LeadershipLost("another daemon leads")
        with pytest.raises(LeadershipLost):
            await made.after(366)
        assert "tree-old" in made.trees.artifacts


async def test_run_that_cannot_be_removed_keeps_no_other(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        rollout = await ended(made.inside)
        stuck, other = made.run(rollout, 1), made.run(rollout, 2)
        made.runs.stuck = {stuck}
        with pytest.raises(AdapterFailed, match=stuck):
            await made.after(91)
        assert other not in made.runs.artifacts


async def test_closed_rollout_leaves_memory_after_a_day(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        rollout = await ended(made.inside)
        await made.pruning.remove_expired()
        assert rollout in made.inside.state.index.rollouts
        await made.after(1)
        assert rollout not in made.inside.state.index.rollouts
        shown = await made.inside.request("nora", "get", f"/v1/rollouts/{rollout}")
        assert shown["state"] == "cancelled"


async def test_memory_is_collected_daily_while_no_node_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[int] = []
    monkeypatch.setattr(garbage, "collect_all", lambda: passes.append(1))
    async with disk(tmp_path) as made:
        await made.after(0)
        assert passes == []
        rollout = await made.inside.start()
        await made.inside.transition(rollout, "p1", Trigger.ADMITTED)
        await made.after(2)
        assert passes == []
        await made.inside.transition(rollout, "p1", Trigger.ISOLATED)
        await made.inside.transition(rollout, "p1", Trigger.MAINTAINED)
        await made.inside.transition(rollout, "p1", Trigger.VERIFIED, outcome=Outcome.CHANGED)
        await made.after(0)
        await made.after(0.5)
        assert passes == [1]
        await made.after(0.5)
        assert passes == [1, 1]


async def test_output_of_steps_goes_with_that_of_runs(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        rollout = await inside.start()
        record = StepRecord(
            rollout, "p1", 1, "verify.0.ssh", StepAction.CHECK, 1, StepState.OK, 1.0, 1.0, output="hello"
        )
        await inside.commit(StepRecorded(record))
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", BECAUSE)
        await made.after(89)
        assert await inside.state.store.has_step_output(rollout)
        await made.after(2)
        assert not await inside.state.store.has_step_output(rollout)
        audited = f"/v1/audit?rollout={rollout}&kind=RunOutputPruned"
        assert len((await inside.request("nora", "get", audited))["entries"]) == 1


async def test_runs_pruned_after_ninety_days_and_audited(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        rollout = await ended(inside)
        run = made.run(rollout)
        assert await made.after(89) == [run]
        assert await made.after(2) == []
        (entry,) = (await inside.request("nora", "get", f"/v1/audit?rollout={rollout}&kind=RunOutputPruned"))[
            "entries"
        ]
        assert entry["entry"]["fields"]["runs"] == 1
        assert entry["entry"]["cause"] == "the settings keep the output of runs for 90d"
        events = (await inside.request("nora", "get", f"/v1/audit?rollout={rollout}"))["entries"]
        assert len(events) == 3


async def test_runs_of_a_rollout_that_needs_people_stay(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        rollout = await inside.start()
        runs = [made.run(rollout)]
        await inside.fail(rollout, "p1")
        assert await made.after(365) == runs
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", BECAUSE)
        assert await made.after(365) == runs
        skip = BECAUSE | {"put_back": "leave"}
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/nodes/p1/skip", skip)
        assert await made.after(365) == runs  # it is isolated still


async def test_old_runs_of_plan_that_keeps_go(tmp_path: Path) -> None:
    """Its rollout stays open for years, and each drift is a run more."""
    async with disk(tmp_path) as made:
        inside = made.inside
        text = PLAN.replace("  soak: 10m\n", "  canary: {select: ''}\n  keep: true\n  every: 1h\n")
        rollout = await inside.start(text=text)
        early = made.run(rollout)
        await inside.finish(rollout, "p1")
        assert await made.after(91) == [early], "the other nodes have not had their change"
        await inside.observe([*inside.state.index.nodes])
        for target in inside.state.index.targets(rollout):
            if target.phase is Phase.PENDING:
                await inside.finish(rollout, target.node)
        late = made.run(rollout, 2)
        assert await made.after(0) == [late]
        assert await made.after(91) == []


async def test_a_run_that_was_touched_lately_or_is_at_work_stays(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        rollout = await ended(made.inside)
        busy = made.run(rollout, 1)
        made.runs.in_use.add(busy)
        await made.after(89)
        late = made.run(rollout, 2)
        assert await made.after(2) == [busy, late]


async def test_deleting_a_rollout_removes_its_runs_and_no_others(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        rollout, other = await ended(inside), await ended(inside, "sysctl.b")
        made.run(rollout)
        stays = made.run(other)
        await inside.commit(RolloutDeleted(rollout, OLGA, inside.clock.now()))
        assert await made.after(0) == [stays]


async def test_runs_that_no_rollout_of_the_database_had_go_by_their_own_age(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        orphan = made.run("somebody-else.x")
        assert await made.after(89) == [orphan]
        assert await made.after(2) == []


async def test_null_keeps_for_ever(tmp_path: Path) -> None:
    async with disk(tmp_path, keep={"runs": None, "trees": None}) as made:
        run = made.run(await ended(made.inside))
        made.trees.artifacts["tree-1"] = 0.0
        assert await made.after(10_000) == [run]
        assert made.trees.artifacts


async def test_trees_go_when_no_rollout_needs_them_and_nobody_pinned_them_lately(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        rollout = await inside.start()
        _, source = await inside.state.store.load_plan(rollout)
        used = f"{source['kind']}-{source['pin']}"
        made.trees.artifacts |= {used: 0.0, rollout: 0.0, "tree-tried": inside.clock.now()}
        await made.after(29)
        assert set(made.trees.artifacts) == {used, rollout, "tree-tried"}
        await made.after(2)
        assert set(made.trees.artifacts) == {used, rollout}
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", BECAUSE)
        await made.after(29)
        assert set(made.trees.artifacts) == {used, rollout}
        await made.after(2)
        assert not made.trees.artifacts


async def test_killed_in_the_middle_the_next_look_ends_it_and_tells_once(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        rollout = await ended(inside)
        live = made.run(await inside.submit(text=PLAN.replace("name: sysctl", "name: other")))
        for number in range(BATCH_SIZE + 5):
            made.run(rollout, number)
        inside.clock.advance(91 * DAY_S)
        killed = asyncio.create_task(made.pruning.remove_expired())
        while len(made.runs.artifacts) > 6:
            await asyncio.sleep(0)
        killed.cancel()  # it rests between two portions
        await asyncio.gather(killed, return_exceptions=True)
        assert len(made.runs.artifacts) == 6
        assert await made.after(0) == [live]
        entries = (await inside.request("nora", "get", "/v1/audit?kind=RunOutputPruned"))["entries"]
        assert len(entries) == 1


async def test_a_deletion_is_looked_after_at_once(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        rollout = await ended(inside)
        made.run(rollout)
        task = asyncio.create_task(made.pruning.run())
        await asyncio.sleep(0)
        await inside.commit(RolloutDeleted(rollout, OLGA, inside.clock.now()))
        made.pruning.wake_up()
        try:
            async with asyncio.timeout(60):
                while made.runs.artifacts:
                    await asyncio.sleep(0)
        finally:
            task.cancel()


async def test_records_of_a_gone_node_are_pruned_after_ninety_days(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        store = inside.state.store
        rollout = await inside.start()
        await inside.finish(rollout, "p1")
        await inside.request("olga", "post", f"/v1/rollouts/{rollout}/cancel", BECAUSE)
        await inside.commit(NodesRemoved(("p1",)))
        await made.after(89)
        kept = await store.load_configurations(("p1",))
        assert kept.records
        assert kept.documents
        await made.after(2)
        left = await store.load_configurations(("p1",))
        assert not left.records
        assert not left.documents
        (entry,) = await store.read_audit(event=ConfigurationPruned.__name__, node="p1")
        assert "for 90d" in entry.text


async def test_a_log_says_honestly_that_its_output_is_gone(tmp_path: Path) -> None:
    async with disk(tmp_path) as made:
        inside = made.inside
        rollout = await inside.start()
        await inside.isolate(rollout, "p1")
        step = inside.step(rollout, "p1", "run.configure", StepAction.RUN, handle="gone", text="2 tasks")
        await inside.commit(StepRecorded(step))
        path = f"/v1/rollouts/{rollout}/nodes/p1/log"
        texts = [line["text"] for line in await inside.stream_lines(path)]
        assert "the output is not on this machine's disk; rolloutd did not remove it" in texts
        await inside.commit(RunOutputPruned(rollout, 1, 90 * DAY_S, inside.clock.now()))
        lines = await inside.stream_lines(path)
        (gone,) = [line for line in lines if line["kind"] == "removed"]
        assert gone["text"] == "the output was removed 90d after the rollout's end (`keep` in the settings)"
        assert lines[-1]["text"].endswith("2 tasks")  # what was recorded stays
