"""The store on a real PostgreSQL: lost connections, rights, versions, and what SQLite's shares with it."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from machines.model.events import HoldTaken, NodesDiscovered, VoteCast
from machines.model.rollout import Actor, ActorKind, Hold
from rolloutd.errors import FactsBehind, LeadershipLost, StoreFailed
from rolloutd.ports import AuditEntry
from rolloutd.store import Store, open_store, prepare_postgresql
from rolloutd.store.postgresql import backend, tables
from rolloutd.store.postgresql.commit_mark import FILE_NAME as MARK
from rolloutd.store.postgresql.connection import Address
from rolloutd.store.sqlite import database
from tests.contracts.store_backends import (
    ALICE,
    moves_to_done,
    node,
    plan_of,
    rollout_opened,
    vote,
    write,
)
from tests.support.cutting_proxy import Cut, CuttingProxy
from tests.support.postgresql import OWNER, ROLE, Postgresql
from tests.support.waiting import wait_in_loop_until

pytestmark = pytest.mark.servers("postgresql")

LEASE_S = 2.0


@pytest.fixture
def name(postgresql: Postgresql) -> str:
    return postgresql.emptied_database()


@pytest.fixture
def proxy(postgresql: Postgresql) -> Iterator[CuttingProxy]:
    # A socket's path has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="cut", dir="/tmp") as directory:
        made = CuttingProxy(Path(directory), postgresql.directory)
        yield made
        made.close()


async def opened(address: Address, state_dir: Path) -> Store:
    state_dir.mkdir(exist_ok=True)
    return await open_store(state_dir, address, compile_plan=plan_of)


def through(proxy: CuttingProxy, name: str) -> Address:
    return Address(f"host={proxy.directory} dbname={name} user={ROLE}", lease_s=LEASE_S)


async def all_entries(store: Store) -> list[AuditEntry]:
    return list(await store.read_audit(limit=10_000))


def hold(number: int) -> HoldTaken:
    return HoldTaken(Hold("n1", "person", f"h{number}", ALICE, "why", 5.0))


HISTORY = (
    (NodesDiscovered((node("n1", rack="r1"), node("n2"))),),
    (rollout_opened(), VoteCast("r1", vote())),
    moves_to_done("n1"),
    (hold(1),),
)


# -- one chain ------------------------------------------------------------------


async def test_chain_is_the_same_on_both_databases(postgresql: Postgresql, name: str, tmp_path: Path) -> None:
    there = await opened(postgresql.address(name), tmp_path / "there")
    here = await open_store(tmp_path / "here", compile_plan=plan_of)
    for events in HISTORY:
        await write(there, *events)
        await write(here, *events)
    assert await all_entries(there) == await all_entries(here)
    assert replace(await there.load_snapshot(), epoch=1) == await here.load_snapshot()
    await there.close()
    await here.close()


@pytest.mark.parametrize("text", ["a\0b", "a\udc80b", "\U0001f600", "é", "a\\u0000b"])
async def test_text_of_any_characters_is_kept_and_verified(
    postgresql: Postgresql, name: str, tmp_path: Path, text: str
) -> None:
    store = await opened(postgresql.address(name), tmp_path / "s")
    here = await open_store(tmp_path / "here", compile_plan=plan_of)
    someone = Actor(ActorKind.PERSON, f"who {text}", 1)
    events = (
        NodesDiscovered((node("n1", note=text),)),
        replace(hold(1), hold=replace(hold(1).hold, reason=text)),
    )
    for each in (store, here):
        await write(each, *events, actor=someone)
    assert await all_entries(store) == await all_entries(here)
    assert (await store.verify_audit()).ok
    assert len(await store.read_audit(node="n1")) == 1
    assert not await store.find_changes_in_effect("n1", ["r1"])
    await store.close()
    await here.close()
    with postgresql.connect(name) as admin:
        row = admin.execute(
            "SELECT count(*) FROM rolloutd.audit WHERE entry OPERATOR(rolloutd.->>) 'event' = 'HoldTaken'"
        ).fetchone()
    assert row == (1,)


def test_tables_are_the_same_on_both_databases(postgresql: Postgresql, name: str) -> None:
    kinds = {"bigint": "INTEGER", "double precision": "REAL", "text": "TEXT", "bytea": "BLOB"}
    with postgresql.connect(name) as admin:
        rows = admin.execute(
            "SELECT table_name, column_name, data_type, is_nullable = 'NO', column_default"
            " FROM information_schema.columns WHERE table_schema = 'rolloutd'"
        ).fetchall()
    theirs = {
        (table, column, kinds[kind], required, (default or "").replace("::text", ""))
        for table, column, kind, required, default in rows
        if column != "rowid" and table != "lease"
    }
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        database.create_tables(connection)
        names = [row[0] for row in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        ours = {
            # A column of a key is required in PostgreSQL, and SQLite's generated ones are filled there.
            (table, column, kind, bool(required or key), default or "")
            for table in names
            for _, column, kind, required, default, key, _ in connection.execute(
                f"PRAGMA table_xinfo({table})"
            )
        }
    assert theirs == ours
    assert tables.latest_version() == len(database._migrations()), "each migration is there for both"


def test_text_and_order_of_values_are_sqlites(postgresql: Postgresql, name: str) -> None:
    with postgresql.connect(name) as admin:
        collations = admin.execute(
            "SELECT DISTINCT collation_name FROM information_schema.columns"
            " WHERE table_schema = 'rolloutd' AND data_type = 'text'"
        ).fetchall()
    assert collations == [("C",)]


# -- rights ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET actor = 'x'",
        "DELETE FROM audit",
        "TRUNCATE audit",
        "ALTER TABLE audit DISABLE TRIGGER ALL",
        "DROP TRIGGER refuse_change ON audit",
        "DELETE FROM term",
        "CREATE TABLE rolloutd.more (x int)",
    ],
)
async def test_daemons_role_cannot_touch_written_audit(
    postgresql: Postgresql, name: str, tmp_path: Path, statement: str
) -> None:
    store = await opened(postgresql.address(name), tmp_path / "s")
    await write(store, hold(1))
    await store.close()
    with postgresql.connect(name, ROLE) as stolen:
        stolen.execute("SET search_path = rolloutd")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stolen.execute(statement)


@pytest.mark.parametrize("statement", ["UPDATE audit SET actor = 'x'", "DELETE FROM audit", "TRUNCATE audit"])
async def test_owner_cannot_touch_audit_by_accident(
    postgresql: Postgresql, name: str, tmp_path: Path, statement: str
) -> None:
    store = await opened(postgresql.address(name), tmp_path / "s")
    await write(store, hold(1))
    await store.close()
    with postgresql.connect(name, OWNER) as owner:
        owner.execute("SET search_path = rolloutd")
        # Also where other triggers are switched off.
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="never altered"):
            owner.execute(statement)


@pytest.mark.parametrize(
    "change",
    [
        "seq + 2, entry, hash, at, actor, event, rollout, node",
        "seq + 1, entry, hash, at, actor, event, rollout, node",
        "seq + 1, 'x', encode(sha256((hash || 'x')::bytea), 'hex'), at, actor, event, rollout, node",
        "seq + 1, entry, encode(sha256((hash || entry)::bytea), 'hex'), at, 'x', event, rollout, node",
    ],
    ids=["gap", "wrong hash", "no JSON", "other columns"],
)
async def test_entry_that_does_not_follow_is_refused(
    postgresql: Postgresql, name: str, tmp_path: Path, change: str
) -> None:
    store = await opened(postgresql.address(name), tmp_path / "s")
    await write(store, hold(1))
    await store.close()
    with postgresql.connect(name, ROLE) as stolen:
        stolen.execute("SET search_path = rolloutd")
        with pytest.raises((psycopg.IntegrityError, psycopg.DataError)):
            stolen.execute(f"INSERT INTO audit SELECT {change} FROM audit ORDER BY seq DESC LIMIT 1")


def test_role_that_could_become_the_owner_is_refused(postgresql: Postgresql, name: str) -> None:
    dsn = postgresql.dsn(name, OWNER)
    for role in (OWNER, "postgres"):
        with pytest.raises(StoreFailed, match=f"role {role}: it could undo what protects the audit"):
            prepare_postgresql(dsn, None, role)
    with pytest.raises(StoreFailed, match="role nobody: there is none"):
        prepare_postgresql(dsn, None, "nobody")


# -- versions -------------------------------------------------------------------


async def test_unprepared_database_names_the_command(postgresql: Postgresql, tmp_path: Path) -> None:
    name = postgresql.make_database("template1")
    with pytest.raises(StoreFailed, match="it is not prepared; run `rolloutctl store prepare --dsn"):
        await opened(postgresql.address(name), tmp_path / "s")
    assert "made, version" in prepare_postgresql(postgresql.dsn(name, OWNER), None, ROLE)
    assert "unchanged, version" in prepare_postgresql(postgresql.dsn(name, OWNER), None, ROLE)
    store = await opened(postgresql.address(name), tmp_path / "s")
    await write(store, hold(1))
    await store.close()
    postgresql.drop_database(name)


@pytest.mark.parametrize(
    ("version", "advice"), [("21", "run `rolloutctl store prepare"), ("999", "start that")]
)
async def test_other_version_of_tables_is_refused(
    postgresql: Postgresql, name: str, tmp_path: Path, version: str, advice: str
) -> None:
    with postgresql.connect(name, OWNER) as owner:
        owner.execute("UPDATE rolloutd.meta SET value = %s WHERE key = 'schema'", (version,))
    try:
        with pytest.raises(StoreFailed, match=advice):
            await opened(postgresql.address(name), tmp_path / "s")
    finally:
        with postgresql.connect(name, OWNER) as owner:
            owner.execute(
                "UPDATE rolloutd.meta SET value = %s WHERE key = 'schema'", (str(tables.latest_version()),)
            )


def test_password_is_read_from_its_file_and_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "password"
    address = Address("host=/nowhere dbname=x user=y", file)
    with pytest.raises(StoreFailed, match="the database's password cannot be read"):
        backend.PostgresqlBackend(address, tmp_path).read_now(lambda connection: None)
    file.write_text("hunter2\n")
    with pytest.raises(StoreFailed) as failed:
        backend.PostgresqlBackend(address, tmp_path).read_now(lambda connection: None)
    assert "hunter2" not in str(failed.value)


# -- lost connections -----------------------------------------------------------


@pytest.mark.parametrize("cut", Cut)
async def test_connection_lost_at_any_message_writes_once_or_never(
    postgresql: Postgresql, name: str, proxy: CuttingProxy, tmp_path: Path, cut: Cut
) -> None:
    store = await opened(through(proxy, name), tmp_path / "s")
    await write(store, rollout_opened(), *HISTORY[0])
    answered = refused = 0
    for number in range(1, 200):
        before = await all_entries(store)
        # Only the writer sends messages meanwhile.
        proxy.arm(number, cut)
        try:
            entries = await asyncio.wait_for(write(store, hold(number), hold(number + 1000)), 60)
        except (FactsBehind, LeadershipLost):
            raise
        except StoreFailed:
            entries = ()
            refused += 1
        else:
            answered += 1
        is_past = not proxy.has_cut
        proxy.arm(None)
        assert (await all_entries(store))[len(before) :] == list(entries), "what was answered is there, once"
        proxy.end_ghosts()
        if is_past:
            break
    else:
        pytest.fail("a commit has fewer messages than that")
    assert refused > 5
    # A late COMMIT and the look whether it took effect come to the server at once: either may be first.
    least = 1 if cut is Cut.LATE else 2
    assert answered >= least, "one that was lost at its COMMIT, and the last one, which was not"
    assert (await store.verify_audit()).ok
    assert (await store.verify_audit_checkpoint()).problem in ("", "the database has none")
    await store.close()


async def test_database_away_for_longer_than_the_lease_ends_the_daemon(
    postgresql: Postgresql, name: str, proxy: CuttingProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long that no pause of a loaded machine ends a transaction; a clock of the test lets it pass.
    store = await opened(replace(through(proxy, name), lease_s=60.0), tmp_path / "s")
    monkeypatch.setattr(backend, "boot_time_s", itertools.count(0.0, 40.0).__next__)
    await write(store, hold(1))
    # By its text: how many messages precede it differs, because the lease's go through the proxy too.
    proxy.arm(1, Cut.AFTER, b"COMMIT\0")
    proxy.is_refusing = True
    with pytest.raises(FactsBehind, match="went away during a commit, and for longer than the lease"):
        await write(store, hold(2))
    proxy.is_refusing = False
    await store.close()


async def test_cancelled_read_of_an_unknown_outcome_is_repeated(
    postgresql: Postgresql, name: str, proxy: CuttingProxy, tmp_path: Path
) -> None:
    store = await opened(replace(through(proxy, name), lease_s=20.0), tmp_path / "s")
    await write(store, hold(1))
    proxy.arm(1, Cut.AFTER, b"COMMIT\0")
    proxy.is_refusing = True
    writing = asyncio.create_task(write(store, hold(2)))
    try:
        await wait_in_loop_until(lambda: proxy.has_cut)
        with postgresql.connect(name) as other, postgresql.connect(name) as admin:
            other.execute("BEGIN; SELECT 1 FROM rolloutd.term FOR UPDATE")
            proxy.is_refusing = False
            for _ in range(2):
                await wait_in_loop_until(lambda: bool(_cancel_waiting(admin, "transactionid", "tuple")))
                assert not writing.done(), "it is unknown whether it was written"
            other.execute("COMMIT")
        assert len(await writing) == 1
        assert len(await all_entries(store)) == 2
    finally:
        await asyncio.wait((writing,))
        await store.close()


async def test_cut_before_commit_is_refused_and_resumes(
    postgresql: Postgresql, name: str, proxy: CuttingProxy, tmp_path: Path
) -> None:
    store = await opened(through(proxy, name), tmp_path / "s")
    proxy.arm(1)
    proxy.is_refusing = True
    for number in range(3):
        with pytest.raises(StoreFailed, match="does not answer; the daemon resumes"):
            await write(store, hold(number))
    proxy.is_refusing = False
    assert len(await write(store, hold(5))) == 1
    await store.close()


async def test_commit_after_a_locked_term_is_written(
    postgresql: Postgresql, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "LOCK_LIMIT_MS", 50)
    store = await opened(postgresql.address(name), tmp_path / "s")
    with postgresql.connect(name) as other:
        other.execute("BEGIN; SELECT 1 FROM rolloutd.term FOR UPDATE")
        with pytest.raises(StoreFailed, match=r"another session keeps .* locked; see pg_stat_activity"):
            await write(store, hold(1))
        other.execute("COMMIT")
    assert len(await write(store, hold(2))) == 1
    await store.close()


async def test_reader_resumes_on_a_new_connection(
    postgresql: Postgresql, name: str, proxy: CuttingProxy, tmp_path: Path
) -> None:
    store = await opened(through(proxy, name), tmp_path / "s")
    for number in range(1, 4):
        proxy.arm(number, Cut.AFTER)
        assert await store.load_snapshot()
    await store.close()


async def test_takeover_starts_from_the_checkpoint(postgresql: Postgresql, name: str, tmp_path: Path) -> None:
    """Of the daemon that led before, if both have the same redaction key."""
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)

    async def opened_with_key(state_dir: str) -> Store:
        (tmp_path / state_dir).mkdir()
        address = postgresql.address(name)
        return await open_store(tmp_path / state_dir, address, compile_plan=plan_of, redaction_key_file=key)

    for state_dir, has_checkpoint in (("a", False), ("b", True), ("c", True)):
        store = await opened_with_key(state_dir)
        await write(store, hold(ord(state_dir)))
        problem = (await store.verify_audit_checkpoint()).problem
        assert problem == ("" if has_checkpoint else "the database has none")
        if not has_checkpoint:
            assert (await store.verify_audit()).ok
            await store.sign_audit_checkpoint(5.0, all_rows=True)
            await write(store, hold(1))
        await store.close()
    key.write_bytes(b"another" * 5)
    store = await opened_with_key("d")
    assert (await store.verify_audit_checkpoint()).problem == "its signature is of another key"
    await store.close()


async def test_takeover_during_outage_ends_the_old_daemon(
    postgresql: Postgresql, name: str, proxy: CuttingProxy, tmp_path: Path
) -> None:
    old = await opened(through(proxy, name), tmp_path / "old")
    await write(old, hold(1))
    new = await opened(postgresql.address(name), tmp_path / "new")
    with pytest.raises(LeadershipLost, match="has begun term"):
        await write(old, hold(2))
    await write(new, hold(2))
    await old.close()
    await new.close()


async def test_commit_cancelled_while_it_waits_for_a_standby_is_not_answered(
    postgresql: Postgresql, name: str, tmp_path: Path
) -> None:
    store = await opened(postgresql.address(name), tmp_path / "s")
    writing: asyncio.Task[Any] | None = None
    try:
        with postgresql.connect() as admin:
            # No standby has this name.
            admin.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
            admin.execute("SELECT pg_reload_conf()")
            try:
                await wait_in_loop_until(lambda: _synchronous_names(postgresql) == "nobody")
                writing = asyncio.create_task(write(store, hold(1)))
                for _ in range(2):  # the batch's own commit, and the one that would confirm it
                    await wait_in_loop_until(lambda: bool(_cancel_waiting(admin, "SyncRep")))
                    assert not writing.done(), "it is on one disk alone"
            finally:
                admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
                admin.execute("SELECT pg_reload_conf()")
        assert len(await writing) == 1
        assert len(await all_entries(store)) == 1
    finally:
        if writing is not None:
            await asyncio.wait((writing,))
        await store.close()


def _synchronous_names(server: Postgresql) -> str:
    with server.connect() as other:
        (names,) = other.execute("SHOW synchronous_standby_names").fetchone() or ("",)
        return str(names)


def _cancel_waiting(admin: psycopg.Connection[Any], *events: str) -> list[Any]:
    """Cancel the statements that wait for this, and return their sessions."""
    sql = "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = ANY(%s)"
    return admin.execute(sql, (list(events),)).fetchall()


# -- the mark -------------------------------------------------------------------


async def test_lost_tail_is_named_and_stops_the_daemon(
    postgresql: Postgresql, name: str, tmp_path: Path
) -> None:
    address = postgresql.address(name)
    store = await opened(address, tmp_path / "s")
    entries = [(await write(store, hold(number)))[0] for number in range(3)]
    await store.close()
    mark = tmp_path / "s" / MARK
    mark.write_text(f"{1:020d} {7:020d} {entries[2].hash}\n")
    with pytest.raises(LeadershipLost, match="last entry is 3, but 7 was written: entries 4 to 7 are gone"):
        await opened(address, tmp_path / "s")
    mark.write_text(f"{1:020d} {3:020d} {'f' * 64}\n")
    with pytest.raises(LeadershipLost, match="its entry 3 is another than was written"):
        await opened(address, tmp_path / "s")
    mark.unlink()
    await (await opened(address, tmp_path / "s")).close()
