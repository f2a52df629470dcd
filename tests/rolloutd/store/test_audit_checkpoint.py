"""What a checkpoint proves: no row that decisions use was changed while the daemon was down."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from machines.model.events import (
    FreezeStarted,
    HoldTaken,
    NodesDiscovered,
    RecordsPruned,
    RolloutCancelled,
    RolloutEnded,
    StepRecorded,
)
from machines.model.rollout import Hold
from machines.model.step_record import StepState
from machines.model.windows import Freeze
from machines.states import Phase, Trigger
from rolloutd.admin.disk import check_database
from rolloutd.errors import Conflict
from rolloutd.store import SqliteBackend, Store, open_store
from rolloutd.store.audit_checkpoint import verify_audit_checkpoint
from rolloutd.store.schema import KEYS
from rolloutd.store.signing_key import KEY_FILE
from rolloutd.store.sqlite import database
from tests.contracts.store_backends import (
    ALICE,
    moves_to_done,
    node,
    phase_moved,
    plan_of,
    rollout_opened,
    step,
    write,
)
from tests.rolloutd.store.test_audit_comparison import COMPARED, change_cell, write_history


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a database with a row in each table, whose sums followed every write."""
    state_dir = tmp_path_factory.mktemp("state")
    asyncio.run(write_history(state_dir))
    return state_dir / database.FILE_NAME


@pytest.fixture
def forge(written: Path, tmp_path: Path) -> Callable[[str], str]:
    """Return a function that changes a copy by SQL and returns what the checkpoint finds."""
    copy = tmp_path / database.FILE_NAME
    key = written.with_name(KEY_FILE).read_bytes()

    def run(script: str) -> str:
        copy.unlink(missing_ok=True)
        with closing(sqlite3.connect(written)) as source, closing(sqlite3.connect(copy)) as edited:
            source.backup(edited)
            edited.execute("PRAGMA ignore_check_constraints = ON")
            edited.executescript(script)
        with closing(sqlite3.connect(copy, isolation_level=None)) as connection:
            return verify_audit_checkpoint(connection, key).problem

    return run


async def opened(state_dir: Path) -> Store:
    return await open_store(state_dir, compile_plan=plan_of, inline=True)


async def problem_after(state_dir: Path, script: str) -> str:
    """Return what the next start finds after a user's SQL."""
    with closing(sqlite3.connect(state_dir / database.FILE_NAME)) as connection:
        connection.executescript(script)
    store = await opened(state_dir)
    problem = (await store.verify_audit_checkpoint()).problem
    await store.close()
    return problem


def test_sums_follow_every_event(forge: Callable[[str], str]) -> None:
    assert forge("") == ""


@pytest.mark.parametrize(("table", "column"), COMPARED)
def test_forged_cell_noticed(forge: Callable[[str], str], table: str, column: str) -> None:
    assert forge(change_cell(table, column)) != ""


@pytest.mark.parametrize("table", KEYS)
def test_deleted_rows_noticed(forge: Callable[[str], str], table: str) -> None:
    assert forge(f"DELETE FROM {table}") != ""


def test_hidden_live_rollout_noticed(forge: Callable[[str], str]) -> None:
    hidden = (
        "UPDATE rollout SET ended_at = 1; UPDATE target SET phase = 'done', isolated = 0, order_kind = NULL,"
        " outcome = 'changed'"
    )
    assert forge(hidden) == "rows of the table rollout differ from those that were signed"


async def test_hidden_cancelled_rollout_noticed(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await write(store, rollout_opened(), *moves_to_done("n1")[:2])
    await write(store, RolloutCancelled("r1", ALICE, "no", 20.0))
    await store.close()
    script = "UPDATE target SET phase = 'done', outcome = 'changed', isolated = 0"
    assert "rows of rollout r1" in await problem_after(tmp_path, script)


async def test_closed_rollout_made_live_noticed(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await write(store, rollout_opened(nodes=("n1",)), *moves_to_done("n1"))
    await write(store, RolloutCancelled("r1", ALICE, "no", 20.0))
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await write(store, NodesDiscovered((node("n1"),), {}))
    await store.close()
    assert "rows of rollout r1" in await problem_after(tmp_path, "UPDATE target SET isolated = 1")


async def test_entry_altered_at_the_end_noticed(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await write(store, FreezeStarted(Freeze("f1", "all", "sale", "alice", 8.0)))
    await store.close()
    script = "UPDATE audit SET entry = replace(entry, 'sale', 'fair')"
    assert await problem_after(tmp_path, script) == "entry 1 was altered"


async def test_audit_cut_at_the_end_noticed(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    for name in ("f1", "f2"):
        await write(store, FreezeStarted(Freeze(name, "all", "sale", "alice", 8.0)))
    await store.close()
    (tmp_path / "newest-commit").unlink()
    assert "the newest entry is 1" in await problem_after(tmp_path, "DELETE FROM audit WHERE seq = 2")


async def test_record_of_earlier_commit_not_trusted(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await write(store, HoldTaken(Hold("n1", "person", "alice", ALICE, "disk", 7.0)))
    with closing(sqlite3.connect(tmp_path / database.FILE_NAME)) as connection:
        (old,) = connection.execute("SELECT quote(content) || ',' || quote(signature) FROM audit_checkpoint")
    await write(store, HoldTaken(Hold("n2", "person", "alice", ALICE, "disk", 7.0)))
    await store.close()
    script = (
        f"UPDATE audit_checkpoint SET (content, signature) = ({old[0]}); DELETE FROM hold WHERE node = 'n2'"
    )
    assert "the newest entry is 2, but 1 was signed" in await problem_after(tmp_path, script)


async def test_record_signed_by_another_key_refused(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await store.close()
    (tmp_path / KEY_FILE).unlink()
    assert await problem_after(tmp_path, "") == "its signature is of another key"
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600


async def test_foreign_record_not_carried_on(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await store.close()
    (tmp_path / KEY_FILE).unlink()
    store = await opened(tmp_path)
    await write(store, FreezeStarted(Freeze("f1", "all", "sale", "alice", 8.0)))
    assert (await store.verify_audit_checkpoint()).problem == "its signature is of another key"
    await store.sign_audit_checkpoint(2.0, all_rows=True)
    assert (await store.verify_audit_checkpoint()).problem == ""
    await store.close()


async def test_refused_transaction_leaves_sums(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await write(store, rollout_opened())
    moved = phase_moved("n1", Trigger.ADMITTED, Phase.PENDING, Phase.ISOLATING)
    with pytest.raises(Conflict):
        await write(store, StepRecorded(step(StepState.OK, "n2")), moved, moved)
    assert (await store.verify_audit_checkpoint()).problem == ""
    await write(store, moved)
    assert (await store.verify_audit_checkpoint()).problem == ""
    await store.close()


async def test_sums_of_older_rows_computed_when_needed(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await write(store, rollout_opened(), *moves_to_done("n1")[:1])
    await write(store, StepRecorded(step(StepState.OK, "n1")), StepRecorded(step(StepState.OK, "n2")))
    assert (await store.verify_audit_checkpoint()).problem == "the database has none"
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await write(store, StepRecorded(step(StepState.OK, "n2", number=2)), *moves_to_done("n2")[:1])
    assert (await store.verify_audit_checkpoint()).problem == ""
    await store.close()
    assert "steps of n2" in await problem_after(tmp_path, "DELETE FROM step WHERE node = 'n2' AND number = 1")


async def test_dropped_checkpoint_stays_away(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await store.drop_audit_checkpoint()
    await write(store, FreezeStarted(Freeze("f1", "all", "sale", "alice", 8.0)))
    await store.close()
    assert await problem_after(tmp_path, "") == "the database has none"


async def test_removed_records_leave_sums(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await write(store, rollout_opened(nodes=("n1",)), *moves_to_done("n1"))
    await write(store, StepRecorded(step(StepState.OK, output="hello")), RolloutEnded("r1", 20.0))
    await store.remove_step_output("r1", 9)
    assert (await store.verify_audit_checkpoint()).problem == ""
    for nodes in (("n1",), ()):
        await write(store, RecordsPruned("r1", nodes, 1.0, 30.0))
        assert (await store.verify_audit_checkpoint()).problem == ""
    await store.sign_audit_checkpoint()
    assert (await store.verify_audit_checkpoint()).problem == ""
    await store.close()


async def test_file_shrinks_when_records_are_removed(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    nodes = [f"n{number}" for number in range(2000)]
    await write(store, rollout_opened(nodes=nodes), RolloutCancelled("r1", ALICE, "no", 20.0))
    before = await store.measure(30.0)
    await write(store, RecordsPruned("r1", tuple(nodes), 1.0, 30.0), RecordsPruned("r1", (), 1.0, 30.0))
    assert (await store.measure(30.0)).free_bytes > 0
    while await store.release_space():
        pass
    after = await store.measure(30.0)
    assert (after.free_bytes, after.entries, after.closed_rollouts) == (0, before.entries + 2, 0)
    assert after.file_bytes < before.file_bytes
    await store.close()


def test_backup_has_no_key(written: Path, tmp_path: Path) -> None:
    assert (
        SqliteBackend(tmp_path / "rolloutd.sqlite").load_signing_key()
        != written.with_name(KEY_FILE).read_bytes()
    )


async def test_doctor_says_what_is_signed(tmp_path: Path) -> None:
    store = await opened(tmp_path)
    await store.sign_audit_checkpoint(1.0, all_rows=True)
    await write(store, FreezeStarted(Freeze("f1", "all", "sale", "alice", 8.0)))
    await store.close()
    results, _ = check_database(tmp_path)
    (kept,) = [each.text for each in results if each.subject == "growth"]
    assert kept.startswith("1 audit entry since ")
    assert "0 closed rollouts (keep.records)" in kept
    (found,) = [each.text for each in results if each.subject == "audit"]
    assert found.startswith("entry 1 and the rows that decisions use are as they were signed; the whole was")
    (tmp_path / KEY_FILE).unlink()
    results, _ = check_database(tmp_path)
    (found,) = [each.text for each in results if each.subject == "audit checkpoint"]
    assert found.startswith("not trusted: the key that signs it is not there")
    assert not (tmp_path / KEY_FILE).exists()
