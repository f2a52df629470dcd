"""A gentle verification continues after a restart where it was, and is right about what it finds."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from machines.model.events import HoldReleased, HoldTaken, NodesDiscovered
from machines.model.rollout import Hold
from rolloutd.store import SqliteBackend, audit_comparison, compare_with_audit, open_store
from rolloutd.store.audit_comparison import ComparisonStopped
from rolloutd.store.backend import ChainRow, Connection
from rolloutd.store.sqlite import database
from rolloutd.store.sqlite.backend import COMPARISON_FILE
from tests.contracts.store_backends import ALICE, node, plan_of, rollout_opened, write

SLICE, ENTRIES = 5, 32


class WatchedBackend(SqliteBackend):
    """A backend that notes after which entries it was asked to read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read_after: list[int] = []

    def read_chain(self, connection: Connection, table: str, after: int, limit: int) -> Sequence[ChainRow]:
        self.read_after.append(after)
        return super().read_chain(connection, table, after, limit)


@pytest.fixture
async def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WatchedBackend:
    monkeypatch.setattr(audit_comparison, "SLICE", SLICE)
    store = await open_store(tmp_path, compile_plan=plan_of, inline=True)
    await write(store, NodesDiscovered((node("n1"), node("n2"))))
    await write(store, rollout_opened())
    for number in range((ENTRIES - 2) // 2):
        await write(store, HoldTaken(Hold("n1", "test", f"h{number}", ALICE, "busy", 1.0, None)))
        await write(store, HoldReleased("n1", "test", f"h{number}", ALICE, 2.0))
    await store.close()
    return WatchedBackend(tmp_path / database.FILE_NAME)


def after_slices(count: int, do: Callable[[], bool]) -> Callable[[], bool]:
    slices = iter(range(1, count))
    return lambda: next(slices, None) is None and do()


def stop(backend: WatchedBackend, slices: int = 3) -> None:
    with pytest.raises(ComparisonStopped):
        compare_with_audit(backend, gently=True, is_stopping=after_slices(slices, lambda: True))
    backend.read_after.clear()


def comparison_file(backend: WatchedBackend) -> Path:
    return backend.path.with_name(COMPARISON_FILE)


async def test_stopped_verification_continues_where_it_was(backend: WatchedBackend) -> None:
    stop(backend)
    report = compare_with_audit(backend, gently=True)
    assert (report.ok, report.chain.entries) == (True, ENTRIES)
    assert backend.read_after == [15, 20, 25, 30]
    assert not comparison_file(backend).exists()
    compare_with_audit(backend, gently=True)
    assert backend.read_after[4:] == [0, 5, 10, 15, 20, 25, 30], "the next one is whole"


async def test_killed_verification_continues_where_it_was(backend: WatchedBackend) -> None:
    pid = os.fork()
    if not pid:
        compare_with_audit(backend, gently=True, is_stopping=after_slices(3, lambda: os._exit(0)))
    os.waitpid(pid, 0)
    assert compare_with_audit(backend, gently=True).ok
    assert backend.read_after == [15, 20, 25, 30]


async def test_verification_on_demand_is_whole(backend: WatchedBackend) -> None:
    stop(backend)
    assert compare_with_audit(backend).ok
    assert backend.read_after == [0, 5, 10, 15, 20, 25, 30]


@pytest.mark.parametrize("seq", [18, ENTRIES])
async def test_entry_altered_after_resumption_is_found(backend: WatchedBackend, seq: int) -> None:
    stop(backend)
    with closing(sqlite3.connect(backend.path)) as connection, connection:
        connection.execute("UPDATE audit SET entry = replace(entry, 'test', 'best') WHERE seq = ?", (seq,))
    assert compare_with_audit(backend, gently=True).chain.first_bad == seq


async def test_row_altered_meanwhile_is_found(backend: WatchedBackend) -> None:
    stop(backend)
    with closing(sqlite3.connect(backend.path)) as connection, connection:
        connection.execute("UPDATE target SET team = 'other' WHERE node = 'n1'")
    (row,) = compare_with_audit(backend, gently=True).mismatches
    assert row.mismatch.subject == "target/r1/n1"


async def test_damaged_progress_is_begun_again(backend: WatchedBackend) -> None:
    stop(backend)
    comparison_file(backend).write_bytes(b"this is not a database")
    assert compare_with_audit(backend, gently=True).ok
    assert backend.read_after[0] == 0


async def test_export_in_between_begins_again_at_base(backend: WatchedBackend, tmp_path: Path) -> None:
    stop(backend)
    store = await open_store(tmp_path, compile_plan=plan_of, inline=True)
    await store.advance_audit_base(22, 9.0)
    while await store.remove_exported_entries(100):
        pass
    await store.close()
    report = compare_with_audit(backend, gently=True)
    assert (report.ok, report.chain.entries) == (True, ENTRIES)
    assert backend.read_after[-3:] == [22, 27, 32]
