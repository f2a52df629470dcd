"""A database of rolloutd 0.1, left in the middle of a rollout: it is migrated, and the rollout ends.

tests/data/rolloutd-0.1.sql is a dump of what the code of 0.1 wrote; the JSON beside it is what that
code then loaded.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from machines.model.events import GateOpened, HoldReleased, RolloutEnded
from machines.model.plan import GateName, Plan
from machines.model.rollout import DAEMON
from machines.model.step_record import StepAction
from machines.states import Phase
from rolloutd.errors import StoreFailed
from rolloutd.ports import WITHHELD, ApprovedRollout, Host, Ok, RunRequest
from rolloutd.settings.compile import compile_plan
from rolloutd.store import open_store
from rolloutd.store.sqlite import database
from rolloutd.texts.audit_names import with_current_names
from rolloutd.texts.event_text import describe_entry
from tests.contracts.fakes.isolator import FakeIsolator
from tests.contracts.fakes.runner import FakeRun, Script
from tests.contracts.fakes.sources import SOURCE
from tests.contracts.store_backends import moves_to_done, plan_of, rollout_opened, write
from tests.rolloutd.control_environment import ControlEnvironment, control_environment, settings_of
from tests.rolloutd.slow_store import adapters_of, daemon_of

DATA = Path(__file__).parents[2] / "data"

EXPECTED: Mapping[str, Any] = json.loads((DATA / "rolloutd-0.1.json").read_text())

ROLLOUT = EXPECTED["rollout"]

OLD_ACTIONS = {"look": "inspect", "do": "apply", "undo": "revert", "clear": "clean-up"}


def old_state_dir(tmp_path: Path) -> Path:
    """Return a state directory with the old database."""
    state_dir = tmp_path / "state"
    state_dir.mkdir(mode=0o700)
    with closing(sqlite3.connect(state_dir / database.FILE_NAME)) as connection:
        connection.executescript((DATA / "rolloutd-0.1.sql").read_text())
    return state_dir


def compile_content(content: Mapping[str, Any]) -> Plan:
    """Return a stored plan as the daemon compiles it."""
    return compile_plan(content, teams=settings_of().teams)


def plain(value: Any) -> Any:
    """Return a value of the core as JSON would give it back."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, frozenset | set):
        return sorted((plain(each) for each in value), key=str)
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else str(value)


async def test_the_facts_are_those_that_0_1_loaded(tmp_path: Path) -> None:
    store = await open_store(old_state_dir(tmp_path), compile_plan=compile_content)
    facts, expected = await store.load_snapshot(), EXPECTED["facts"]
    targets = [plain(asdict(target)) for target in facts.targets]
    for target in targets:
        target["put_backs"] = target.pop("aborted_isolations")
        assert target.pop("downtime_s") == 0.0
        assert target.pop("drift") is None
        assert target.pop("content") == ""
        assert target.pop("joined_outage") is False
    assert targets == expected["targets"]
    assert max(target["put_backs"] for target in targets) == 1
    for rollout, old in zip(facts.rollouts, expected["rollouts"], strict=True):
        assert {key: value for key, value in plain(asdict(rollout)).items() if key in old} == old
    nodes = [plain(asdict(each)) for each in facts.nodes]
    # 0.1 compared no sources and pinned nothing.
    assert nodes == [each | {"conflicts": [], "identity": {}} for each in expected["nodes"]]
    for kind in ("holds", "freezes", "team_rules"):
        assert [plain(asdict(each)) for each in getattr(facts, kind)] == expected[kind]
    assert facts.epoch == expected["epoch"] + 1
    for node, steps in EXPECTED["steps"].items():
        found = [plain(asdict(step)) for step in await store.load_steps(ROLLOUT, node)]
        assert found == [
            {
                **step,
                "action": OLD_ACTIONS.get(step["action"], step["action"]),
                "code": "failed",
                "waited_s": 0.0,
            }
            for step in steps
        ]
    await store.close()


async def test_the_audit_verifies_and_is_shown_in_words(tmp_path: Path) -> None:
    store = await open_store(old_state_dir(tmp_path), compile_plan=compile_content)
    assert (await store.verify_audit()).ok
    entries = [json.loads(entry.text) for entry in await store.read_audit()]
    names = {entry["event"] for entry in entries}
    assert {"NodesSeen", "NodesGone", "LookedCurrent", "NodeLetGo", "TeamSet", "CallRefused"} <= names
    assert {"Frozen", "Unfrozen", "RunsRemoved"} <= names
    moves = {(entry["fields"] or {}).get("trigger") for entry in entries}
    assert {"put-back", "reddened"} <= moves
    for entry in entries:
        current = with_current_names(entry)
        assert describe_entry(entry) == describe_entry(current)
        assert not {entry["event"], *map(str, entry["fields"].values())} & {"put-back", "reddened"} or (
            current != entry
        )
    lines = [describe_entry(entry) for entry in entries]
    assert "froze all: an incident" in lines
    assert "the inventory no longer has x1" in lines
    assert "p1: apply isolate: command begun" in lines
    for name in ("NodesDiscovered", "NodesSeen"):
        assert json.loads((await store.read_audit(event=name))[0].text)["event"] == "NodesSeen"
    await store.close()


async def test_a_backup_of_0_1_can_be_read_for_its_epoch(tmp_path: Path) -> None:
    path = old_state_dir(tmp_path) / database.FILE_NAME
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        database.write_epoch(connection, 7)
        assert database.read_epoch(connection) == 7
    with closing(database.open_writer(path)) as connection:
        assert database.read_epoch(connection) == 7


async def test_approved_plan_that_no_longer_compiles_is_found(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of)
    earlier, later = rollout_opened("r1"), rollout_opened("r2")
    earlier = replace(earlier, name=later.name, content={"metadata": {"owner": "infra"}})
    approved = GateOpened("r1", GateName.START, "", 2.0)
    await write(store, earlier, approved, *moves_to_done("n1"), RolloutEnded("r1", 3.0), later)
    with pytest.raises(StoreFailed, match="this version cannot read the plan of rollout r1"):
        await store.load_rollout("r1")
    found = await store.find_previous_approved("r2", "infra")
    assert found == ApprovedRollout("r1", *await store.load_plan("r1"))
    await store.close()


async def run_until_ended(env: ControlEnvironment, tmp_path: Path, run: str) -> FakeIsolator:
    """Let a daemon finish the rollout; its people vote when they are asked."""
    isolator = FakeIsolator()
    isolator.isolated.add("p1")  # by the daemon of 0.1
    daemon = asyncio.create_task(daemon_of(env, adapters_of(env, tmp_path, isolator)).run())
    try:
        for turn in range(4000):
            # Some steps work in a thread, which needs the processor now and then.
            await asyncio.sleep(0 if turn % 10 else 0.001)
            env.clock.advance(1.0)
            env.observe_all_up()
            env.state.wake_up()
            rollout = env.state.index.rollouts.get(ROLLOUT)
            if rollout is None or rollout.ended_at is not None:
                return isolator
            if env.run_host.runs[run].result is None:
                env.run_host.runs[run].end(Ok("2 tasks on p1, 1 changed"))
            phases = {env.phase(ROLLOUT, node) for node in ("p1", "s1")}
            if phases == {Phase.DONE} and len(rollout.votes) == 1:
                for person in ("olga", "paul", "sara"):
                    # The copy of the state directory has no playbooks, so no review can show them.
                    await env.vote(person, ROLLOUT, "continue", unseen=True)
    finally:
        daemon.cancel()
        await asyncio.wait({daemon})
    raise AssertionError(f"it did not end: {env.state.reasons}, {env.state.problems()}")


async def test_the_rollout_goes_on_and_no_run_is_doubled(tmp_path: Path) -> None:
    run = EXPECTED["steps"]["p1"][-1]["handle"]
    state_dir = old_state_dir(tmp_path)

    async def store(compile_plan: Any) -> Any:
        return await open_store(state_dir, compile_plan=compile_plan, inline=True)

    async with control_environment(tmp_path, store=store, nodes=()) as env:
        env.clock.advance(EXPECTED["at"] - env.clock.now())
        request = RunRequest(run, Host("p1"), SOURCE, "site.yml", timeout_s=3600.0)
        env.run_host.runs[run] = FakeRun(request, asyncio.get_running_loop().time() + 3600.0)
        env.run_host.scripts = {"site.yml": Script.OK}
        await env.commit(HoldReleased("s2", "api", "vm-7", DAEMON, env.clock.now()))
        isolator = await run_until_ended(env, tmp_path, run)
        targets = {t.node: t for t in await env.state.store.load_targets(ROLLOUT)}
        assert {name: (t.phase, t.outcome) for name, t in targets.items()} == dict.fromkeys(
            ("p1", "p2", "s1", "s2"), ("done", "changed")
        )
        assert run not in env.run_host.started_runs
        assert sorted(name.split(".")[1] for name in env.run_host.started_runs) == ["p2", "s1", "s2"]
        assert not isolator.isolated
        assert (await env.state.store.verify_audit()).ok
        actions = {step.action for step in await env.state.store.load_steps(ROLLOUT, "p1")}
        assert {StepAction.APPLY, StepAction.REVERT, StepAction.RUN} <= actions


async def test_passwords_of_version_0_1_are_erased(tmp_path: Path) -> None:
    """Neither the rows, nor pages that were freed before, nor the log have them after the migration."""
    state_dir = old_state_dir(tmp_path)
    file = state_dir / database.FILE_NAME
    with closing(sqlite3.connect(file)) as connection:
        for secret in ("hunter2-older", "hunter2"):
            variables = {
                "ansible_become_password": secret * 400,
                "provider_id": "aws:///i-1",
                "ansible_port": 22,
            }
            connection.execute("UPDATE node SET connection = ?", (json.dumps(variables),))
            connection.commit()
    assert b"hunter2" in file.read_bytes()
    store = await open_store(state_dir, compile_plan=compile_content)
    try:
        files = [path for path in state_dir.iterdir() if path.is_file()]
        assert [path.name for path in files if b"hunter2" in path.read_bytes()] == []
        stored = await store.load_connections()
        assert stored
        assert all(each == {WITHHELD: True, "provider_id": "aws:///i-1"} for each in stored.values())
    finally:
        await store.close()
