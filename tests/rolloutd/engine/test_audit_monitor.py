"""A row that the audit does not account for blocks what depends on it until an admin settles it."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from machines.model.decision import Admit, CheckIfCurrent, OpenGate
from machines.model.events import HoldReleased
from machines.model.plan import GateName
from machines.scheduler.decide import decide
from machines.states import Phase
from rolloutd.cli.status import format_gate
from rolloutd.commands.audit_settlement import settle
from rolloutd.control.client import ApiError
from rolloutd.control.identity import Identity
from rolloutd.engine.background.audit_monitor import CONDITION, WHOLE_INTERVAL_S, AuditMonitor
from rolloutd.errors import Conflict
from rolloutd.ports.store import AuditReport
from rolloutd.store import open_store
from rolloutd.store.sqlite import database
from rolloutd.texts.reason_text import describe, lifted_by
from tests.machines.builders import reason_of
from tests.rolloutd.control_environment import PLAN, ControlEnvironment, control_environment
from tests.rolloutd.engine.test_daemon import running, until
from tests.rolloutd.slow_store import adapters_of, daemon_of

ADAM = Identity(1003, "adam", frozenset(), admin=True)
EVE = '{"kind":"person","name":"oscar","uid":1002}'


@asynccontextmanager
async def sqlite_environment(tmp_path: Path) -> AsyncIterator[ControlEnvironment]:
    """Serve a fleet whose facts are in SQLite."""

    async def opened(compile_plan: Any) -> Any:
        return await open_store(tmp_path / "state", compile_plan=compile_plan)

    async with control_environment(tmp_path, store=opened) as env:
        yield env


def run_sql(tmp_path: Path, script: str) -> None:
    """Change the database as a user with a shell would."""
    with closing(sqlite3.connect(tmp_path / "state" / database.FILE_NAME)) as connection:
        connection.executescript(script)


def forge_start(tmp_path: Path, rollout: str, digest: str) -> None:
    """Insert a yes of the owner and the opened gate."""
    run_sql(
        tmp_path,
        "INSERT INTO vote"
        " (id, rollout, gate, wave, digest, actor, yes, reason, at, teams, shown, nodes, more)"
        f" VALUES ('v9', '{rollout}', 'start', '', '{digest}', '{EVE}', 1, 'ok', 1, '[\"infra\"]', '[]',"
        " '[]', 0);"
        f"INSERT INTO opened (rollout, gate, wave, at) VALUES ('{rollout}', 'start', '', 1);",
    )


async def restart(env: ControlEnvironment) -> AuditMonitor:
    """Load the facts as a new daemon would, and verify them."""
    await env.restart()
    monitor = AuditMonitor(env.state)
    await monitor.verify()
    return monitor


async def test_forged_votes_start_nothing(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.submit()
        forge_start(tmp_path, rollout, env.state.index.rollout(rollout).digest.whole)
        await env.restart()
        assert decide(env.state.index, env.clock.now()).of(Admit), "without the audit it would start"
        await restart(env)
        decision = decide(env.state.index, env.clock.now())
        assert (decision.of(Admit), decision.of(OpenGate)) == ((), ())
        reason = reason_of(env.state.index, rollout, "p1", env.clock.now())
        assert describe(reason) == "vote/v9: the database has it, but no audit entry made it"
        assert lifted_by(reason) == "an admin: rolloutctl audit settle vote/v9 --keep audit --reason ..."
        assert "2 rows of the database differ from the audit" in env.state.conditions[CONDITION]


async def test_gate_with_forged_votes_is_in_doubt(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.submit()
        forge_start(tmp_path, rollout, env.state.index.rollout(rollout).digest.whole)
        await restart(env)
        gates = (await env.request("nora", "get", f"/v1/rollouts/{rollout}"))["gates"]
        start = next(each for each in gates if each["gate"] == "start")
        assert (start["state"], start["needs"]["owner"]) == ("in-doubt", {"want": 1, "have": 0})
        assert [vote["counts"] for vote in start["votes"]] == [False]
        assert "vote/v9: the database has it, but no audit entry made it" in start["missing"]
        assert {each["state"] for each in gates if each["gate"] != "start"} == {"not-asked"}
        assert format_gate(start).startswith("start is in doubt: vote/v9: the database has it")
        body = {"subjects": ["all"], "keep": "audit", "reason": "forged"}
        await env.request("adam", "post", "/v1/audit/settle", body)
        await AuditMonitor(env.state).verify()
        (start,) = [
            each
            for each in (await env.request("nora", "get", f"/v1/rollouts/{rollout}"))["gates"]
            if each["gate"] == "start"
        ]
        assert (start["state"], start["votes"]) == ("waiting", [])


async def test_rows_restored_from_audit_start_nothing(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.submit()
        forge_start(tmp_path, rollout, env.state.index.rollout(rollout).digest.whole)
        await restart(env)
        body = {"subjects": ["all"], "keep": "audit", "reason": "forged"}
        with pytest.raises(ApiError) as refused:
            await env.request("olga", "post", "/v1/audit/settle", body)
        assert refused.value.status == 403
        assert (await env.request("adam", "post", "/v1/audit/settle", body))["ok"]
        monitor = AuditMonitor(env.state)
        await monitor.verify()
        assert CONDITION not in env.state.conditions
        assert env.state.index.rollout(rollout).votes == ()
        reason = reason_of(env.state.index, rollout, "p1", env.clock.now())
        assert reason.code == "gate-start"
        entries = await env.state.store.read_audit(event="MismatchSettled")
        assert ['"name":"adam"' in entry.text for entry in entries] == [True, True]


async def test_settled_forgery_leaves_votes_possible(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.submit()
        forge_start(tmp_path, rollout, env.state.index.rollout(rollout).digest.whole)
        run_sql(tmp_path, "DELETE FROM opened")
        await env.restart()
        await env.vote("olga", rollout, "start")
        body = {"subjects": ["all"], "keep": "audit", "reason": "forged"}
        await env.request("adam", "post", "/v1/audit/settle", body)
        await env.vote("oscar", rollout, "start")
        assert [vote.id for vote in env.state.index.rollout(rollout).votes] == [
            f"{rollout}#v2",
            f"{rollout}#v3",
        ]


class HeldStore:
    """A store whose first verification answers late."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.verified, self.release = asyncio.Event(), asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def verify_audit(self, head: str | None = None, *, gently: bool = False) -> AuditReport:
        report: AuditReport = await self._inner.verify_audit(head)
        if not self.verified.is_set():
            self.verified.set()
            await self.release.wait()
        return report


async def test_settlement_outlasts_older_verification(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.submit()
        forge_start(tmp_path, rollout, env.state.index.rollout(rollout).digest.whole)
        await env.restart()
        held: Any = HeldStore(env.state.store)
        env.state.store = held
        verifying = asyncio.create_task(env.request("adam", "get", "/v1/audit/verify"))
        await held.verified.wait()
        body = {"subjects": ["all"], "keep": "audit", "reason": "forged"}
        settling = asyncio.create_task(env.request("adam", "post", "/v1/audit/settle", body))
        while not (settling.done() or env.audit_monitor._lock._waiters):
            await asyncio.sleep(0.01)
        held.release.set()
        assert (await settling)["ok"]
        assert not (await verifying)["ok"], "it answers with what it found, and is not repeated"
        assert CONDITION not in env.state.conditions
        assert not env.state.index.mismatches


async def test_accepted_rows_count_from_then_on(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.submit()
        forge_start(tmp_path, rollout, env.state.index.rollout(rollout).digest.whole)
        await restart(env)
        body = {"subjects": ["vote/v9"], "keep": "database", "reason": "repaired by hand"}
        await env.request("adam", "post", "/v1/audit/settle", body)
        body["subjects"] = [f"opened/{rollout}/start"]
        assert (await env.request("adam", "post", "/v1/audit/settle", body))["ok"]
        await restart(env)
        assert [each.gate for each in env.state.index.rollout(rollout).opened] == [GateName.START]
        await env.commit()  # the facts can still be written
        assert decide(env.state.index, env.clock.now()).of(CheckIfCurrent) == ()


SCOPES = {
    "hold": ("DELETE FROM hold", {"p1"}),
    "node": ("UPDATE node SET labels = '{\"team\":\"search\"}' WHERE name = 'p1'", {"p1"}),
    "freeze": ("DELETE FROM freeze", {"p1", "p2", "s1", "s2"}),
    "rollout": (
        "UPDATE rollout SET submitted_by = replace(submitted_by, 'olga', 'adam')",
        {"p1", "p2", "s1", "s2"},
    ),
}


@pytest.mark.parametrize("table", SCOPES)
async def test_mismatch_blocks_its_scope_alone(tmp_path: Path, table: str) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.start(
            text=PLAN.replace("soak:", 'canary: {select: "!x", max_parallel: 9}\n  soak:')
        )
        await env.request("adam", "put", "/v1/holds", {"node": "p1", "reason": "disk"})
        await env.request("adam", "post", "/v1/freezes", {"scope": "team/idle", "reason": "sale"})
        script, expected = SCOPES[table]
        run_sql(tmp_path, script)
        await restart(env)
        reasons = {
            name: reason_of(env.state.index, rollout, name, env.clock.now()).code
            for name in ("p1", "p2", "s1", "s2")
        }
        assert {name for name, code in reasons.items() if code == "audit-mismatch"} == expected


async def test_forged_step_keeps_driver_waiting(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.start()
        await env.isolate(rollout, "p1")
        run_sql(tmp_path, "UPDATE target SET phase = 'verifying' WHERE node = 'p1'")
        await env.restart()
        daemon = daemon_of(env, adapters_of(env, tmp_path))
        async with running(daemon):
            await asyncio.wait_for(daemon.first_iteration_done.wait(), 60.0)
            assert env.phase(rollout, "p1") is Phase.VERIFYING
            assert (await env.state.store.load_steps(rollout, "p1"))[-1].step == "isolate.0.command"


async def test_settlement_verifies_before_the_lock(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.submit()
        forge_start(tmp_path, rollout, env.state.index.rollout(rollout).digest.whole)
        await restart(env)
        verify, locked = env.state.store.verify_audit, []

        async def watched(head: str | None = None, *, gently: bool = False) -> AuditReport:
            locked.append(env.state._write_lock._is_exclusive)
            return await verify(head, gently=gently)

        env.state.store.verify_audit = watched  # type: ignore[method-assign]
        body = {"subjects": ["all"], "keep": "audit", "reason": "forged"}
        assert (await env.request("adam", "post", "/v1/audit/settle", body))["ok"]
        assert locked == [False, False]


async def test_settlement_refuses_row_that_changed_since(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        await env.request("adam", "put", "/v1/holds", {"node": "p1", "reason": "disk"})
        await env.request("adam", "put", "/v1/holds", {"node": "s1", "reason": "disk"})
        run_sql(tmp_path, "UPDATE hold SET reason = 'forged'")
        report = await env.state.store.verify_audit()
        held = HoldReleased("p1", "person", "adam", ADAM.actor, env.clock.now())
        await env.state.commit([held], cause="test")
        async with env.state.exclusive_commit():
            with pytest.raises(Conflict, match="hold/p1/person/adam: it changed since the verification"):
                await settle(env.state, ADAM, report, ["all"], "audit", "forged")
            (event,) = await settle(env.state, ADAM, report, ["hold/s1/person/adam"], "audit", "forged")
        assert event.row["reason"] == "disk"


class StuckStore(HeldStore):
    """A store whose whole verification does not end."""

    async def verify_audit(self, head: str | None = None, *, gently: bool = False) -> AuditReport:
        self.verified.set()
        await self.release.wait()
        report: AuditReport = await self._inner.verify_audit(head)
        return report


async def test_trusted_start_waits_for_no_whole_verification(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.start()
        await env.isolate(rollout, "p1")
        await AuditMonitor(env.state).verify()
        await env.state.store.sign_audit_checkpoint(env.clock.now() - WHOLE_INTERVAL_S)
        await env.restart()
        held: Any = StuckStore(env.state.store)
        env.state.store = held
        daemon = daemon_of(env, adapters_of(env, tmp_path))
        async with running(daemon):
            await asyncio.wait_for(daemon.first_iteration_done.wait(), 60.0)
            assert (rollout, "p1") in daemon._drivers
            await asyncio.wait_for(held.verified.wait(), 60.0)  # it is due, and runs beside
            held.release.set()


async def test_distrusted_start_verifies_whole_audit_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with sqlite_environment(tmp_path) as env:
        await env.start()
        await AuditMonitor(env.state).verify()
        run_sql(tmp_path, "DELETE FROM opened")
        await env.restart()
        held: Any = StuckStore(env.state.store)
        env.state.store = held
        daemon = daemon_of(env, adapters_of(env, tmp_path))
        async with running(daemon):
            await asyncio.wait_for(held.verified.wait(), 60.0)
            assert not daemon.first_iteration_done.is_set()
            held.release.set()
            await asyncio.wait_for(daemon.first_iteration_done.wait(), 60.0)
        assert "the checkpoint is not trusted: rows of rollout" in caplog.text


async def test_row_in_doubt_leaves_no_checkpoint(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        await env.start()
        monitor = AuditMonitor(env.state)
        await monitor.verify()
        assert (await env.state.store.verify_audit_checkpoint()).problem == ""
        run_sql(tmp_path, "DELETE FROM opened")
        await monitor.verify()
        assert (await env.state.store.verify_audit_checkpoint()).problem == "the database has none"
        body = {"subjects": ["all"], "keep": "audit", "reason": "forged"}
        await env.request("adam", "post", "/v1/audit/settle", body)
        assert (await env.state.store.verify_audit_checkpoint()).problem == ""


async def test_row_altered_while_running_found_within_an_hour(tmp_path: Path) -> None:
    async with sqlite_environment(tmp_path) as env:
        rollout = await env.start()
        monitor = AuditMonitor(env.state)
        await monitor.verify()
        run_sql(tmp_path, "DELETE FROM opened")
        assert await monitor.check()
        assert [each.subject for each in env.state.index.mismatches] == [f"opened/{rollout}/start"]


async def test_transition_logged_once_with_its_cause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "rolloutd")
    async with control_environment(tmp_path) as env:
        rollout = await env.start()
        daemon = daemon_of(env, adapters_of(env, tmp_path))
        async with running(daemon):
            await until(env, lambda: env.phase(rollout, "p1") is Phase.DONE)
        moves = [each for each in caplog.records if " \u2192 " in each.getMessage()]
        entries = await env.state.store.read_audit(event="PhaseMoved")
        assert len(moves) == len(entries) >= 4
        assert all(each.cause for each in moves)  # type: ignore[attr-defined]
