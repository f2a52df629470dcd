"""The store's file: who may open it, which files it takes for its own, how it grows."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from machines.model.events import HoldTaken
from machines.model.rollout import Hold
from rolloutd.admin.forgotten_runs import set_aside
from rolloutd.errors import StoreFailed
from rolloutd.ports import WITHHELD
from rolloutd.store import SqliteBackend, StateLock, open_store
from rolloutd.store.sqlite import backup, commit_mark, database
from tests.contracts.store_backends import ALICE, plan_of, rollout_opened, write

HELD = HoldTaken(Hold("n1", "test", "1", ALICE, "", 1.0))


def raw(path: Path) -> closing[sqlite3.Connection]:
    return closing(sqlite3.connect(path, isolation_level=None))


async def test_a_new_file_is_ours_private_and_durable(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "deep" / "state", compile_plan=plan_of)
    await write(store, HELD)
    assert stat.S_IMODE(store.backend.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.backend.path.parent.stat().st_mode) == 0o700
    assert store._writer is not None
    pragmas = ("journal_mode", "synchronous", "foreign_keys", "application_id", "user_version")

    def ask(connection: sqlite3.Connection) -> list[object]:
        return [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas]

    newest = len(database._migrations())
    assert await store._writer._executor.run(ask) == ["wal", 2, 1, database.APPLICATION_ID, newest]
    await store.close()


async def test_every_table_is_strict(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of)
    await store.close()
    with raw(store.backend.path) as connection:
        lax = connection.execute(
            "SELECT name FROM pragma_table_list WHERE NOT strict AND name NOT GLOB 'sqlite*'"
        )
        assert lax.fetchall() == []
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("PRAGMA user_version = 99", "newer rolloutd .schema 99"),
        ("PRAGMA application_id = 7", "another program"),
    ],
)
async def test_a_file_of_a_newer_version_or_another_program_is_refused(
    tmp_path: Path, sql: str, says: str
) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of)
    await store.close()
    with raw(store.backend.path) as connection:
        connection.execute(sql)
    before = store.backend.path.read_bytes()
    for read_only in (False, True):
        with pytest.raises(StoreFailed, match=says):
            await open_store(tmp_path, compile_plan=plan_of, read_only=read_only)
    assert store.backend.path.read_bytes() == before


async def test_what_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / database.FILE_NAME).write_bytes(b"this is not a database, whoever wrote it" * 100)
    with pytest.raises(StoreFailed, match="damaged"):
        await open_store(tmp_path, compile_plan=plan_of)
    (tmp_path / database.FILE_NAME).unlink()
    await (await open_store(tmp_path, compile_plan=plan_of)).close()


async def test_a_state_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match="name another one"):
        await open_store(tmp_path / "file" / "state", compile_plan=plan_of)
    (tmp_path / "state" / database.FILE_NAME).mkdir(parents=True)
    with pytest.raises(StoreFailed, match="cannot be opened"):
        await open_store(tmp_path / "state", compile_plan=plan_of)


async def test_a_state_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    for mode in (0o777, 0o770, 0o702):
        state.chmod(mode)
        with pytest.raises(StoreFailed, match=f"mode {mode:o}.*chmod 700"):
            await open_store(state, compile_plan=plan_of)
    assert not list(state.iterdir())
    state.chmod(0o755)
    await (await open_store(state, compile_plan=plan_of)).close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
async def test_a_state_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 65534, 65534)
    with pytest.raises(StoreFailed, match="belongs to uid 65534, the daemon runs as uid 0"):
        await open_store(state, compile_plan=plan_of)


def test_a_migration_that_fails_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "db"
    database.open_writer(path).close()
    good = database._migrations()
    broken = (len(good) + 1, "CREATE TABLE half (a TEXT) STRICT; CREATE TABLE half (a TEXT) STRICT;")
    with monkeypatch.context() as patch:
        patch.setattr(database, "_migrations", lambda: [*good, broken])
        with pytest.raises(StoreFailed, match="half"):
            database.open_writer(path)
    with closing(database.open_writer(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (len(good),)
        assert connection.execute("SELECT name FROM sqlite_schema WHERE name = 'half'").fetchall() == []


def test_new_database_equals_migrated_one(tmp_path: Path) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as migrated:
        for number, script in database._migrations():
            database._migrate(migrated, number, script)
        with closing(database.open_writer(tmp_path / "db")) as new:
            assert list(new.iterdump()) == list(migrated.iterdump())
            assert database.has_current_schema(new)


def test_migrations_are_numbered_without_gaps() -> None:
    directory = Path(database.__file__).parent / "migrations"
    names = sorted(path.name for path in directory.glob("*.sql"))
    assert [int(name.partition("_")[0]) for name in names] == list(range(1, len(names) + 1))


# -- one daemon per directory -------------------------------------------------------------


def test_the_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from rolloutd.store import StateLock, open_store\n"
        "from tests.contracts.store_backends import plan_of, rollout_opened, write\n"
        "async def main():\n"
        "    lock = StateLock(Path(sys.argv[1]))\n"
        "    await lock.acquire()\n"
        "    store = await open_store(Path(sys.argv[1]), compile_plan=plan_of)\n"
        "    await write(store, rollout_opened())\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    root = Path(__file__).parents[3]
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=root, timeout=60, check=False)
    assert ended.returncode == -9

    async def after() -> None:
        lock = StateLock(tmp_path)
        await lock.acquire()
        store = await open_store(tmp_path, compile_plan=plan_of)
        snapshot = await store.load_snapshot()
        assert [rollout.id for rollout in snapshot.rollouts] == ["r1"]
        assert snapshot.epoch == 2
        await store.close()
        await lock.release()

    asyncio.run(after())
    assert SqliteBackend(tmp_path / database.FILE_NAME).verify_chain().entries == 1


# -- files that lose their names -------------------------------------------------------------


async def test_nothing_is_written_into_a_database_that_was_moved_away(tmp_path: Path) -> None:
    """SQLite would write on and answer, and all would be gone; put back, it goes on by itself."""
    store = await open_store(tmp_path, compile_plan=plan_of)
    await write(store, rollout_opened())
    store.backend.path.rename(tmp_path / "moved")
    for replacing in (False, True):
        if replacing:
            store.backend.path.write_bytes((tmp_path / "moved").read_bytes())
        with pytest.raises(StoreFailed, match=r"moved, removed or replaced; restore it"):
            await write(store, HELD)
    (tmp_path / "moved").rename(store.backend.path)
    await write(store, HELD)
    await store.close()
    assert SqliteBackend(store.backend.path).verify_chain().entries == 2


async def test_a_state_directory_that_was_replaced_ends_nobody_who_writes(tmp_path: Path) -> None:
    """A look that is refused is an answer too, and a directory that is put back is gone on with."""
    home, away = tmp_path / "home", tmp_path / "away"
    store = await open_store(home, compile_plan=plan_of)
    await write(store, rollout_opened())
    home.rename(away)
    home.write_text("no directory")
    with pytest.raises(StoreFailed, match=r"moved, removed or replaced"):
        await write(store, HELD)
    home.unlink()
    home.symlink_to(home)  # a look at it fails in another way
    with pytest.raises(StoreFailed, match=r"cannot be inspected"):
        await write(store, HELD)
    home.unlink()
    away.rename(home)
    await write(store, HELD)
    await store.close()
    assert SqliteBackend(store.backend.path).verify_chain().entries == 2


@pytest.mark.parametrize("suffix", ["-wal", "-shm"])
async def test_what_a_removed_log_held_is_saved_by_a_stop(tmp_path: Path, suffix: str) -> None:
    """Somebody takes the log for rubbish while the disk is full: no more is put into it."""
    store = await open_store(tmp_path, compile_plan=plan_of)
    await write(store, rollout_opened())
    Path(f"{store.backend.path}{suffix}").unlink()
    with pytest.raises(StoreFailed, match="stop the daemon, which saves what they held"):
        await write(store, HELD)
    await store.close()
    assert SqliteBackend(store.backend.path).verify_chain().entries == 1
    again = await open_store(tmp_path, compile_plan=plan_of)
    await write(again, HELD)
    await again.close()
    assert SqliteBackend(store.backend.path).verify_chain().entries == 2


async def test_a_log_without_its_database_is_not_overwritten(tmp_path: Path) -> None:
    """SQLite would remove it, and it may hold what is nowhere else."""
    log = tmp_path / f"{database.FILE_NAME}-wal"
    log.write_bytes(b"precious")
    with pytest.raises(StoreFailed, match="put the database back"):
        await open_store(tmp_path, compile_plan=plan_of)
    assert log.read_bytes() == b"precious"


@pytest.mark.parametrize("lost", ["log", "newer database", "database"])
async def test_database_older_than_its_last_commit_is_refused(tmp_path: Path, lost: str) -> None:
    """The daemon was killed; then its log was deleted, or an older copy took the database's place."""
    store = await open_store(tmp_path, compile_plan=plan_of)
    await write(store, rollout_opened())
    await store.close()
    copy = (tmp_path / database.FILE_NAME).read_bytes()
    store = await open_store(tmp_path, compile_plan=plan_of)
    await write(store, HELD)
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path, killed, ignore=shutil.ignore_patterns("lock", "killed"))
    await store.close()
    path = killed / database.FILE_NAME
    match lost:
        case "log":
            Path(f"{path}-wal").unlink()
            Path(f"{path}-shm").unlink(missing_ok=True)
        case "newer database":
            path.write_bytes(copy)
            Path(f"{path}-wal").unlink()
        case _:
            path.unlink()
            Path(f"{path}-wal").unlink()
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(StoreFailed, match=r"put (it )?back") as refused:
        await open_store(killed, compile_plan=plan_of)
    assert (path.read_bytes() if path.exists() else None) == before, "it is as it was"
    if lost != "database":
        assert "its last entry is 1 of term 1, but 2 of term 2 was written" in str(refused.value)
        result = backup.restore(killed, path, set_aside)
        assert (result.verification.entries, result.epoch) == (1, 2)
        again = await open_store(killed, compile_plan=plan_of)
        assert (await again.load_snapshot()).epoch == 3, "no node's fence knows a newer term"
        await again.close()


async def test_killed_daemon_leaves_a_database_that_opens(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of)
    await write(store, rollout_opened())
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path, killed, ignore=shutil.ignore_patterns("lock", "killed"))
    await store.close()
    again = await open_store(killed, compile_plan=plan_of)
    await again.close()
    commit_mark.mark_path(again.backend.path).write_text("no mark\n")
    await (await open_store(killed, compile_plan=plan_of)).close()
    assert commit_mark.read_mark(again.backend.path) == (3, 1)


# -- reading only ----------------------------------------------------------------------------


async def test_readers_read_beside_the_writer_and_write_nothing(tmp_path: Path) -> None:
    store = await open_store(tmp_path, compile_plan=plan_of)
    await write(store, rollout_opened())
    reader = await open_store(tmp_path, compile_plan=plan_of, read_only=True)
    assert await reader.load_snapshot() == await store.load_snapshot()
    with pytest.raises(StoreFailed, match="reading only"):
        await write(reader, HELD)
    await write(store, HELD)
    head = await reader.latest_audit_entry()
    assert head is not None
    assert json.loads(head.text)["event"] == "HoldTaken"
    await reader.close()
    await store.close()


async def test_there_is_nothing_to_read_before_the_first_start(tmp_path: Path) -> None:
    with pytest.raises(StoreFailed, match="cannot be opened"):
        await open_store(tmp_path, compile_plan=plan_of, read_only=True)
    (tmp_path / database.FILE_NAME).touch()
    with pytest.raises(StoreFailed, match="holds nothing yet"):
        await open_store(tmp_path, compile_plan=plan_of, read_only=True)


def test_variables_of_other_sources_wait_for_answers() -> None:
    sources = {"h1": ["ansible:hosts.yml"], "k1": ["ams"], "b1": ["ansible:hosts.yml", "ams"]}
    insert = "INSERT INTO node (name, kind, sources, labels, connection) VALUES (?, 'host', ?, '{}', ?)"
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        *before, (number, script) = list(database._migrations())[:14]
        for earlier, text in before:
            database._migrate(connection, earlier, text)
        for name, of_node in sources.items():
            connection.execute(insert, (name, json.dumps(of_node), '{"a": 1}'))
        database._migrate(connection, number, script)
        rows = connection.execute("SELECT name, connection FROM node").fetchall()
    marked = {"a": 1, WITHHELD: True}
    assert {name: json.loads(text) for name, text in rows} == {"h1": {"a": 1}, "k1": marked, "b1": marked}


UNIT = Path(__file__).parents[3] / "deploy" / "systemd" / "rolloutd.service"

FIND_TEMPORARY_DATABASE = """
import pathlib, sqlite3
connection = sqlite3.connect("", isolation_level=None)
connection.executescript("CREATE TABLE a (b); BEGIN")
connection.executemany("INSERT INTO a VALUES (?)", ((bytes(1000),) for _ in range(20_000)))
for number in range(3, 20):
    place = pathlib.Path(f"/proc/self/fd/{number}")
    if place.is_symlink():
        print(place.readlink())
"""


def test_service_keeps_temporary_databases_out_of_memory(tmp_path: Path) -> None:
    lines = [line for line in UNIT.read_text().splitlines() if line.startswith("Environment=")]
    text = " ".join(line.removeprefix("Environment=") for line in lines)
    for place, name in (("%S", "disk"), ("%t", "memory")):
        text = text.replace(place, str(tmp_path / name))
    environment = dict(each.split("=", 1) for each in text.split())
    for key in ("HOME", "TMPDIR"):
        Path(environment[key]).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", FIND_TEMPORARY_DATABASE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"{tmp_path}/disk/rolloutd/etilqs_" in done.stdout
    assert str(tmp_path / "memory") not in done.stdout
